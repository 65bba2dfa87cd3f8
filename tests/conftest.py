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
