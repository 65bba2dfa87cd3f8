"""The report: from a real store, opened in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import emulate, open_browser
from conftest import KERNELS, ROOT, WAIT_S

from tuner.catalog import Catalog
from tuner.cli.report import probed_ceilings, write_report
from tuner.cost import Cost
from tuner.evidence.card import DeviceCard, Finding
from tuner.evidence.results import DeviceFacts
from tuner.records import Candidate, Measurement, Rejection, Trial, UsageError, Workload
from tuner.report.ceilings import Ceilings, ceilings_of
from tuner.report.chapters import Chapter
from tuner.report.figure import amount_text, time_text
from tuner.report.insight import importances, progress, rejected_regions
from tuner.store import Store

WORKLOAD = Workload("scale", (("N", 3),), "float32")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuner", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


PARAMETERS = """
      FAULT: [none, refuse, wrong_by_one]
      TILE: [1, 2, 4, 8, 16, 32, 64, 128, 256]
    default: {FAULT: none, TILE: 1}
"""


def write(source: Path, output: Path, against: Path | None = None) -> None:
    catalog = Catalog([KERNELS])
    write_report(source, output, against=against, catalog=catalog, environment=dict(os.environ))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """Tune for real, with candidates that are rejected at several stages."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(KERNELS, folder / "own", ignore=shutil.ignore_patterns("__pycache__"))
    space = folder / "own" / "search_spaces" / "hostile.yaml"
    text = re.sub(r"\n +FAULT.*?default:[^\n]*\n", PARAMETERS, space.read_text(), flags=re.DOTALL)
    space.write_text(text)
    template = folder / "own" / "templates" / "hostile" / "cpu.cpp.j2"
    template.write_text("// TILE={{ TILE }}\n" + template.read_text())
    done = run(
        *(folder, "hostile", "--kernels", "own", "--device", "cpu", "--jobs", "1"),
        *("--workload", "N=65536", "--workload", "N=100000", "--budget", "8s"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def page(tuned) -> Path:
    done = run(tuned, "report", "--kernels", "own", "--against", "kernels_generated")
    assert done.returncode == 0, done.stderr
    return tuned / "report.html"


class Ids(HTMLParser):
    """Collects what a page defines and refers to, and whether its elements are closed."""

    VOID = ("meta", "link", "br", "input", "img", "wbr")

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.opened: list[str] = []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        names = ("href", "src", "aria-labelledby")
        self.references += [values[name] for name in names if name in values]
        if tag not in self.VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else(page):
    text = page.read_text()
    assert len(text.encode()) < 2_000_000
    ids = Ids()
    ids.feed(text)
    assert ids.opened == []
    assert len(set(ids.ids)) == len(ids.ids)
    targets = {item.removeprefix("#") for item in ids.references if item != "data:,"}
    assert targets <= set(ids.ids)
    assert "hostile-n-100000-dtype-float32-" in " ".join(targets)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.?http", text)


def test_what_a_report_tells(page):
    text = page.read_text()
    for words in (
        *("What was gained", "The roofline", "The final", "Best so far, over trials"),
        *("Best so far, over time", "The candidates", "Source of the winner"),
        *("Provenance", "Against kernels_generated", "torch.clone"),
        "tune hostile --workload N=100000",
    ):
        assert words in text, words


@pytest.mark.parametrize("kernels", ["softmax", pytest.param("*", marks=pytest.mark.slow)])
def test_a_package_has_a_report_too(tmp_path, kernels):
    frozen, copy = ROOT / "kernels_generated", tmp_path / "frozen"
    shutil.copytree(frozen / "_runtime", copy / "_runtime")
    for folder in frozen.glob(f"{kernels}/kernel.json"):
        shutil.copytree(folder.parent, copy / folder.parent.name)
    write(copy, tmp_path / "deep" / "page.html")
    text = (tmp_path / "deep" / "page.html").read_text()
    assert len(text.encode()) < (3_000_000 if kernels == "*" else 2_000_000)
    assert "NVIDIA H200" in text
    assert "M=4096 N=16384 bfloat16" in text
    assert "Best so far" not in text
    assert not list(tmp_path.rglob("*.part"))


def test_a_store_without_a_final_and_with_hostile_text(tmp_path):
    store = Store(tmp_path / ".tuner", "arch")
    wrong = Rejection("compile", "</script><script>alert(1)</script> [/b] {{ 1 }}")
    times = [measured(1.0), *(measured(0.5 + 0.1 * place) for place in range(9)), wrong]
    for tile, outcome in enumerate(times):
        candidate = Candidate.of("<cpu>", {"TILE": tile // 2, "trial": "a,b"})
        store.add_trial(WORKLOAD, candidate, f"{tile}", outcome, seconds=0.1)
    write(tmp_path / ".tuner", tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert "There is no winner yet" in text
    assert "The best of 11 trials took 500 µs." in text
    assert "What matters" in text
    assert "1 of 11 trials, by stage" in text
    assert "TILE = 5" in text
    assert "<script>alert" not in text
    ids = Ids()
    ids.feed(text)
    assert ids.opened == []


@pytest.mark.parametrize(
    ("source", "output", "against", "message"),
    [
        ("nowhere", "page.html", None, "nowhere: there is no such store or package"),
        ("empty", "page.html", None, "empty: there are no trials; run `tune` first"),
        (".tuner", "empty", None, "empty: is a folder; name a file"),
        (".tuner", "page.html", "nowhere", "nowhere: there is no such store or package"),
        (".tuner", "file/page.html", None, "page.html: cannot be written: "),
    ],
)
def test_what_cannot_be_reported_leaves_nothing(tuned, tmp_path, source, output, against, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / ".tuner").symlink_to(tuned / ".tuner")
    other = tmp_path / against if against else None
    with pytest.raises(UsageError, match=message):
        write(tmp_path / source, tmp_path / output, against=other)
    assert not list(tmp_path.glob("*.html"))


def test_a_missing_library_is_named(tmp_path):
    code = (
        "import sys; sys.modules['altair'] = None; sys.argv = ['tune', 'report']\n"
        "from tuner.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "needs altair: install it with pip install 'tuner[report]'" in done.stderr


def test_the_page_works_in_a_browser(page, tmp_path):
    with open_browser(tmp_path / "profile") as browser:
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        emulate(browser, width=1280, dark=False)
        browser.get(page.as_uri())
        charts = browser.find_elements("css selector", ".chart")
        assert len(charts) >= 10
        for chart in charts:
            browser.execute_script("arguments[0].scrollIntoView()", chart)
            wait_until(lambda chart=chart: chart.get_attribute("data-state") == "drawn")
            assert chart.find_elements("css selector", "svg path")
            assert chart.size["width"] > 200
        check_sorting(browser)
        check_links(browser)
        shots = []
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            emulate(browser, width=width, dark=dark)
            browser.execute_script("scrollTo({top: 0})")
            overflow = "return document.documentElement.scrollWidth - innerWidth"
            assert browser.execute_script(overflow) <= 0
            assert (brightness(browser) < 60) == dark
            shots.append(browser.get_screenshot_as_png())
        assert min(map(len, shots)) > 10_000
        assert len(set(shots)) == 4
        assert browser.get_log("browser") == []


def wait_until(condition, seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def check_sorting(browser) -> None:
    """Sort the first table by the winners' times, with the keyboard, both ways."""
    table = browser.find_element("css selector", "#overview table")
    buttons = table.find_elements("css selector", "th button")
    (place,) = [place for place, item in enumerate(buttons, 1) if item.text == "winner"]
    orders = []
    for _ in range(2):
        buttons[place - 1].send_keys("\ue007")  # Enter
        cells = table.find_elements("css selector", f"td:nth-child({place})")
        orders.append([float(cell.get_attribute("data-number")) for cell in cells])
    assert orders[0] == sorted(orders[0]) != orders[1] == sorted(orders[0], reverse=True)
    heading = buttons[place - 1].find_element("xpath", "..")
    assert heading.get_attribute("aria-sort") == "descending"


def check_links(browser) -> None:
    at = "return arguments[0].getBoundingClientRect().top"
    for link in browser.find_elements("css selector", "#overview td a"):
        browser.execute_script("arguments[0].click()", link)
        target = link.get_attribute("href").partition("#")[2]
        section = browser.find_element("id", target)
        wait_until(lambda section=section: abs(browser.execute_script(at, section)) < 300)


def brightness(browser) -> int:
    colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    return max(map(int, re.findall(r"\d+", colour)[:3]))


def measured(time_ms: float) -> Measurement:
    return Measurement(time_ms, time_ms, time_ms, 5, "warm", 0.1)


def trial(number, parameters, outcome, *, seconds=1.0, ended_s=None):
    if isinstance(outcome, float):
        outcome = measured(outcome)
    candidate = Candidate.of("cpu", parameters)
    return Trial(number, WORKLOAD, candidate, f"{number}", outcome, seconds, ended_s)


def test_progress_counts_overlapping_trials_once_and_no_pauses():
    wrong = Rejection("correctness", "y[0] is wrong")
    trials = [
        trial(0, {"A": 1}, 2.0, seconds=3.0, ended_s=103.0),
        trial(1, {"A": 2}, wrong, seconds=3.0, ended_s=104.0),
        trial(2, {"A": 3}, 1.0, seconds=1.0, ended_s=500.0),
    ]
    steps = progress(trials)
    assert [step.elapsed_s for step in steps] == [3.0, 4.0, 5.0]
    assert [step.best_ms for step in steps] == [2.0, 2.0, 1.0]
    old = [trial(0, {"A": 1}, wrong), trial(1, {"A": 1}, 2.0)]
    assert [(step.elapsed_s, step.best_ms) for step in progress(old)] == [(1.0, None), (2.0, 2.0)]


def test_importances_find_the_parameter_that_decides():
    trials = [
        trial(8 * a + b, {"A": a, "B": b}, 1.0 + a + 0.01 * (b % 3))
        for a in range(4)
        for b in range(8)
    ]
    found = importances(trials)
    assert max(found, key=found.__getitem__) == "cpu.A"
    assert importances(trials[:5]) == {}


def test_rejected_regions_name_the_value_that_fails():
    trials = [
        trial(0, {"A": 1, "B": 1}, 1.0),
        trial(1, {"A": 1, "B": 2}, 1.0),
        trial(2, {"A": 2, "B": 1}, Rejection("compile", "too much shared memory\nmore")),
        trial(3, {"A": 2, "B": 2}, Rejection("timeout", "no reply")),
        trial(4, {"A": 2, "B": 3}, Rejection("compile", "too much shared memory")),
    ]
    first = rejected_regions(trials)[0]
    assert (first.parameter, first.value, first.trials, first.rejected) == ("A", 2, 3, 3)
    assert first.stages == (("compile", 2), ("timeout", 1))
    assert first.reason == "too much shared memory"


def test_numbers_are_spelled_with_three_digits():
    assert [time_text(ms) for ms in (0.0003, 0.0318, 1.0, 50.0, 999.6, 1234.0)] == [
        *("0.300 µs", "31.8 µs", "1.00 ms", "50.0 ms", "1000 ms", "1.23 s")
    ]
    assert amount_text(1.05e12, "B/s") == "1.05 TB/s"
    assert amount_text(2.68e8, "FLOP") == "268 MFLOP"
    ceilings = Ceilings(100.0, 10.0, "made up")
    assert [ceilings.at(intensity) for intensity in (1.0, 10.0, 100.0)] == [10.0, 100.0, 100.0]


def card(folder: Path, date: str, gbytes: float | None, name: str = "A Card") -> None:
    device = DeviceFacts(kind="cuda", name=name, arch="sm90", limits={}, versions={"torch": date})
    numbers = {"copy_bandwidth": gbytes, "rate_float16": 500.0, "rate_float32": 50.0}
    findings = {key: Finding(value=value, unit="", note="") for key, value in numbers.items()}
    made = DeviceCard(
        schema_version=1, tuner="1", date=date, seconds=1.0, device=device, findings=findings
    )
    (folder / f"{date}.json").write_text(made.model_dump_json())


def test_ceilings_are_those_of_the_latest_card_of_the_device(tmp_path):
    card(tmp_path, "2026-01-02", 20.0)
    card(tmp_path, "2026-01-03", None)  # could not be measured
    card(tmp_path, "2026-01-04", 40.0, name="Another Card")
    card(tmp_path, "2026-01-01", 10.0)
    (tmp_path / "damaged.json").write_text("{")
    probed = probed_ceilings(tmp_path)
    found = probed("sm90", "float32", {"A Card"})
    assert found is not None
    assert (found.flops_per_s, found.bytes_per_s) == (5e10, 2e10)
    assert "`tune probe` on A Card, 2026-01-02" in found.origin
    half = probed("sm90", "float16", set())
    assert half is not None
    assert (half.flops_per_s, half.bytes_per_s) == (5e11, 4e10)
    assert probed("sm80", "float32", set()) is None
    assert probed("sm90", "float32", {"A third"}) is None


def test_a_card_outweighs_what_was_reached():
    chapters = [Chapter("x", WORKLOAD, (trial(0, {}, 2.0),), cost=Cost(4e9, 2e9))]
    reached = ceilings_of(chapters, "x", "float32", lambda *_: None)
    assert reached is not None
    assert (reached.flops_per_s, reached.bytes_per_s) == (2e12, 1e12)
    card = Ceilings(1e15, 1e13, "its card")
    asked = []

    def probed(*question):
        asked.append(question)
        return card

    assert ceilings_of(chapters, "x", "float32", probed) == card
    assert asked == [("x", "float32", set())]
    assert ceilings_of(chapters, "y", "float32", lambda *_: None) is None
