"""A small set of variants that serves many workloads almost as well as their own winners."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.records import (
    Candidate,
    Interval,
    Measurement,
    Outcome,
    Source,
    Trial,
    UsageError,
    Winner,
    Workload,
)

_UNKNOWN = math.log(1e3)
"""What a workload that a variant was never measured for counts in place of a slowdown's log."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is asked of a cover.

    Attributes:
        variants: The most variants of a kernel on an architecture; None for any number.
        slowdown: The most that a workload may take, in times of its winner's time; None for the
            least that the number of variants allows.
    """

    variants: int | None = None
    slowdown: float | None = None


def limits_of(variants: int | None, slowdown: float | None) -> Limits | None:
    """Return what is asked of a cover, None if nothing is."""
    if variants is None and slowdown is None:
        return None
    return Limits(variants, slowdown)


@dataclass(frozen=True, slots=True)
class Covered:
    """A kernel on an architecture, and what serves its workloads.

    Attributes:
        kernel: Name of the kernel.
        arch: The architecture.
        winners: One for each workload; those that changed say so in their protocol.
        before: Number of variants that won.
        after: Number of variants that are left.
        worst: The largest slowdown of a workload.
    """

    kernel: str
    arch: str
    winners: tuple[Winner, ...]
    before: int
    after: int
    worst: float


@dataclass(frozen=True, slots=True)
class _Variant:
    candidate: Candidate
    source: Source


_Times = Mapping[str, Mapping[Winner, Measurement]]


def cover(winners: Sequence[Winner], trials: Iterable[Trial], limits: Limits) -> list[Covered]:
    """Return few variants that serve the winners' workloads, chosen from what was measured.

    Only variants that won somewhere, and defaults, are considered: they are right on odd shapes.

    Args:
        winners: Of any kernels, all of one architecture.
        trials: Of that architecture.
        limits: What is asked.

    Raises:
        UsageError: Too few variants are allowed to serve what was measured.
    """
    groups: defaultdict[str, list[Winner]] = defaultdict(list)
    for winner in winners:
        groups[winner.workload.kernel].append(winner)
    latest = {(item.source_sha256, item.workload): item.outcome for item in trials}
    return [_covered(group, latest, limits) for _, group in sorted(groups.items())]


def _covered(
    winners: Sequence[Winner], latest: Mapping[tuple[str, Workload], Outcome], limits: Limits
) -> Covered:
    variants = {
        source.sha256: _Variant(candidate, source)
        for winner in winners
        for candidate, source in (
            (winner.default_candidate, winner.default),
            (winner.candidate, winner.source),
        )
    }
    times: dict[str, dict[Winner, Measurement]] = {sha: {} for sha in variants}
    for sha in variants:
        for winner in winners:
            outcome = latest.get((sha, winner.workload))
            if sha == winner.source.sha256 and not isinstance(outcome, Measurement):
                outcome = winner.measurement
            if isinstance(outcome, Measurement):
                times[sha][winner] = outcome
    chosen = _choose(winners, times, limits)
    served = [_served(winner, chosen, variants, times) for winner in winners]
    before = len({winner.source.sha256 for winner in winners})
    worst = max(
        _slowdown(times, new.source.sha256, old) for old, new in zip(winners, served, strict=True)
    )
    kernel, arch = winners[0].workload.kernel, winners[0].device.arch
    after = len({winner.source.sha256 for winner in served})
    return Covered(kernel, arch, tuple(served), before, after, worst)


def _choose(winners: Sequence[Winner], times: _Times, limits: Limits) -> list[str]:
    """Return the hashes of the chosen variants: greedily, then without those not needed."""
    chosen: list[str] = []
    goal = limits.slowdown or 1.0
    most = limits.variants or len(times)
    while len(chosen) < most and _worst(winners, times, chosen) > goal:
        rest = [sha for sha in times if sha not in chosen]
        chosen.append(min(rest, key=lambda sha: _loss(winners, times, [*chosen, sha], goal)))
    for sha in tuple(chosen):
        fewer = [other for other in chosen if other != sha]
        if fewer and _worst(winners, times, fewer) <= goal:
            chosen = fewer
    for winner in winners:
        if all(winner not in times[sha] for sha in chosen):
            raise UsageError(
                f"--max-variants {most}: {winner.workload.kernel} {winner.workload} "
                f"was measured with none of the {len(chosen)} that serve the others best: allow "
                "more, or run `tune` again, which tries what won elsewhere"
            )
    return chosen


def _loss(winners: Sequence[Winner], times: _Times, chosen: Sequence[str], goal: float) -> float:
    """Return the sum of the logs of the slowdowns beyond the goal: less is better."""
    logs = (math.log(_best(times, chosen, winner)) for winner in winners)
    return sum(
        max(min(log, _UNKNOWN) - math.log(goal), 0.0) + 1e-6 * min(log, _UNKNOWN) for log in logs
    )


def _worst(winners: Sequence[Winner], times: _Times, chosen: Sequence[str]) -> float:
    return max(_best(times, chosen, winner) for winner in winners)


def _best(times: _Times, chosen: Sequence[str], winner: Winner) -> float:
    return min((_slowdown(times, sha, winner) for sha in chosen), default=math.inf)


def _slowdown(times: _Times, sha: str, winner: Winner) -> float:
    """Return a variant's time over that of a workload's winner, infinite where unknown."""
    if sha == winner.source.sha256:
        return 1.0
    measured = times[sha].get(winner)
    if measured is None:
        return math.inf
    return max(measured.median_ms / times[winner.source.sha256][winner].median_ms, 1.0)


def _served(
    winner: Winner, chosen: Sequence[str], variants: Mapping[str, _Variant], times: _Times
) -> Winner:
    """Return a workload's winner, replaced by the fastest of the chosen variants."""
    sha = min(chosen, key=lambda sha: _slowdown(times, sha, winner))
    if sha == winner.source.sha256:
        return winner
    measured = times[sha][winner]
    rival = winner.rival_measurement
    slower = _slowdown(times, sha, winner)
    return replace(
        winner,
        candidate=variants[sha].candidate,
        source=variants[sha].source,
        measurement=measured,
        gain=_ratio(winner.default_measurement, measured),
        rival_ratio=_ratio(rival, measured) if rival else None,
        ties=(),
        protocol=f"{winner.protocol}; shared with other workloads, {slower:.3f} x the winner's "
        "time in the search",
    )


def _ratio(other: Measurement, measured: Measurement) -> Interval:
    """Return the ratio of two times that were not raced: its interval is the widest."""
    return Interval(
        other.median_ms / measured.median_ms,
        other.low_ms / measured.high_ms,
        other.high_ms / measured.low_ms,
    )
