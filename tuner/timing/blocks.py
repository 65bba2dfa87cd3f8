"""Blocks: everyone timed once in random order, so that they share what the machine does.

The rule by which blocks decide a race, looked at after n, 1.5 n, 2.25 n, ... of them:

1. Look number k may err with probability ``ERROR / 2 ** k``, so that all of them may with `ERROR`,
   however many they are (as in Even-Dar, Mannor and Mansour, Action Elimination, JMLR 2006).
2. Faster is whose intervals, sharing that error, lie before the default's and its copy's time.
3. Dropped is who by an interval of its own gains at most a tie on either, or loses to the leader
   (equivalence as in Schuirmann, Two One-Sided Tests, 1987).
4. The race ends when nobody is left, or the leader is faster and all who are left tie with it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from tuner.records import Interval
from tuner.timing.meter import Meter
from tuner.timing.statistics import outliers, ratio_interval, samples_needed

ERROR = 0.05
"""Probability that a race crowns anyone wrongly."""

TIE = 0.005
"""Contenders whose ratio is known to lie this close to 1 are equally good for every purpose."""

COPY = "\0copy"
"""Label of the reference's copy while it races."""

Times = Mapping[str, Sequence[float]]


class Blocks:
    """The blocks of a race so far, and who still runs.

    Args:
        meters: Contenders by label, the copy among them.
        reference: Label of the default.
        rival: Label of the contender that is only compared with.
        samples: Samples in everybody's visits, at least and at most.
        seed: Of the order in the blocks.
    """

    def __init__(
        self,
        meters: Mapping[str, Meter],
        *,
        reference: str,
        rival: str | None,
        samples: tuple[int, int],
        seed: int,
    ) -> None:
        self._meters = dict(meters)
        self.reference = reference
        self.rival = rival
        self.seed = seed
        self._order = random.Random(seed)
        self._samples = samples
        self._contenders = len(self._running())
        self._looks = 0
        self.clear()

    @property
    def count(self) -> int:
        """Number of blocks, the discarded ones included."""
        return len(self._copy_ms) - 1

    @property
    def kept(self) -> int:
        """Number of blocks in which the machine stood still."""
        return int(self._kept().sum())

    @property
    def error(self) -> float:
        """Probability with which the last look may err, or will the first."""
        return float(ERROR / 2 ** max(self._looks, 1))

    @property
    def confidence(self) -> float:
        """Confidence of the intervals by which anyone is faster at that look."""
        return confidence(self.error, self._contenders)

    def clear(self) -> None:
        """Forget all blocks."""
        self._times_ms: dict[str, list[float]] = {label: [] for label in self._meters}
        del self._times_ms[COPY]
        self._copy_ms = [self._visit_ms(COPY)]
        self._judged = np.empty(0, dtype=bool)

    def add(self) -> None:
        """Time everyone who still runs once, in random order, then the copy."""
        others = [label for label in self._meters if label != COPY]
        for label in self._order.sample(others, len(others)):
            self._times_ms[label].append(self._visit_ms(label))
        self._copy_ms.append(self._visit_ms(COPY))

    def kept_ms(self) -> dict[str, tuple[float, ...]]:
        """Return everybody's times without those of the discarded blocks."""
        kept = self._kept()
        return {
            label: tuple(time for time, keep in zip(times, kept, strict=False) if keep)
            for label, times in (*self._times_ms.items(), (COPY, self._copy_ms[1:]))
        }

    def look(self) -> str | None:
        """Drop who cannot win any more; return how the race ended if nothing is left open."""
        self._looks += 1
        self._judged = self._kept()
        times_ms, sure = self.kept_ms(), 1 - self.error
        if len(times_ms[COPY]) < samples_needed(sure):
            return None
        ratio = partial(_ratio, times_ms, confidence=sure)
        left = [
            label
            for label in self._running()
            if min(ratio(same, label).high for same in (self.reference, COPY)) >= 1 + TIE
        ]
        leader = min(left, key=lambda label: ratio(label, self.reference).value, default="")
        behind = {label: ratio(label, leader) for label in left}
        left = [label for label in left if behind[label].low <= 1]
        for label in set(self._running()).difference(left):
            del self._meters[label]
        if not left:
            return "tied"
        if not faster(times_ms, [leader], self.reference, self.confidence):
            return None
        if any(behind[label].low < 1 - TIE or behind[label].high > 1 + TIE for label in left):
            return None
        return "tied" if len(left) > 1 else "separated"

    def _running(self) -> list[str]:
        """Return who may still win, beside the default."""
        fixed = (self.reference, self.rival, COPY)
        return [label for label in self._meters if label not in fixed]

    def _visit_ms(self, label: str) -> float:
        # A hiccup in every short batch can make a difference negative: no ratio could be taken.
        return max(self._meters[label].visit(*self._samples) * 1e3, 1e-6)

    def _kept(self) -> npt.NDArray[np.bool_]:
        """Return in which blocks the machine stood still.

        The reference's copy is compared before and after each block and with its usual level.
        Neither the default nor those who challenge it are chosen by their own times. What a look
        was based on stays, else those that it dropped could be left without any.
        """
        copy = np.log(self._copy_ms)
        before, after = copy[:-1], copy[1:]
        kept = ~(outliers(after - before) | outliers(after + before))
        kept[: len(self._judged)] = self._judged
        return kept


def _ratio(times_ms: Times, over: str, under: str, *, confidence: float) -> Interval:
    return ratio_interval(times_ms[over], times_ms[under], confidence)


def confidence(error: float, contenders: int) -> float:
    """Return the confidence of each interval if contenders share the probability of an error."""
    return 1 - error / max(contenders, 1)


def faster(
    times_ms: Times, labels: Sequence[str], reference: str, confidence: float
) -> dict[str, Interval]:
    """Return who is faster than the default and its copy, by more than a tie and their difference.

    The copy is the same kernel, so what distinguishes it from the default is noise.

    Args:
        times_ms: Times by label in the same blocks, those of the copy among them.
        labels: Whom to ask about.
        reference: Label of the default.
        confidence: Of the intervals by which a contender is faster.

    Returns:
        The gain of each who is: the default's time over its own.
    """
    default_ms, copy_ms = times_ms[reference], times_ms[COPY]
    if len(copy_ms) < samples_needed(confidence):
        return {}
    noise = ratio_interval(copy_ms, default_ms).value
    floor = max(noise, 1 / noise, 1 + TIE)
    found = {}
    for label in labels:
        gain = ratio_interval(default_ms, times_ms[label], confidence)
        over_copy = ratio_interval(copy_ms, times_ms[label], confidence)
        if min(gain.low, over_copy.low) > 1 and gain.value > floor:
            found[label] = gain
    return found
