"""The `tune` command as a user runs it: real compiler, real children, real clock."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import KERNELS, ROOT, WAIT_S

from tuner.records import Measurement, Rejection
from tuner.store import open_stores

OWN = ("--kernels", str(KERNELS), "--device", "cpu")

FAULTS = {
    "none": "timed",
    "refuse": "compile",
    "compile_hang": "timeout",
    "throw": "runtime",
    "abort": "runtime",
    "segfault": "runtime",
    "hang": "timeout",
    "exit": "runtime",
    "write_past_end": "correctness",
    "write_before_start": "correctness",
    "leave_nan": "correctness",
    "wrong_by_one": "correctness",
    "change_input": "correctness",
    "allocate": "runtime",
    "flood": "timeout",
    "third_call": "runtime",
}


def trials_of(folder: Path):
    return [trial for store in open_stores(folder / ".tuner") for trial in store.trials]


def children_of(folder: Path) -> list[str]:
    """Return the processes that mention a folder, such as those that a run there started."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if str(folder) in line]


def imports(folder: Path, code: str) -> str:
    """Return what code prints that imports the frozen package and nothing of the tuner."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_ends_in_a_package_that_works(tune, tmp_path):
    done = tune("scale", *OWN, "--budget", "12trials")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "import: from kernels_generated import scale" in done.stdout
    assert "export: tune export" in done.stdout
    assert "torch.mul" in done.stdout
    code = (
        "import torch; from kernels_generated import scale; x = torch.randn(1003);"
        "assert torch.equal(scale(x), 2 * x); assert torch.equal(scale(x, factor=3.0), 3 * x);"
        "print(scale.chosen(N=100000))"
    )
    assert "exact" in imports(tmp_path, code)


def test_a_budget_that_is_short_for_its_workloads_is_said_to_be(tune):
    sizes = ("--workload", "N=1000", "--workload", "N=2000")
    printed = tune("scale", *OWN, *sizes, "--budget", "4s").stdout
    assert "2 s for each of 2 workloads is short for a search: --budget 20s" in printed


@pytest.mark.alone
def test_the_winner_beats_a_default_that_wastes_time(tune, tmp_path):
    done = tune("scale", *OWN, "--budget", "12trials", "--json")
    (winner,) = json.loads(done.stdout)
    assert winner["gain"]["low"] > 1.5
    assert winner["default_candidate"]["parameters"]["WASTE"] == 4
    assert winner["candidate"]["parameters"]["WASTE"] == 0
    assert winner["rival"] == "torch.mul"


def test_hostile_variants_are_rejected_and_the_run_goes_on(tune, tmp_path):
    done = tune("hostile", *OWN, "--budget", "99trials", "--timeout", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = {
        dict(trial.candidate.parameters)["FAULT"]: getattr(trial.outcome, "stage", "timed")
        for trial in trials_of(tmp_path)
    }
    assert outcomes == FAULTS
    assert children_of(tmp_path) == []
    explained = tune("explain", "--kernel", "hostile").stdout
    assert "killed by SIGSEGV" in explained
    assert "changed x" in explained


def test_who_is_wrong_on_odd_shapes_wins_no_final(tune, tmp_path):
    done = tune("tempting", *OWN, "--budget", "99trials", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (winner,) = json.loads(done.stdout)
    assert winner["candidate"]["parameters"]["PASSES"] == 3
    # all five are faster, and only four race at a time
    rejected = [trial for trial in trials_of(tmp_path) if isinstance(trial.outcome, Rejection)]
    assert len(rejected) == 5
    assert all(dict(trial.candidate.parameters)["FORGETS"] for trial in rejected)
    assert {trial.outcome.stage for trial in rejected} == {"correctness"}


def test_the_same_command_continues(tune, tmp_path):
    tune("scale", *OWN, "--budget", "6trials")
    first = trials_of(tmp_path)
    done = tune("scale", *OWN, "--budget", "6trials")
    both = trials_of(tmp_path)
    assert f"{len(first)} trials are known" in done.stdout
    assert both[: len(first)] == first
    assert len(both) > len(first)
    assert len({trial.source_sha256 for trial in both}) == len(both)
    fresh = tune("scale", *OWN, "--budget", "3trials", "--fresh")
    assert "are known" not in fresh.stdout


def test_a_final_far_slower_than_the_search_says_so(tune, tmp_path):
    tune("scale", *OWN, "--budget", "4trials")
    (store,) = (tmp_path / ".tuner").glob("*/trials.jsonl")
    text = re.sub(
        r'"(median_ms|low_ms|high_ms)": ([^,}]+)',
        lambda found: f'"{found[1]}": {float(found[2]) / 50}',
        store.read_text(),
    )
    store.write_text(text)
    done = tune("scale", *OWN, "--budget", "1trials", "--json")
    assert done.returncode == 0
    (winner,) = json.loads(done.stdout)
    assert re.search(r"took .* ms in the search and takes .* ms in its final", winner["disturbed"])
    assert "tune again when it is quiet" in done.stderr


def test_a_workload_too_short_for_the_clock_costs_itself_alone(tune, tmp_path):
    sizes = ("--workload", "N=1", "--workload", "N=100000")
    done = tune("scale", *OWN, *sizes, "--budget", "4trials", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    short, winner = json.loads(done.stdout)
    assert "too short" in short["reason"]
    assert dict(winner["workload"]["dims"]) == {"N": 100000}
    imports(tmp_path, "import torch; from kernels_generated import scale; scale(torch.ones(3))")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tuner", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a test run in the background ignores interrupts, and its children would, too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_kill_loses_no_finished_trial_and_breaks_no_package(tune, tmp_path, kills):
    moments = random.Random(kills)
    reported = 0
    for _ in range(kills):
        process = start(tmp_path, "scale", *OWN, "--budget", "8trials")
        time.sleep(moments.uniform(0.5, 12.0))
        process.kill()
        printed, _ = process.communicate()
        reported += len(re.findall(r"^  trial ", printed, re.MULTILINE))
        if (tmp_path / ".tuner").exists() and reported:
            assert len(trials_of(tmp_path)) >= reported
        if (tmp_path / "kernels_generated" / "__init__.py").exists():
            imports(tmp_path, "import kernels_generated")
    deadline = time.monotonic() + WAIT_S  # a child is killed with its parent, not before it
    while children_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children_of(tmp_path) == []
    done = tune("scale", *OWN, "--budget", "3trials")
    assert done.returncode == 0, done.stdout + done.stderr
    imports(tmp_path, "import torch; from kernels_generated import scale; scale(torch.ones(3))")


def test_an_interrupt_freezes_the_best_so_far(tmp_path):
    process = start(tmp_path, "scale", "hostile", *OWN, "--budget", "120s")
    for line in process.stdout:
        if "trial 3" in line:
            break
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1  # one workload was not begun
    assert "import: from kernels_generated import" in printed
    assert "Traceback" not in printed
    assert children_of(tmp_path) == []


def test_an_interrupt_before_anything_was_timed_says_so(tmp_path):
    shutil.copytree(KERNELS, tmp_path / "own")
    space = tmp_path / "own" / "search_spaces" / "hostile.yaml"
    space.write_text(space.read_text().replace("{FAULT: none}", "{FAULT: compile_hang}"))
    own = ("--kernels", "own", "--device", "cpu")
    process = start(tmp_path, "hostile", *own, "--budget", "120s", "--timeout", "100")
    for line in process.stdout:
        if "candidates" in line:
            break
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "none: interrupted" in " ".join(printed.replace("│", " ").split()), printed


def test_an_interrupt_in_the_final_freezes_what_won_before(tmp_path):
    two = ("--workload", "N=1000", "--workload", "N=2000")
    process = start(tmp_path, "scale", *OWN, *two, "--budget", "3trials")
    finals = 0
    for line in process.stdout:
        finals += "race against" in line
        if finals == 2:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_S)
    assert process.returncode in (0, 1)  # 0 if the final was over before the interrupt came
    imports(tmp_path, "import torch; from kernels_generated import scale; scale(torch.ones(3))")


def test_two_runs_share_a_store(tmp_path):
    runs = [
        start(tmp_path, "scale", *OWN, "--budget", "6trials", "--seed", str(seed))
        for seed in range(2)
    ]
    for process in runs:
        printed, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, printed
    trials = trials_of(tmp_path)
    assert [trial.number for trial in trials] == list(range(len(trials)))
    assert sum(isinstance(trial.outcome, Measurement) for trial in trials) >= 6


@pytest.mark.parametrize("command", [["list"], ["render", "matmul"]])
def test_what_needs_no_device_loads_no_torch_and_is_quick(command):
    code = (
        "import sys; from tuner.cli.main import main\n"
        f"try: main({command})\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'triton', 'optuna', 'pandas'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "unknown kernel 'nope'; known: "),
        (("scale", "--budget", "soon"), "--budget 'soon': write seconds"),
        (("scale", "--workload", "N=3,M=4"), "M"),
        (("scale", "--workload", "N=minus"), "N=minus is not a whole number"),
        (("scale", "--workload", f"N={2**63}"), "is more than a variant can be told"),
        (("hepl",), "`tune --help` lists the commands"),
        (("scale", "--workloads", "huge"), "scale has no workloads 'huge'; it has: starter"),
        (("--workload", "N=3"), "--workload 'N=3' needs one KERNEL"),
        (("scale", "--device", "tpu"), "unknown device 'tpu'; known: "),
        (("scale", "--output", "tests"), "tests"),
    ],
)
def test_bad_input_is_one_line_that_says_what_is_allowed(refused, tmp_path, arguments, message):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "precious.txt").touch()
    said = refused(*OWN[: 2 if "tpu" in arguments else 4], *arguments)
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "kernels_generated").exists()
