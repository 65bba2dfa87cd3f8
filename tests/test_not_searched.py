"""Workloads where only the default was timed: stored and told, but no winners."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import KERNELS
from frozen import DEVICE, TEMPLATES, Project

from tuner.cli.packaging import chosen
from tuner.cover import Limits
from tuner.merge import merge
from tuner.package import export
from tuner.package.freeze import freeze
from tuner.records import UsageError, Winner
from tuner.store import Store


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def alone(winner: Winner) -> Winner:
    """Return what a search gives that had time for its default alone."""
    return dataclasses.replace(
        winner,
        candidate=winner.default_candidate,
        source=winner.default,
        measurement=winner.default_measurement,
        searched=False,
    )


@pytest.mark.parametrize("order", [1, -1])
def test_it_stands_before_no_winner(tmp_path, project, monkeypatch, order) -> None:
    output = tmp_path / f"some_{os.getpid()}_{order + 1}"
    tuned = project.winner(M=8)
    for winner in (tuned, alone(project.winner(M=64)), alone(project.winner(M=8)))[::order]:
        freeze([winner], project.kernels, output, templates=TEMPLATES)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(output.name)
    assert package.mix.chosen(M=64, N=8).workload.startswith("M=8,")
    assert package.mix.chosen(M=8, N=8).reason == "exact"
    manifest = json.loads((output / "mix" / DEVICE.arch / "manifest.json").read_text())
    assert [entry["sha256"] for entry in manifest["workloads"]] == [tuned.source.sha256]


def test_the_default_serves_where_nothing_won(tmp_path, project, monkeypatch) -> None:
    output = tmp_path / f"only_{os.getpid()}"
    winner = alone(project.winner())
    freeze([winner], project.kernels, output, templates=TEMPLATES)
    monkeypatch.syspath_prepend(str(tmp_path))
    choice = importlib.import_module(output.name).mix.chosen(M=8, N=8)
    assert (choice.reason, choice.workload) == ("default", None)
    assert choice.file.startswith(f"cpu_{winner.default.sha256[:8]}")


def test_a_cover_is_not_asked_to_serve_it(tmp_path, project) -> None:
    store = Store(tmp_path, "arch")
    winners = [project.winner(M=8), alone(project.winner(M=64))]
    for winner in winners:
        store.add_winner(winner)
    assert chosen(store, Limits(variants=1), print) == winners


def test_a_searched_winner_outlives_it_when_stores_are_merged(tmp_path, project) -> None:
    tuned = project.winner()
    for name, winner in (("a", tuned), ("b", alone(dataclasses.replace(tuned, date="2027")))):
        Store(tmp_path / name, "arch").add_winner(winner)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert Store(tmp_path / "both", "arch").winners == (tuned,)


def test_it_is_no_configuration_for_others(project) -> None:
    workload = dataclasses.replace(
        project.winner().workload, dims=(("M", 1), ("N", 2), ("K", 3)), flags=()
    )
    winner = alone(dataclasses.replace(project.winner(), workload=workload))
    with pytest.raises(UsageError, match="no workload was searched"):
        export.vllm_files([winner])
    (exported,) = json.loads(export.winners_json([winner]))["winners"]
    assert exported["searched"] is False


def test_a_run_says_so_and_the_next_one_searches_on(tune, tmp_path) -> None:
    run = ("scale", "--kernels", str(KERNELS), "--device", "cpu", "--workload", "N=1000")
    done = tune(*run, "--budget", "1trials")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 workloads: not searched, only the default was timed" in done.stdout
    code = "from kernels_generated import scale; print(scale.chosen(N=1000))"

    def served() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    assert "(default)" in served()
    (winner,) = json.loads(tune(*run, "--budget", "3trials", "--json").stdout)
    assert winner["searched"] is True
    assert "(exact " in served()


def test_a_space_of_one_candidate_is_searched_by_its_default(tune, tmp_path) -> None:
    shutil.copytree(KERNELS, tmp_path / "own")
    path = tmp_path / "own" / "search_spaces" / "scale.yaml"
    space = yaml.safe_load(path.read_text())
    template = space["templates"]["cpu"]
    template["parameters"] = {name: [value] for name, value in template["default"].items()}
    del template["seeds"]
    path.write_text(yaml.safe_dump(space))
    run = ("scale", "--kernels", "own", "--device", "cpu", "--budget", "60s", "--json")
    (winner,) = json.loads(tune(*run).stdout)
    assert winner["searched"] is True
