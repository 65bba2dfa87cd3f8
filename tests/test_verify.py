"""`tune verify` as a user runs it, and the suites of the shipped kernels."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import KERNELS, ROOT

from tuner.catalog import Catalog
from tuner.cli.main import main
from tuner.serve.suite import suite
from tuner.space.kernel import load_space

CATALOG = Catalog()


def verify(folder, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuner", "verify", *arguments, "--store", str(folder / "store")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def entries(kernel: str, dtype: str, most: float | None = None) -> dict:
    spec = load_space(CATALOG.space_path(kernel))
    message = {"signature": spec.signature.to_json(), "problem": CATALOG.problem_path(kernel)}
    message |= {"workload": {"dtype": dtype}, "workloads": [], "most_operations": most}
    return suite(message)


@pytest.mark.parametrize("jobs", [(), ("--jobs", "3")])
def test_a_right_kernel_passes_every_case(tmp_path, jobs):
    done = verify(tmp_path, "attention_backward", "--device", "cpu", "--sample", "20", *jobs)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 21
    assert all(line.startswith(f"{n}/20 cpu B=") for n, line in enumerate(lines[:-1], 1))
    assert all(line.endswith(" of the tolerance PASS") for line in lines[:-1])
    assert lines[-1] == "All tests passed 20/20"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("segfault", "killed by SIGSEGV"),
        ("hang", "no reply in 2 s"),
        ("refuse", "does not compile"),
    ],
)
def test_a_fault_fails_its_case_and_not_the_run(tmp_path, fault, reason):
    options = ("hostile", "--kernels", str(KERNELS), "--device", "cpu")
    timeout = ("--timeout", "2" if fault == "hang" else "60")
    options += ("--set", f"FAULT={fault}", "--sample", "2", "--jobs", "2")
    done = verify(tmp_path, *options, *timeout)
    *lines, last = done.stdout.splitlines()
    assert done.returncode == 1, done.stderr
    assert last == "2 of 2 failed"
    assert all(line.endswith(" FAIL") and reason in line for line in lines), lines


def test_what_is_wrong_in_some_cases_fails_in_those(tmp_path):
    options = ("hostile", "--kernels", str(KERNELS), "--device", "cpu")
    done = verify(tmp_path, *options, "--set", "FAULT=wrong_by_one")
    *lines, last = done.stdout.splitlines()
    wrong = [line for line in lines if line.endswith(" FAIL")]
    assert wrong
    assert len(wrong) < len(lines)
    assert all("N=65536" in line and "must be" in line for line in wrong)
    assert last == f"{len(wrong)} of {len(lines)} failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention_backward", "--template", "warp"), "no template 'warp'"),
        (("attention_backward", "--template", "triton"), "does not run on 'cpu'; devices: cuda"),
        (("attention_backward", "--set", "TILE_Q=7"), "TILE_Q may be 32"),
        (("attention_backward", "--set", "TILE_Q"), "write NAME=VALUE"),
        (("rms_norm",), "rms_norm does not run on 'cpu'"),
        (("nothing",), "nothing"),
    ],
)
def test_what_cannot_be_verified_is_said_in_a_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *arguments, "--device", "cpu"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kernel", CATALOG.kernels)
def test_every_kernel_has_a_suite(kernel):
    everything = entries(kernel, "float32")
    names = {repr({**entry, "seed": 0}) for entry in everything["entries"]}
    assert len(names) == len(everything["entries"])
    assert everything["left_out"] == 0
    small = entries(kernel, "float32", 1e4)
    assert len(small["entries"]) + small["left_out"] == len(names)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_the_suites_of_attention_are_long_and_wide(half):
    found = entries(f"attention_{half}", "float32")["entries"]
    assert len(found) >= (414 if half == "backward" else 300)
    assert {1, 64, 96, 128, 256} <= {entry["extents"]["D"] for entry in found}
    assert {0, 1, 8192} <= {entry["extents"]["T"] for entry in found}
    assert {True, False} == {entry["misaligned"] for entry in found}
    assert any(entry["scalars"].get("scale", 1.0) < 0 for entry in found)
    assert any(entry["flags"].get("deterministic") for entry in found)
    assert half == "forward" or any(entry["options"].get("offset", 0.0) < 0 for entry in found)
