"""The final: contenders timed in turn, so that they share what the machine does meanwhile.

A drifting clock makes two separate measurements incomparable. Here every block times all
contenders once, in random order, and the reference twice, as itself and as its copy; only ratios
within a block are compared. A contender is dropped as soon as it cannot win any more, and the
race ends as soon as nothing is open (`tuner.timing.blocks` has the rule).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.timing.blocks import COPY, ERROR, Blocks
from tuner.timing.calibration import BelowFloor
from tuner.timing.clock import LEAST_VISITS, PRECISION, SETTLING, Clock
from tuner.timing.meter import VISIT_S, Call, Meter
from tuner.timing.statistics import median_interval, samples_needed

RACE_VISIT_S = 0.001
"""Time to spend on an undisturbed visit in a race: what still spoils a block, the median bears."""

SURE = 0.975
"""Confidence of each of two medians, so that both and hence their ratio are right in 95 %."""


@dataclass(frozen=True, slots=True)
class RaceResult:
    """What a race has seen: plain numbers that pass through JSON.

    Attributes:
        reference: Label of the default.
        rival: Label of the contender that is timed for comparison only.
        times_ms: Each contender's time in every kept block; one that was dropped early has only
            those of the first blocks.
        copy_ms: Times of the reference's copy: the noise floor.
        refused: Contenders that the clock cannot see, with the reason.
        discarded: Number of blocks in which the reference moved more than its noise.
        end: Why the race ended: ``"separated"``, ``"tied"`` (with the default, or the leaders with
            each other) or ``"budget"``; a survey that is not ended by its budget is ``"precise"``.
        regime: As in `Timing`.
        method: As in `Timing`, of the reference.
        seed: Of the order in the blocks.
        error: Probability of a wrong claim that is left for what these times say: a race was
            looked at before.
    """

    reference: str
    rival: str | None
    times_ms: tuple[tuple[str, tuple[float, ...]], ...]
    copy_ms: tuple[float, ...]
    refused: tuple[tuple[str, str], ...]
    discarded: int
    end: str
    regime: str
    method: str
    seed: int
    error: float = ERROR


def race(
    clock: Clock,
    contenders: Mapping[str, Sequence[Call]],
    *,
    budget_s: float,
    seed: int,
    reference: str,
    rival: str | None = None,
) -> RaceResult:
    """Return the times of contenders, sampled until they separate, tie or the budget ends.

    Args:
        clock: The calibrated clock.
        contenders: Calls of each by label, as for `Clock.measure`, all on the same buffers in the
            same order: where a buffer lies can matter more than the variant.
        budget_s: Seconds to spend once everyone is prepared.
        seed: Of the order in the blocks.
        reference: Label of the default: in every block, never dropped.
        rival: Label of a contender in every block that can neither drop others nor be dropped.

    Raises:
        BelowFloor: The reference is too short for this clock.
    """
    meters, refused = _prepare(clock, contenders, reference)
    start_s, first = clock.now(), meters[reference]
    # The search has kept the device busy until now, and ratios need no sustained clocks.
    least, most = (
        first.samples_per_visit(budget_s / len(meters), visit_s)
        for visit_s in (RACE_VISIT_S, VISIT_S)
    )
    blocks = Blocks(meters, reference=reference, rival=rival, samples=(least, most), seed=seed)
    end = _race(blocks, clock, start_s + budget_s)
    return replace(_result(blocks, first, refused=refused, end=end), error=blocks.error)


def survey(
    clock: Clock,
    contenders: Mapping[str, Sequence[Call]],
    *,
    budget_s: float,
    seed: int,
    reference: str,
) -> RaceResult:
    """Return the times of contenders that are all sampled alike, until their medians are known.

    Nobody is dropped and nobody wins: it ends with ``"precise"`` when the interval of every
    median is `PRECISION` wide to each side, or with the budget.

    Args:
        clock: The calibrated clock.
        contenders: As for `race`.
        budget_s: Seconds to spend once everyone is prepared, warming up included.
        seed: Of the order in the blocks.
        reference: Label of the contender that has a copy, whose difference is the noise floor.

    Raises:
        BelowFloor: The reference is too short for this clock.
    """
    meters, refused = _prepare(clock, contenders, reference)
    start_s, first = clock.now(), meters[reference]
    samples = first.samples_per_visit(budget_s / len(meters), VISIT_S)
    blocks = Blocks(meters, reference=reference, rival=None, samples=(samples, samples), seed=seed)
    _settle(blocks, clock, start_s + SETTLING * budget_s)
    wanted = samples_needed(SURE)
    while _extend(blocks, clock, wanted, start_s + budget_s):
        if _precise(blocks):
            return _result(blocks, first, refused=refused, end="precise")
        wanted = math.ceil(1.5 * wanted)
    return _result(blocks, first, refused=refused, end="budget")


def _result(
    blocks: Blocks, reference: Meter, *, refused: tuple[tuple[str, str], ...], end: str
) -> RaceResult:
    kept_ms = blocks.kept_ms()
    return RaceResult(
        reference=blocks.reference,
        rival=blocks.rival,
        times_ms=tuple(item for item in kept_ms.items() if item[0] != COPY),
        copy_ms=kept_ms[COPY],
        refused=refused,
        discarded=blocks.count - len(kept_ms[COPY]),
        end=end,
        regime=reference.regime,
        method=reference.method,
        seed=blocks.seed,
    )


def _prepare(
    clock: Clock, contenders: Mapping[str, Sequence[Call]], reference: str
) -> tuple[dict[str, Meter], tuple[tuple[str, str], ...]]:
    """Return the meters of all contenders and of the copy, and who cannot be timed and why."""
    first = clock.prepare(contenders[reference])
    meters = {reference: first}
    refused = []
    for label, calls in contenders.items():
        if label != reference:
            try:
                meters[label] = clock.prepare(calls, like=first)
            except BelowFloor as error:
                refused.append((label, str(error)))
    meters[COPY] = clock.prepare(contenders[reference], like=first)
    return meters, tuple(refused)


def _settle(blocks: Blocks, clock: Clock, until_s: float) -> None:
    """Add blocks that do not count until the machine has warmed up."""
    while clock.now() < until_s:
        blocks.add()
    blocks.clear()


def _race(blocks: Blocks, clock: Clock, until_s: float) -> str:
    """Add blocks until the race is decided or the next one would outlast the budget."""
    wanted = max(LEAST_VISITS, samples_needed(blocks.confidence))
    while True:
        in_time = _extend(blocks, clock, wanted, until_s)
        if end := blocks.look():
            return end
        if not in_time:
            return "budget"
        wanted = math.ceil(1.5 * wanted)


def _extend(blocks: Blocks, clock: Clock, wanted: int, until_s: float) -> bool:
    """Add blocks until so many are kept; return False where the next would outlast the budget."""
    block_s = 0.0
    while blocks.count < wanted or blocks.kept < wanted:
        before_s = clock.now()
        if blocks.count and before_s + block_s > until_s:
            return False
        blocks.add()
        block_s = clock.now() - before_s
    return True


def _precise(blocks: Blocks) -> bool:
    """Return whether everybody's median is known to `PRECISION`."""
    medians = [median_interval(times_ms, SURE) for times_ms in blocks.kept_ms().values()]
    return all(item.high - item.low < 2 * PRECISION * item.value for item in medians)
