"""`tune recheck`: what has changed for frozen winners, and what has not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import KERNELS, ROOT

from tuner.evidence.recheck import provenance_changes
from tuner.records import DeviceInfo

OWN = ("--kernels", str(KERNELS), "--device", "cpu")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> Path:
    """Return a folder with a store and a package of one winner that is much faster than others."""
    folder = tmp_path_factory.mktemp("tuned")
    command = [sys.executable, "-m", "tuner", "scale", *OWN, "--budget", "8trials"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder


@pytest.fixture
def recheck(tune, tuned, tmp_path):
    """Run the command on a copy of the package whose manifest was changed."""

    def run(change, *arguments: str):
        shutil.copytree(tuned, tmp_path, dirs_exist_ok=True)
        (path,) = (tmp_path / "kernels_generated" / "scale").glob("*/manifest.json")
        data = json.loads(path.read_text())
        change(data, data["workloads"][0])
        path.write_text(json.dumps(data))
        done = tune("recheck", *OWN, "--budget", "0.5", *arguments)
        assert "Traceback" not in done.stderr
        return done

    return run


def scale(entry, factor: float) -> None:
    for name in ("median_ms", "low_ms", "high_ms"):
        entry["measurement"][name] *= factor


def test_a_winner_that_was_faster_once_is_a_regression(recheck):
    def change(_, entry):
        scale(entry, 0.1)
        entry["versions"]["torch"] = "0.1"

    done = recheck(change)
    assert done.returncode == 1
    assert "slower" in done.stdout
    assert "changed since it was frozen: torch 0.1 -> " in done.stdout
    assert "1 winners, 1 regressions" in done.stdout


def test_a_winner_that_a_runner_up_beats_is_overtaken(recheck):
    def crown_the_default(_, entry):
        entry |= {name: entry["default"][name] for name in ("file", "sha256", "candidate")}
        scale(entry, 1e6)

    done = recheck(crown_the_default)
    assert done.returncode == 1
    assert "overtaken" in done.stdout
    assert "tune again" in done.stderr


@pytest.mark.slow
def test_a_winner_that_is_no_longer_right_is_rejected(recheck, tmp_path):
    def change(*_):
        problem = tmp_path / "kernels_generated" / "scale" / "problem.py"
        text = problem.read_text()
        problem.write_text(text + "\n\ndef reference(x, factor):\n    return {'y': 3 * x}\n")

    done = recheck(change)
    assert done.returncode == 1
    assert "rejected correctness: y[0] is" in done.stderr


def test_nothing_frozen_for_this_device_is_an_error(tune, tuned, tmp_path):
    shutil.copytree(tuned / "kernels_generated", tmp_path / "frozen")
    (folder,) = (path.parent for path in (tmp_path / "frozen/scale").glob("*/manifest.json"))
    folder.rename(folder.with_name("elsewhere"))
    done = tune("recheck", *OWN, "--package", "frozen")
    assert done.returncode == 2
    assert "only for elsewhere" in done.stderr
    assert (
        "holds no kernel 'nope'; it has: scale"
        in tune("recheck", "nope", *OWN, "--package", "frozen").stderr
    )


def test_what_changed_is_told_by_name():
    device = DeviceInfo("cuda", "B", "", (("units", 2), ("lanes", 32)), (("torch", "2"),), ())
    manifest = {"device": {"name": "A", "limits": {"units": 1, "lanes": 32}}}
    entry = {"versions": {"torch": "1", "driver": "5"}}
    assert list(provenance_changes(manifest, entry, device)) == [
        "torch 1 -> 2",
        "driver 5 -> unknown",
        "units 1 -> 2",
        "device A -> B",
    ]
