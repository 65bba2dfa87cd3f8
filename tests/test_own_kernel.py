"""A kernel of one's own that is not right yet: what is wrong is a line, wherever it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import KERNELS

from tuner.catalog import Catalog
from tuner.children.child import child_spec
from tuner.children.task import Task
from tuner.children.worker import Workers
from tuner.cli.main import main
from tuner.devices.cpu import Cpu
from tuner.records import ChildError, Rejection, Source, Workload
from tuner.space.kernel import load_space

SPACE = (KERNELS / "search_spaces" / "scale.yaml").read_text()
TEMPLATE = (KERNELS / "templates" / "scale" / "cpu.cpp.j2").read_text()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(KERNELS, tmp_path / "own")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("kernel: scale", "kernel: scala", "kernel: must be 'scale', like the file, but got 'sc"),
        ("devices: [cpu]", "devices: [gpu]", "templates.cpu.devices: unknown device 'gpu'; known"),
        ("UNROLL <= 4 or THREADS", "UNROLL % 8", "`UNROLL % 8` must be true or false, but is 1"),
        ("UNROLL <= 4 or THREADS", "UNROL <= 4", "unknown name 'UNROL'"),
    ],
)
def test_a_search_space(own: Path, capsys, right: str, wrong: str, said: str) -> None:
    assert right in SPACE
    (own / "search_spaces" / "scale.yaml").write_text(SPACE.replace(right, wrong))
    error = refused(capsys, "show", "scale", "--kernels", "own", "--device", "cpu")
    assert "scale.yaml: " in error and said in error and error.count("\n") == 1


def test_a_language_that_the_device_does_not_run(own: Path, capsys) -> None:
    (own / "search_spaces" / "scale.yaml").write_text(SPACE.replace("cpp", "triton"))
    error = refused(capsys, "run", "scale", "--kernels", "own", "--device", "cpu")
    assert "no template for 'cpu', which runs cpp; it has: cpu (triton) for cpu" in error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{{ 1 / 0 }}", "cpu(THREADS=false, UNROLL=1, WASTE=4): ZeroDivisionError"),
        (b"{{ 'a' + 1 }}", "TypeError"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (b"{% if %}", "cpu.cpp.j2:1: "),
        (b"{{ UNROL }}", "'UNROL' is undefined; known: THREADS, UNROLL, WASTE"),
    ],
)
def test_a_template_that_does_not_render(own: Path, capsys, content: bytes, said: str) -> None:
    (own / "templates" / "scale" / "cpu.cpp.j2").write_bytes(content)
    error = refused(capsys, "render", "scale", "--kernels", "own")
    assert "templates/scale/cpu.cpp.j2" in error and said in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Workers:
    store = tmp_path_factory.mktemp("store")
    with Workers(
        child_spec("cpu", store, dict(os.environ)), jobs=1, sources=store / "sources"
    ) as found:
        yield found


def task(extent: int) -> Task:
    catalog = Catalog([KERNELS])
    signature = load_space(catalog.space_path("scale")).signature
    workload = Workload("scale", (("N", extent),), "float32")
    return Task(signature.to_json(), catalog.problem_path("scale"), workload, Cpu().info())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", 'it has no function scale: write extern "C" void scale(...)'),
        ("void scale() {}", 'it has no function scale: write extern "C" void scale(...)'),
        ('void gone(); extern "C" void scale() { gone(); }', "undefined symbol"),
        ("int main( {", "error: "),
    ],
)
def test_a_source_that_cannot_be_called(workers: Workers, text: str, reason: str) -> None:
    source = Source("scale", "cpp", text)
    outcome = workers.compile(task(8), source).result()
    if not isinstance(outcome, Rejection):
        outcome = workers.evaluate(task(8), source, outcome, give_up_ms=None)
    assert isinstance(outcome, Rejection)
    assert outcome.stage == "compile"
    assert reason in outcome.reason


def test_a_workload_that_no_memory_holds(workers: Workers) -> None:
    source = Source("scale", "cpp", 'extern "C" void scale() {}')
    compiled = workers.compile(task(8), source).result()
    assert not isinstance(compiled, Rejection)
    with pytest.raises(
        ChildError, match=r"the input x of \[1000000000000000\], .* cannot be"
    ) as e:
        workers.evaluate(task(10**15), source, compiled, give_up_ms=None)
    assert "\n" not in str(e.value)


PLAIN = """#include <cstdint>
extern "C" void scale(const float* x, float* y, int64_t N, double factor) {
  for (int round = 0; round < ROUNDS; ++round)
    for (int64_t i = 0; i < N; ++i) {
      y[i] = static_cast<float>(factor) * x[i];
      asm volatile("" : : "r"(y) : "memory");
    }
}
"""


def test_times_beside_a_pacer_are_in_units_of_what_it_usually_takes(workers: Workers) -> None:
    """The pacer is said to take ten times what it does, as on a device that got faster."""
    usual = task(200_000)
    once, four = (Source("scale", "cpp", PLAIN.replace("ROUNDS", rounds)) for rounds in ("1", "4"))
    built = [workers.compile(usual, source).result() for source in (once, four)]
    alone = workers.evaluate(usual, once, built[0], give_up_ms=None)
    usual_ms = 10 * alone.median_ms
    for _ in range(2):  # the second finds it at hand
        paced = workers.evaluate(usual, four, built[1], give_up_ms=usual_ms, pacer=once)
        assert paced.median_ms == pytest.approx(4 * usual_ms, rel=0.3)
    assert workers.evaluate(usual, four, built[1], give_up_ms=None).median_ms < usual_ms


@pytest.mark.parametrize("text", ["int main( {", PLAIN.replace("ROUNDS", "0")])
def test_a_pacer_that_cannot_be_timed_is_done_without(workers: Workers, text: str) -> None:
    usual, source = task(200_000), Source("scale", "cpp", PLAIN.replace("ROUNDS", "2"))
    built = workers.compile(usual, source).result()
    alone = workers.evaluate(usual, source, built, give_up_ms=None)
    broken = Source("scale", "cpp", text)
    found = workers.evaluate(usual, source, built, give_up_ms=alone.median_ms, pacer=broken)
    assert found.median_ms == pytest.approx(alone.median_ms, rel=0.3)
