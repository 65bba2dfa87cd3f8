"""Blocks: everyone timed once in random order, so that they share what the machine does."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tuner.records import Interval
from tuner.timing.meter import Meter
from tuner.timing.statistics import outliers, ratio_interval, samples_needed

ERROR = 0.05
"""Probability that a race drops or crowns anyone wrongly."""

MOST_DECISIONS = 10
"""Looks at the result that share `ERROR`; each has 1.5 times the blocks of the one before."""

TIE = 0.005
"""Contenders whose ratio is known to lie this close to 1 are equally good for every purpose."""

COPY = "\0copy"
"""Label of the reference's copy while it races."""


class Blocks:
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
        self.reference = reference
        self.rival = rival
        self.seed = seed
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
        self._between_ms = [self._visit_ms(self._meters[self.reference])]

    def add(self) -> None:
        """Time everyone who still runs once, in random order, then the reference."""
        for label in self._order.sample(list(self._meters), len(self._meters)):
            self._times_ms[label].append(self._visit_ms(self._meters[label]))
        self._between_ms.append(self._visit_ms(self._meters[self.reference]))

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
        reference_ms = times_ms[self.reference]
        if len(reference_ms) < samples_needed(self.confidence):
            return None
        runners = [label for label in self._meters if label not in (COPY, self.rival)]
        slowdown = {label: ratio_interval(times_ms[label], reference_ms) for label in runners}
        leader = min(runners, key=lambda label: slowdown[label].value)
        # Whoever beats the reference has to beat its copy too, else the gain is noise.
        others = [label for label in (*runners, COPY) if label != leader]
        if leader == self.reference:
            others.remove(COPY)
        verdicts = {
            label: _verdict(ratio_interval(times_ms[label], times_ms[leader], self.confidence))
            for label in others
        }
        for label, verdict in verdicts.items():
            if verdict == "lost" and label not in (self.reference, COPY):
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
