"""Contenders timed in turn with the tuner's clock, nobody dropped: for reports, not for choices.

`tuner.timing.race` spends its time on whoever may still win. Here everybody is timed in every
block, so that all medians are of the same blocks and their ratios can be taken.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rows import Spread

from tuner.timing.clock import Clock
from tuner.timing.meter import VISIT_S, Call, Meter, Timing

LEAST_BLOCKS = 6
"""Blocks below which a median has no 95 % interval."""


@dataclass(frozen=True, slots=True)
class Contest:
    """How a contest is held.

    Attributes:
        clock: The calibrated clock.
        budget_s: Seconds for each contender, in each repeat.
        repeats: How often the whole contest is held.
        settle_s: Time that a contender runs untimed at each visit. Two libraries have a pool of
            threads each, and idle threads spin for some milliseconds before they sleep.
    """

    clock: Clock
    budget_s: float
    repeats: int
    settle_s: float

    def hold(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, list[Timing] | str]:
        """Return each contender's timing in every repeat, or why it cannot be timed.

        Args:
            contenders: Calls of each by label, one for each set of buffers, in the same order.
                The first that the clock can see sets the lengths of everybody's batches.
        """
        timings: dict[str, list[Timing] | str] = {label: [] for label in contenders}
        labels = list(contenders)
        for repeat in range(self.repeats):
            turn = repeat % max(len(labels), 1)
            order = labels[turn:] + labels[:turn]
            outcomes = self._once({label: contenders[label] for label in order}, labels, repeat)
            for label, outcome in outcomes.items():
                earlier = timings[label]
                if isinstance(outcome, str):
                    timings[label] = outcome
                elif not isinstance(earlier, str):
                    earlier.append(outcome)
        return timings

    def _once(
        self, contenders: Mapping[str, Sequence[Call]], ranking: Sequence[str], seed: int
    ) -> dict[str, Timing | str]:
        outcomes: dict[str, Timing | str] = {}
        like = self._first_meter({label: contenders[label] for label in ranking}, outcomes)
        meters: dict[str, Meter] = {}
        for label, calls in contenders.items():
            if label in outcomes or like is None:
                continue
            prepared = self._prepared(calls, like)
            if isinstance(prepared, str):
                outcomes[label] = prepared
            else:
                meters[label] = prepared
        if like is not None:
            outcomes |= self._timings(meters, like, random.Random(seed))
        return outcomes

    def _first_meter(
        self, contenders: Mapping[str, Sequence[Call]], outcomes: dict[str, Timing | str]
    ) -> Meter | None:
        for label, calls in contenders.items():
            prepared = self._prepared(calls)
            if not isinstance(prepared, str):
                return prepared
            outcomes[label] = prepared
        return None

    def _prepared(self, calls: Sequence[Call], like: Meter | None = None) -> Meter | str:
        try:
            return self.clock.prepare(calls, like=like)
        except Exception as error:  # a contender that fails does not end the contest
            return reason(error)

    def _timings(
        self, meters: Mapping[str, Meter], like: Meter, order: random.Random
    ) -> dict[str, Timing]:
        visits_ms: dict[str, list[float]] = {label: [] for label in meters}
        samples = like.samples_per_visit(self.budget_s, VISIT_S)
        end_s = self.clock.now() + self.budget_s * len(meters)
        blocks = -1  # the first block warms up
        while blocks < LEAST_BLOCKS or self.clock.now() < end_s:
            for label in order.sample(list(meters), len(meters)):
                visits_ms[label].append(self._visit_ms(meters[label], samples))
            blocks += 1
        return {
            label: Timing.of(times_ms[1:], regime=meters[label].regime, method=like.method)
            for label, times_ms in visits_ms.items()
        }

    def _visit_ms(self, meter: Meter, samples: int) -> float:
        settled_s = self.clock.now() + self.settle_s
        while self.clock.now() + meter.sample_s < settled_s:
            meter.sample()
        # a hiccup in the shorter batch can make the difference negative, as in `tuner.timing.race`
        return max(meter.visit(samples) * 1e3, 1e-6)


def summary(timings: Sequence[Timing]) -> Spread:
    """Return the medians over repeats of the median and of the ends of its interval."""
    ends = ("median_ms", "low_ms", "high_ms")
    return Spread(*(median(getattr(timing, name) for timing in timings) for name in ends))


def reason(error: Exception) -> str:
    """Return the first line of what an error says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
