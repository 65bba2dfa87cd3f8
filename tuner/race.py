"""The final: contenders timed in turn, so that they share what the machine does meanwhile.

A drifting clock makes two separate measurements incomparable. Here every block times all
contenders once, in random order, beside the reference and a second copy of it; only ratios
within a block are compared. A contender is dropped as soon as it is known to have lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from tuner.calibration import BelowFloor
from tuner.clock import SETTLING, Clock
from tuner.meter import Call, Meter
from tuner.records import Interval
from tuner.statistics import outliers, ratio_interval, samples_needed

ERROR = 0.05
"""Probability that a race drops or crowns anyone wrongly."""

MOST_DECISIONS = 10
"""Looks at the result that share `ERROR`; each has 1.5 times the blocks of the one before."""

TIE = 0.005
"""Contenders whose ratio is known to lie this close to 1 are equally good for every purpose."""

VISIT_S = 0.002
"""Time that a block gives a fast contender: a median of several samples outlasts a hiccup."""

MOST_SAMPLES = 9
"""Samples in one visit beyond which other blocks tell more."""

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
        contenders: Calls of each by label, as for `Clock.measure`.
        budget_s: Seconds to spend, warming up included.
        seed: Of the order in the blocks.
        reference: Label of the default: in every block, never dropped.
        rival: Label of a contender in every block that can neither drop others nor be dropped.

    Raises:
        BelowFloor: The reference is too short for this clock.
    """
    start_s = clock.now()
    meters, refused = _prepare(clock, contenders, reference)
    blocks = _Blocks(meters, reference=reference, rival=rival, seed=seed)
    while clock.now() < start_s + SETTLING * budget_s:
        blocks.add()
    blocks.clear()
    end = _run(blocks, clock, start_s + budget_s)
    times_ms, copy_ms = blocks.kept_ms()
    return RaceResult(
        reference=reference,
        rival=rival,
        times_ms=tuple(times_ms.items()),
        copy_ms=copy_ms,
        refused=refused,
        discarded=blocks.count - len(copy_ms),
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


def _run(blocks: _Blocks, clock: Clock, deadline_s: float) -> str:
    """Add blocks until the race is decided or the next one would end after the deadline."""
    wanted, block_s = samples_needed(blocks.confidence), 0.0
    for _ in range(MOST_DECISIONS):
        while blocks.count < wanted:
            start_s = clock.now()
            if blocks.count and start_s + block_s > deadline_s:
                return "budget"
            blocks.add()
            block_s = clock.now() - start_s
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
        seed: Of the order in the blocks.
    """

    def __init__(
        self, meters: Mapping[str, Meter], *, reference: str, rival: str | None, seed: int
    ) -> None:
        self._meters = dict(meters)
        self._reference = reference
        self._bystanders = {COPY, rival}
        self._order = random.Random(seed)
        # Everybody's visits are equally long, else the reference and its copy would not stand
        # for the noise of the others.
        visit = VISIT_S / meters[reference].sample_s
        self._samples = min(max(round(visit), 1), MOST_SAMPLES)
        pairs = max(len(self._meters.keys() - self._bystanders) - 1, 1)
        self.confidence = 1 - ERROR / (MOST_DECISIONS * pairs)
        self.clear()

    @property
    def count(self) -> int:
        """Number of blocks, the discarded ones included."""
        return len(self._times_ms[COPY])

    def clear(self) -> None:
        """Forget all blocks."""
        self._times_ms: dict[str, list[float]] = {label: [] for label in self._meters}

    def add(self) -> None:
        """Time everyone who still runs once, in random order."""
        for label in self._order.sample(list(self._meters), len(self._meters)):
            self._times_ms[label].append(self._visit_ms(self._meters[label]))

    def kept_ms(self) -> tuple[dict[str, tuple[float, ...]], tuple[float, ...]]:
        """Return the times of the contenders and of the copy, without the discarded blocks."""
        kept = self._kept()
        times_ms = {
            label: tuple(time for time, keep in zip(times, kept, strict=False) if keep)
            for label, times in self._times_ms.items()
        }
        copy_ms = times_ms.pop(COPY)
        return times_ms, copy_ms

    def decide(self) -> str | None:
        """Drop who has lost to the leader; return how the race ended if nothing is left open."""
        times_ms, _ = self.kept_ms()
        runners = [label for label in self._meters if label not in self._bystanders]
        if len(times_ms[self._reference]) < samples_needed(self.confidence):
            return None
        fastest = {
            label: ratio_interval(times_ms[label], times_ms[self._reference]).value
            for label in runners
        }
        leader = min(runners, key=fastest.__getitem__)
        verdicts = set()
        for label in runners:
            if label == leader:
                continue
            ratio = ratio_interval(times_ms[label], times_ms[leader], self.confidence)
            verdicts.add(verdict := _verdict(ratio))
            if verdict == "lost" and label != self._reference:
                del self._meters[label]
        if "open" in verdicts:
            return None
        return "tied" if "tied" in verdicts else "separated"

    def _visit_ms(self, meter: Meter) -> float:
        meter.warm_up()
        # A hiccup in the short batch can make a difference negative: no ratio could be taken.
        return max(median(meter.sample() for _ in range(self._samples)) * 1e3, 1e-6)

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Return in which blocks the reference stood still, between its two visits and overall."""
        first, second = np.log(self._times_ms[self._reference]), np.log(self._times_ms[COPY])
        return ~(outliers(first - second) | outliers(first + second))


def _verdict(ratio: Interval) -> str:
    """Return what is known of a contender from its ratio to the leader."""
    if ratio.low > 1:
        return "lost"
    return "tied" if ratio.low > 1 - TIE and ratio.high < 1 + TIE else "open"
