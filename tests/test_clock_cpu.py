"""Races on the real CPU beside a busy neighbour: what the simulated machines promise holds."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT

from tuner.timing.finals import pick
from tuner.timing.race import race

sys.path.insert(0, str(ROOT / "benchmarks"))

import clock as selection
import spin
from rows import read

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def spinning(tmp_path_factory) -> spin.Spin:
    return spin.build(tmp_path_factory.mktemp("spin"))


def winner_of(spinning: spin.Spin, seed: int, *, budget_s: float, **factors: float) -> str:
    clock = spin.cpu_clock()
    calls = {
        label: [spinning(round(selection.ROUNDS * factor))] for label, factor in factors.items()
    }
    result = race(clock, calls, budget_s=budget_s, seed=seed, reference="default")
    return pick(result, lambda _: (0.0,)).winner


def test_half_as_slow_again_never_wins_beside_a_busy_neighbour(spinning):
    with spin.busy_neighbour():
        for seed in range(3):
            assert winner_of(spinning, seed, budget_s=0.3, default=1.0, slow=1.5) == "default"


def test_selections_are_written_as_rows(spinning, tmp_path):
    methods = {name: selection.METHODS[name] for name in list(selection.METHODS)[2:4]}
    results = selection.contest(spinning, (1.0, 0.2), methods, 1)
    file = selection.ResultsFile(tmp_path / "cpu.csv", "Some CPU")
    file.replace("selection", "contenders=two,neighbour=none", results)
    rows = read(tmp_path / "cpu.csv")
    assert [row["contender"] for row in rows] == list(methods)
    assert {row["rate"] for row in rows} == {"0"}  # five times as fast is found by anybody
    committed = ROOT / "benchmarks" / "results" / "clock" / "cpu.csv"
    assert {row["contender"] for row in read(committed)} == set(selection.METHODS)


@pytest.mark.slow
def test_equals_hardly_ever_beat_the_default_beside_a_busy_neighbour(spinning):
    with spin.busy_neighbour():
        assert selection.false_winners(spinning, 100, budget_s=1.0) <= 5


@pytest.mark.slow
def test_a_planted_difference_of_two_percent_is_found_beside_a_busy_neighbour(spinning):
    with spin.busy_neighbour():
        winners = [
            winner_of(spinning, seed, budget_s=4.0, default=1.0, faster=0.98, slower=1.02)
            for seed in range(20)
        ]
    assert "slower" not in winners
    assert winners.count("faster") >= 18
