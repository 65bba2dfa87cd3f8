"""The final: contenders timed in turn, so that they share what the machine does meanwhile.

A drifting clock makes two separate measurements incomparable. Here every block times all
contenders once, in random order, the reference twice; only ratios within a block are compared.
Between two blocks the reference is timed once more, to see whether the machine stood still. A
contender is dropped as soon as it is known to have lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.records import Interval
from tuner.timing.calibration import BelowFloor
from tuner.timing.clock import SETTLING, Clock
from tuner.timing.meter import Call, Meter
from tuner.timing.statistics import outliers, ratio_interval, samples_needed

ERROR = 0.05
"""Probability that a race drops or crowns anyone wrongly."""

MOST_DECISIONS = 10
"""Looks at the result that share `ERROR`; each has 1.5 times the blocks of the one before."""

TIE = 0.005
"""Contenders whose ratio is known to lie this close to 1 are equally good for every purpose."""

COPY = "\0copy"
"""Label of the reference's copy while it races."""


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
        end: Why the race ended: ``"separated"``, ``"tied"`` or ``"budget"``.
        regime: As in `Timing`.
        method: As in `Timing`, of the reference.
        seed: Of the order in the blocks.
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
        budget_s: Seconds to spend, warming up included.
        seed: Of the order in the blocks.
        reference: Label of the default: in every block, never dropped.
        rival: Label of a contender in every block that can neither drop others nor be dropped.

    Raises:
        BelowFloor: The reference is too short for this clock.
    """
    start_s = clock.now()
    meters, refused = _prepare(clock, contenders, reference)
    blocks = _Blocks(meters, reference=reference, rival=rival, budget_s=budget_s, seed=seed)
    end = _run(blocks, clock, start_s, budget_s)
    kept_ms = blocks.kept_ms()
    return RaceResult(
        reference=reference,
        rival=rival,
        times_ms=tuple(item for item in kept_ms.items() if item[0] != COPY),
        copy_ms=kept_ms[COPY],
        refused=refused,
        discarded=blocks.count - len(kept_ms[COPY]),
        end=end,
        regime=meters[reference].regime,
        method=meters[reference].method,
        seed=seed,
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


def _run(blocks: _Blocks, clock: Clock, start_s: float, budget_s: float) -> str:
    """Add blocks until the race is decided or the next one would outlast the budget."""
    while clock.now() < start_s + SETTLING * budget_s:
        blocks.add()
    blocks.clear()
    wanted, block_s = samples_needed(blocks.confidence), 0.0
    for _ in range(MOST_DECISIONS):
        while blocks.count < wanted:
            before_s = clock.now()
            if blocks.count and before_s + block_s > start_s + budget_s:
                return "budget"
            blocks.add()
            block_s = clock.now() - before_s
        if end := blocks.decide():
            return end
        wanted = math.ceil(1.5 * wanted)
    return "budget"


class _Blocks:
    """The blocks of a race so far, and who still runs.

    Args:
        meters: Contenders by label, the copy among them.
        reference: Label of the default.
        rival: Label of the contender that is only compared with.
        budget_s: Seconds that the blocks may take.
        seed: Of the order in the blocks.
    """

    def __init__(
        self,
        meters: Mapping[str, Meter],
        *,
        reference: str,
        rival: str | None,
        budget_s: float,
        seed: int,
    ) -> None:
        self._meters = dict(meters)
        self._reference = reference
        self._rival = rival
        self._order = random.Random(seed)
        # Everybody's visits are equally long, else the reference and its copy would not stand
        # for the noise of the others; the reference has one more visit, between the blocks.
        self._samples = meters[reference].samples_per_visit(budget_s / (len(meters) + 1))
        pairs = max(len(self._meters.keys() - {COPY, rival}) - 1, 1)
        self.confidence = 1 - ERROR / (MOST_DECISIONS * pairs)
        self.clear()

    @property
    def count(self) -> int:
        """Number of blocks, the discarded ones included."""
        return len(self._times_ms[COPY])

    def clear(self) -> None:
        """Forget all blocks."""
        self._times_ms: dict[str, list[float]] = {label: [] for label in self._meters}
        self._between_ms = [self._visit_ms(self._meters[self._reference])]

    def add(self) -> None:
        """Time everyone who still runs once, in random order, then the reference."""
        for label in self._order.sample(list(self._meters), len(self._meters)):
            self._times_ms[label].append(self._visit_ms(self._meters[label]))
        self._between_ms.append(self._visit_ms(self._meters[self._reference]))

    def kept_ms(self) -> dict[str, tuple[float, ...]]:
        """Return everybody's times without those of the discarded blocks."""
        kept = self._kept()
        return {
            label: tuple(time for time, keep in zip(times, kept, strict=False) if keep)
            for label, times in self._times_ms.items()
        }

    def decide(self) -> str | None:
        """Drop who has lost to the leader; return how the race ended if nothing is left open."""
        times_ms = self.kept_ms()
        reference_ms = times_ms[self._reference]
        if len(reference_ms) < samples_needed(self.confidence):
            return None
        runners = [label for label in self._meters if label not in (COPY, self._rival)]
        slowdown = {label: ratio_interval(times_ms[label], reference_ms) for label in runners}
        leader = min(runners, key=lambda label: slowdown[label].value)
        # Whoever beats the reference has to beat its copy too, else the gain is noise.
        others = [label for label in (*runners, COPY) if label != leader]
        if leader == self._reference:
            others.remove(COPY)
        verdicts = {
            label: _verdict(ratio_interval(times_ms[label], times_ms[leader], self.confidence))
            for label in others
        }
        for label, verdict in verdicts.items():
            if verdict == "lost" and label not in (self._reference, COPY):
                del self._meters[label]
        if "open" in verdicts.values():
            return None
        return "tied" if "tied" in verdicts.values() else "separated"

    def _visit_ms(self, meter: Meter) -> float:
        meter.warm_up()
        # A hiccup in the short batch can make a difference negative: no ratio could be taken.
        return max(meter.visit(self._samples) * 1e3, 1e-6)

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Return in which blocks the machine stood still.

        The reference is compared before and after each block and with its usual level. These
        visits are not in the ratios: discarding by the very times that are compared would leave
        the reference with less noise than the others.
        """
        between = np.log(self._between_ms)
        before, after = between[:-1], between[1:]
        return ~(outliers(after - before) | outliers(after + before))


def _verdict(ratio: Interval) -> str:
    """Return what is known of a contender from its ratio to the leader."""
    if ratio.low > 1:
        return "lost"
    return "tied" if ratio.low > 1 - TIE and ratio.high < 1 + TIE else "open"
