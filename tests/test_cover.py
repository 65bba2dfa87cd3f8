"""Few variants for many workloads."""

from __future__ import annotations

import dataclasses
import re

import pytest
from conftest import KERNELS
from frozen import TEMPLATES, Project

from tuner.cover import Limits, cover
from tuner.package.freeze import freeze
from tuner.package.reading import package_winners
from tuner.records import (
    Candidate,
    Interval,
    Measurement,
    Rejection,
    Source,
    Trial,
    UsageError,
    Winner,
    Workload,
)

SIZES = (1, 2, 3, 4)
TIMES = {  # of the variant that won at a size, at every size: None where it was not measured
    1: (1.0, 1.02, 1.5, None),
    2: (1.04, 1.0, 1.03, 3.0),
    3: (2.0, 2.0, 1.0, 1.2),
    4: (3.0, 3.0, 3.0, 1.0),
}


def measured(time_ms: float) -> Measurement:
    return Measurement(time_ms, 0.99 * time_ms, 1.01 * time_ms, 5, "warm", 0.1)


def workload(size: int) -> Workload:
    return Workload("scale", (("N", size),), "float32")


def source(size: int) -> Source:
    return Source("scale", "cpp", f"// variant {size}\n")


@pytest.fixture
def winners(tmp_path) -> list[Winner]:
    base = Project(tmp_path).winner()
    return [
        dataclasses.replace(
            base,
            workload=workload(size),
            candidate=Candidate.of("cpu", {"TILE": size}),
            source=source(size),
            default_candidate=Candidate.of("cpu", {"TILE": 99}),
            default=source(99),
            default_measurement=measured(4.0),
            measurement=measured(1.0),
            gain=Interval(4.0, 3.9, 4.1),
            rival="rival",
            rival_measurement=measured(2.0),
            rival_ratio=Interval(2.0, 1.9, 2.1),
        )
        for size in SIZES
    ]


@pytest.fixture
def trials() -> list[Trial]:
    found = []
    for tile, times in {**TIMES, 99: (4.0, 4.0, 4.0, 4.0)}.items():
        for size, time_ms in zip(SIZES, times, strict=True):
            outcome = Rejection("compile", "no") if time_ms is None else measured(time_ms)
            candidate = Candidate.of("cpu", {"TILE": tile})
            sha = source(tile).sha256
            found.append(Trial(len(found), workload(size), candidate, sha, outcome, 0.1))
    return found


def served(winners, trials, limits: Limits) -> tuple[list[int], float]:
    (covered,) = cover(winners, trials, limits)
    assert [item.workload for item in covered.winners] == [item.workload for item in winners]
    chosen = [int(dict(item.candidate.parameters)["TILE"]) for item in covered.winners]
    assert covered.after == len(set(chosen))
    assert covered.before == 4
    return chosen, covered.worst


def test_the_fewest_variants_within_a_slowdown(winners, trials):
    assert served(winners, trials, Limits(slowdown=1.05)) == ([2, 2, 2, 4], 1.04)
    assert served(winners, trials, Limits(slowdown=1.0)) == ([1, 2, 3, 4], 1.0)
    assert served(winners, trials, Limits(slowdown=1.035))[1] <= 1.035
    assert served(winners, trials, Limits(slowdown=3.0)) == ([2, 2, 2, 2], 3.0)


def test_the_best_of_a_number_of_variants(winners, trials):
    assert served(winners, trials, Limits(variants=4)) == ([1, 2, 3, 4], 1.0)
    assert served(winners, trials, Limits(variants=2)) == ([2, 2, 2, 4], 1.04)
    assert served(winners, trials, Limits(variants=1))[0][0] in (2, 3)


def test_a_number_goes_before_a_slowdown(winners, trials):
    chosen, worst = served(winners, trials, Limits(variants=1, slowdown=1.05))
    assert len(set(chosen)) == 1
    assert worst > 1.05


def test_what_is_shared_has_its_own_evidence(winners, trials):
    (covered,) = cover(winners, trials, Limits(slowdown=1.05))
    first, second = covered.winners[:2]
    assert second == winners[1]
    assert first.source == source(2)
    assert first.measurement == measured(1.04)
    assert first.gain.value == pytest.approx(4.0 / 1.04)
    assert first.gain.low < first.gain.value < first.gain.high
    assert first.rival_ratio.value == pytest.approx(2.0 / 1.04)
    assert "shared with other workloads, 1.040 x" in first.protocol


def test_what_was_measured_with_none_of_the_chosen_is_an_error(winners, trials):
    alone = [
        item
        for item in trials
        if (item.workload == workload(4)) == ("TILE=4" in str(item.candidate))
    ]
    with pytest.raises(UsageError, match="--max-variants 1: scale N=.* was measured with none"):
        cover(winners, alone, Limits(variants=1))


def test_without_trials_every_winner_stays(winners):
    assert served(winners, [], Limits(slowdown=1.5))[0] == [1, 2, 3, 4]


def test_the_package_holds_the_shared_variants_alone(tmp_path):
    project = Project(tmp_path / "project")
    winners = [project.winner(M=8, waste=0), project.winner(M=9, waste=1)]
    trials = [
        Trial(0, winners[1].workload, winners[0].candidate, winners[0].source.sha256, time, 0.1)
        for time in (Rejection("timeout", "once"), measured(1.02))
    ]
    for limits, count in ((Limits(variants=2), 2), (Limits(slowdown=1.05), 1)):
        (covered,) = cover(winners, trials, limits)
        freeze(covered.winners, project.kernels, tmp_path / "pkg", templates=TEMPLATES)
        frozen = package_winners(tmp_path / "pkg")
        assert len(frozen) == 2
        assert len({item.source for item in frozen}) == count


def test_a_run_may_freeze_few_variants(tune, tmp_path):
    sizes = ("N=1000", "N=30000")
    workloads = [word for size in sizes for word in ("--workload", size)]
    few = ("--budget", "6trials", "--max-variants", "1")
    done = tune("scale", "--kernels", str(KERNELS), "--device", "cpu", *workloads, *few)
    assert done.returncode == 0, done.stderr
    assert re.search(r"1 of \d variants serve 2 workloads, the worst in \d", done.stdout)
    winners = package_winners(tmp_path / "kernels_generated")
    assert len({winner.source.sha256 for winner in winners}) == 1
