"""How good others' results were here: where a file's configurations landed among the trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.records import Candidate, Measurement, Trial
from tuner.seeds import Seed, candidates_of
from tuner.session import Subject


@dataclass(frozen=True, slots=True)
class Landing:
    """What became of a file's configurations for one workload.

    Attributes:
        known: Number of configurations that are candidates here.
        total: Number of configurations for this kernel.
        timed: Number of candidates that were timed, from wherever they came.
        best: The fastest that the file gave, if one of it was timed.
        rank: Its place among all that were timed, from 1.
        ratio: Its time over the fastest one's.
    """

    known: int
    total: int
    timed: int
    best: Candidate | None = None
    rank: int = 0
    ratio: float = 0.0

    def __str__(self) -> str:
        text = f"{self.known} of {self.total} configurations are in the space"
        if self.best is None:
            return f"{text}, none of them was timed"
        return (
            f"{text}; the best, {self.best}, is number {self.rank} of {self.timed} timed, "
            f"{self.ratio:.2f} x the fastest"
        )


def landing(subject: Subject, seeds: Sequence[Seed], trials: Iterable[Trial]) -> Landing:
    """Return where configurations landed.

    Args:
        subject: The workload.
        seeds: The configurations, of any kernels.
        trials: What was tried, of any workloads.
    """
    workload = subject.task.workload
    latest = {trial.candidate: trial.outcome for trial in trials if trial.workload == workload}
    timed = {
        candidate: outcome.median_ms
        for candidate, outcome in latest.items()
        if isinstance(outcome, Measurement)
    }
    mine = [seed for seed in seeds if seed.kernel in (None, workload.kernel)]
    given = [
        list(candidates_of(workload.kernel, subject.feasible, seed, Counter())) for seed in mine
    ]
    known = sum(map(bool, given))
    landed = [candidate for items in given for candidate in items if candidate in timed]
    if not landed:
        return Landing(known, len(mine), len(timed))
    best = min(landed, key=timed.__getitem__)
    times = sorted(timed.values())
    rank = times.index(timed[best]) + 1
    return Landing(known, len(mine), len(timed), best, rank, timed[best] / times[0])
