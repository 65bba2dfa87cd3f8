"""`tune bench` and `tune compare`: what a file tells, and what is not compared."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tuner.cli.main import main
from tuner.evidence.compare import compare
from tuner.evidence.results import ResultsFile, read_results

PACKAGE = ROOT / "kernels_generated"
WORKLOAD = "M=1024,N=512"


@pytest.fixture
def here(capsys):
    """Run the command in this process, where it needs no children."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        return subprocess.CompletedProcess(arguments, end.value.code or 0, *capsys.readouterr())

    return run


def bench(tune, *arguments: str, package: Path = PACKAGE):
    fixed = ("--device", "cpu", "--package", str(package), "--budget", "0.5")
    return tune("bench", "softmax", *fixed, *arguments)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "tuner", "bench", "softmax", "--device", "cpu", "--rival"]
    command += ["--package", str(PACKAGE), "--budget", "0.5", "--workload", WORKLOAD]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--output", "a.json"], cwd=folder, env=environment, check=True)
    return folder / "a.json"


def changed(path: Path, folder: Path, change) -> Path:
    """Write a copy of a file with something in it changed."""
    data = json.loads(path.read_text())
    change(data)
    copied = folder / "b.json"
    copied.write_text(json.dumps(data))
    return copied


def test_a_file_says_what_was_measured_where_and_how(measured):
    file = read_results(measured)
    (times,) = file.workloads
    ours, rival = times.contenders
    assert file.device.kind == "cpu"
    assert file.device.versions["torch"]
    assert (times.bytes, times.flops) == (2 * 4 * 1024 * 512, 5 * 1024 * 512)
    assert times.noise[1] <= times.noise[0] <= times.noise[2]
    assert ours.low_ms <= ours.median_ms <= ours.high_ms
    assert ours.gbytes == pytest.approx(times.bytes / ours.median_ms * 1e-6, rel=1e-4)
    assert len(ours.times_ms) == len(rival.times_ms)
    assert rival.label == "torch.softmax"
    assert rival.source is None
    frozen = PACKAGE / ours.source.file
    assert hashlib.sha256(frozen.read_bytes()).hexdigest() == ours.source.sha256


def test_a_file_beside_itself_is_tied(here, measured):
    done = here("compare", str(measured), str(measured), "--json")
    rows = json.loads(done.stdout)
    again = next(row for row in rows[2:] if row["label"] == "tuner")
    assert again["ratio"] == 1
    assert again["ratio_low"] <= 1 <= again["ratio_high"]
    assert again["verdict"] == "tied"
    assert "torch.softmax" in here("compare", str(measured), str(measured)).stdout


def scaled(file: ResultsFile, factor: float) -> ResultsFile:
    """Return a file with every time scaled."""
    data = json.loads(file.model_dump_json())
    for contender in data["workloads"][0]["contenders"]:
        for name in ("median_ms", "low_ms", "high_ms"):
            contender[name] *= factor
        contender["times_ms"] = [factor * time_ms for time_ms in contender["times_ms"]]
    return ResultsFile.model_validate_json(json.dumps(data))


def test_the_ratio_holds_what_both_medians_leave_open(measured):
    file = read_results(measured)
    rows = compare([("a", file), ("b", scaled(file, 2.0))])
    slower = next(row for row in rows if row.file == "b" and row.label == "tuner")
    ours = file.workloads[0].contenders[0].median(0.975)
    assert slower.ratio.value == pytest.approx(2)
    assert slower.ratio.low == pytest.approx(2 * ours.low / ours.high)
    assert slower.ratio.high == pytest.approx(2 * ours.high / ours.low)
    assert slower.verdict == "slower"
    assert slower.efficiency == pytest.approx(50)


def test_a_difference_within_the_noise_floor_is_a_tie(measured):
    data = json.loads(measured.read_text())
    (times,) = data["workloads"]
    times["contenders"] = times["contenders"][:1]
    times["contenders"][0]["times_ms"] = [1.0] * 20
    times["noise"] = [1.03, 1.02, 1.04]
    first = ResultsFile.model_validate_json(json.dumps(data))
    times["contenders"][0]["times_ms"] = [1.05] * 20
    near = ResultsFile.model_validate_json(json.dumps(data))
    times["contenders"][0]["times_ms"] = [1.07] * 20
    far = ResultsFile.model_validate_json(json.dumps(data))
    rows = compare([("a", first), ("near", near), ("far", far)])
    assert [row.verdict for row in rows] == ["reference", "tied", "slower"]


def other_workload(data):
    data["workloads"][0]["workload"] = "M=7,N=7,dtype=float32"


def other_kernel(data):
    data["workloads"][0]["kernel"] = "matmul"


def other_caches(data):
    protocol = data["workloads"][0]["protocol"]
    protocol["caches"] = "warm" if protocol["caches"] == "cold" else "cold"


def other_clock(data):
    data["workloads"][0]["protocol"]["clock"] = "sundial"


def more_workloads(data):
    more = copy.deepcopy(data["workloads"][0])
    more["workload"] = "M=9,N=9,dtype=float32"
    data["workloads"].append(more)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (other_workload, ["M=1024,N=512", "M=7,N=7"]),
        (other_kernel, ["softmax", "matmul"]),
        (other_caches, ["warm caches", "cold caches"]),
        (other_clock, ["host clock", "sundial"]),
        (more_workloads, ["M=9,N=9", "none"]),
    ],
)
def test_what_cannot_be_compared_is_named(here, measured, tmp_path, change, named):
    done = here("compare", str(measured), str(changed(measured, tmp_path, change)))
    assert done.returncode == 2
    assert done.stderr.startswith("tune: ")
    assert [name for name in named if name not in done.stderr] == []


def no_median(data):
    del data["workloads"][0]["contenders"][0]["median_ms"]


def no_times(data):
    data["workloads"][0]["contenders"][0]["times_ms"] = []


def infinite(data):
    data["workloads"][0]["contenders"][0]["times_ms"][0] = float("inf")


def newer(data):
    data["schema_version"] = 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (no_median, "median_ms: is missing"),
        (no_times, "times_ms"),
        (infinite, "times_ms"),
        (newer, "schema_version: input should be 1, got 2"),
        (lambda data: data.update(extra=1), "unknown key 'extra'"),
    ],
)
def test_a_damaged_file_is_refused_in_words(here, measured, tmp_path, change, said):
    done = here("compare", str(measured), str(changed(measured, tmp_path, change)))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_no_file_of_results_is_refused(here, measured, tmp_path):
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for name in ("text.json", "list.json", "bytes.json", "missing.json", "."):
        done = here("compare", str(measured), str(tmp_path / name))
        assert done.returncode == 2
        assert done.stderr.startswith(f"tune: {tmp_path / name}")
    assert "at least two" in here("compare", str(measured)).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--workload", "M=2"), "N must be given"),
        (("--workload", "M=2,N=2,dtype=float16"), "dtype=float16 is not one of float32"),
        (("--workloads", "nothing"), "has no workloads 'nothing'; it has: starter"),
        (
            ("--output", "/proc/none/a.json"),
            "--output /proc/none/a.json: cannot be written: /proc",
        ),
        (("--device", "interpreter"), "never times"),
        (("--budget", "0"), "0"),
    ],
)
def test_bad_requests_leave_no_file(here, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = bench(here, "--output", "a.json", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert list(tmp_path.glob("*.json")) == []


def test_a_file_that_changed_since_it_was_frozen_is_not_timed(tune, tmp_path):
    package = tmp_path / "frozen"
    shutil.copytree(PACKAGE, package)
    for path in package.glob("softmax/*/cpu_*.cpp"):
        path.write_text(path.read_text() + "// faster\n")
    done = bench(tune, "--output", "a.json", "--workload", WORKLOAD, package=package)
    assert done.returncode == 2
    assert "is not the file that was timed" in done.stderr
    assert not (tmp_path / "a.json").exists()
    missing = bench(tune, "--output", "a.json", package=tmp_path / "nowhere")
    assert "no such folder" in missing.stderr
