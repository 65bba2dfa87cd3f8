"""Tokens to experts on other ranks: simulated ranks, real processes, and the code for GPUs.

Children do the work, since triton reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

pytestmark = pytest.mark.timeout(600)


def start(script: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join((str(TESTS.parent), str(TESTS)))
    return subprocess.Popen(
        [sys.executable, str(TESTS / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report_of(child: subprocess.Popen[str]) -> dict:
    out, errors = child.communicate()
    assert child.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def reports_of_processes(ranks: int, rounds: int, folder: Path) -> list[dict]:
    children = [
        start("exchange_child.py", "rank", rank, ranks, rounds, folder / "store", **INTERPRETED)
        for rank in range(ranks)
    ]
    return [report_of(child) for child in children]


INTERPRETED = {"TRITON_INTERPRET": "1"}


def faults(report: dict) -> dict:
    return {name: found for name, found in report.items() if found and "mutant" not in name}


def unnoticed(report: dict) -> list[str]:
    mutants = {name: found for name, found in report.items() if "mutant" in name}
    assert mutants
    return [name for name, found in mutants.items() if not found]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict]:
    """Return what simulated ranks and the compiled code have wrong, found side by side."""
    folder = tmp_path_factory.mktemp("code")
    children = {
        "ranks": start("exchange_child.py", "local", **INTERPRETED),
        "code": start("exchange_code.py", folder, TRITON_CACHE_DIR=str(folder)),
    }
    return {name: report_of(child) for name, child in children.items()}


@pytest.mark.parametrize("subject", ["ranks", "code"])
def test_simulated_ranks_and_the_code_for_an_h200_are_right(reports, subject):
    assert not faults(reports[subject])


@pytest.mark.parametrize("subject", ["ranks", "code"])
def test_bugs_in_ranks_and_code_show(reports, subject):
    assert not unnoticed(reports[subject])


def check_processes(reports: list[dict]) -> None:
    assert not [faults(report) for report in reports if faults(report)]
    # a rank that got rows of another round has a fault; others may wait in vain for it
    assert any(report.get("mutant") for report in reports)


def test_processes_exchange_tokens_without_a_barrier(tmp_path):
    check_processes(reports_of_processes(2, 2, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_exchange_tokens_for_long(ranks, tmp_path):
    check_processes(reports_of_processes(ranks, 20, tmp_path))


@pytest.mark.slow
def test_the_whole_grid_of_simulated_ranks():
    assert not faults(report_of(start("exchange_child.py", "wide", **INTERPRETED)))
