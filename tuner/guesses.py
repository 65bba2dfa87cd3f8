"""What a search tries first: the default, others' results, past winners, experts' guesses."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tuner.records import Candidate, Winner, Workload
from tuner.session import Subject

_NEIGHBOURS = 6
"""Most candidates that are tried early because they won for other workloads."""


def guesses(subject: Subject, winners: Iterable[Winner]) -> list[Candidate]:
    """Return the candidates to try before the search begins, each once.

    Args:
        subject: What is tuned for.
        winners: What the store holds of other workloads and of this one.
    """
    feasible = subject.feasible
    nearest = neighbours(subject, winners)
    named = (feasible.default, *subject.seeds, *nearest, *feasible.defaults, *feasible.seeds)
    return list(dict.fromkeys(named))


def neighbours(subject: Subject, winners: Iterable[Winner]) -> list[Candidate]:
    """Return what won for the nearest workloads of a kernel, the nearest first, each once."""
    here = subject.task.workload
    same = [winner for winner in winners if winner.workload.kernel == here.kernel]
    same.sort(key=lambda winner: _distance(winner.workload, here))
    won = dict.fromkeys(item.candidate for item in same if item.candidate in subject.feasible)
    return list(won)[:_NEIGHBOURS]


def _distance(one: Workload, other: Workload) -> tuple[bool, bool, float]:
    """Return how unlike two workloads are: by dtype, by flags, then by the logs of extents."""
    extents = dict(other.dims)
    logs = (abs(math.log(max(size, 1) / max(extents[dim], 1))) for dim, size in one.dims)
    return (one.dtype != other.dtype, one.flags != other.flags, sum(logs))
