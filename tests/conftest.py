"""Fixtures that several test files share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Examples that differ from run to run belong into a search for bugs, not into a gate.
settings.register_profile("gate", derandomize=True, deadline=None)
settings.load_profile("gate")

ROOT = Path(__file__).parent.parent
KERNELS = Path(__file__).parent / "kernels"

WAIT_S = 200.0
"""How long a test waits for what takes seconds: the machine may be slow, and busy."""


if "PYTEST_XDIST_WORKER" in os.environ:  # each process would have as many threads as cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads spin while they wait

LONGEST = (
    *("test_triton_templates.py", "test_tune.py", "test_moe.py", "test_cluster.py"),
    *("test_prebuilt.py", "test_gluon_attention.py", "test_report.py", "test_fleet.py"),
    *("test_cpp_kernels.py", "test_recheck.py"),
)
"""Files that take long and are begun first, so that processes which share all end together."""


def pytest_collection_modifyitems(items):
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture
def tune(tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command in a folder of its own, with the tests' python as ``python``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

    def run(*arguments: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tuner", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "PATH": path},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """Run the command in an empty folder of this process and return the error that it prints."""
    from tuner.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run
