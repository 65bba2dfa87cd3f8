"""One variant in front of the clock: batches of its calls, samples and their timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tuner.timing.statistics import median_interval, undisturbed

Call = Callable[[], None]

VISIT_S = 0.005
"""Time to spend on one visit to a variant, so that it outlasts a hiccup of the machine."""

LEAST_SAMPLES, MOST_SAMPLES = 2, 9
"""Samples in a visit, if the budget allows them: the first may pay for data that another variant
has evicted, or for a hiccup."""

AGREED = 1.02
"""Ratio of two readings that confirm each other: disturbances differ by more."""

GROSS = 2.0
"""How many times as long as seen before is a disturbance: no card's clock moves that far."""

VISITS = 25
"""Visits to each variant that a budget must allow before a visit has more than one sample."""


class Timer(Protocol):
    """What a device offers to the clock."""

    def synchronize(self) -> None:
        """Return when everything that was launched has finished."""

    def capture(self, call: Call, count: int) -> Call | None:
        """Return a replay of `count` calls as one captured graph.

        Args:
            call: Launches one variant; each call may use another set of buffers.
            count: How often to call it while capturing.

        Returns:
            The replay, or None where the device has no graphs or cannot capture this call.
        """


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a reading costs beside the kernels in it.

    Attributes:
        batch_s: Fixed cost of a batch: first launch, last wait, the clock itself.
        launch_s: Residue per launch: what one more empty call adds to a batch.
    """

    batch_s: float
    launch_s: float


class Reading(NamedTuple):
    """One batch from start to end, and the part of it until the last call had returned."""

    elapsed_s: float
    launched_s: float


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """The host's clock beside a device.

    Attributes:
        timer: The device's synchronisation and graphs.
        now: The host's clock, in seconds.
    """

    timer: Timer
    now: Callable[[], float] = time.perf_counter

    def time(self, run: Call) -> Reading:
        """Return what the clock shows around a batch; the device is idle before and after."""
        start_s = self.now()
        run()
        launched_s = self.now() - start_s
        self.timer.synchronize()
        return Reading(self.now() - start_s, launched_s)


@dataclass(frozen=True, slots=True)
class Batch:
    """Some calls of a variant that are timed together.

    Attributes:
        run: Runs or launches all of them.
        count: How many they are.
        overhead: What their reading costs beside them.
        kind: ``"calls"`` from the host, or ``"captured calls"``.
    """

    run: Call
    count: int
    overhead: Overhead
    kind: str


@dataclass(frozen=True, slots=True)
class Timing:
    """A variant's time, in milliseconds per call, with the 95 % interval of its median.

    Attributes:
        median_ms: Median over the visits to the variant, each of one or several samples.
        low_ms: Lower end of its interval.
        high_ms: Upper end of its interval.
        samples: Number of visits.
        regime: ``"warm"`` (the same buffers in every call) or ``"cold"`` (rotating buffers).
        method: How a sample was taken, such as ``"captured calls x 48 less 8"``.
        gave_up: Whether sampling stopped because the variant was far slower than the best.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    regime: str
    method: str
    gave_up: bool = False

    @classmethod
    def of(
        cls, visits_ms: Sequence[float], *, regime: str, method: str, gave_up: bool = False
    ) -> Timing:
        """Return the timing that visits amount to, given their times in milliseconds."""
        median = median_interval(visits_ms)
        return cls(median.value, median.low, median.high, len(visits_ms), regime, method, gave_up)


@dataclass(frozen=True, slots=True)
class Meter:
    """A variant with batches long enough for the clock.

    Attributes:
        stopwatch: Times the batches.
        short: Batch whose time is taken off the long one's; None where the fixed cost is small.
        long: The batch that is timed.
        sets: Number of buffer sets that the calls rotate through.
        estimate_s: Seconds of one call as first seen.
    """

    stopwatch: Stopwatch
    short: Batch | None
    long: Batch
    sets: int
    estimate_s: float

    @property
    def count(self) -> int:
        """Calls by which the two batches differ."""
        return self.long.count - (self.short.count if self.short else 0)

    @property
    def regime(self) -> str:
        """Cache regime, as in `Timing`."""
        return "warm" if self.sets == 1 else "cold"

    @property
    def method(self) -> str:
        """How a sample is taken, as in `Timing`."""
        less = f" less {self.short.count}" if self.short else ""
        return f"{self.long.kind} x {self.long.count}{less}"

    @property
    def sample_s(self) -> float:
        """About how long one sample takes."""
        return self.estimate_s * (self.long.count + (self.short.count if self.short else 0))

    def samples_per_visit(self, budget_s: float, visit_s: float) -> int:
        """Return how many samples a visit should have.

        Args:
            budget_s: Seconds for all visits to this variant together.
            visit_s: Seconds that a visit should last, if the budget allows it.
        """
        wanted = min(max(round(visit_s / self.sample_s), LEAST_SAMPLES), MOST_SAMPLES)
        least = LEAST_SAMPLES if self.sets == 1 else 1
        return max(min(wanted, int(budget_s / VISITS / self.sample_s)), least)

    def visit(self, samples: int, most: int = 0) -> float:
        """Return the seconds of one call, as undisturbed as a number of samples can tell.

        Args:
            samples: Samples to take.
            most: Samples to take at most where the first do not confirm each other.
        """
        readings = [self._readings() for _ in range(samples)]
        while len(readings) < most and not self._confirmed(readings):
            readings.append(self._readings())
        return self._call_s(readings)

    def sample(self) -> float:
        """Return the seconds of one call from one look at the clock."""
        return self._call_s([self._readings()])

    def _confirmed(self, readings: Sequence[tuple[float, float]]) -> bool:
        """Return whether two readings agree, and not on a wait for a core that others have."""
        least_s, next_s = sorted(long_s for _, long_s in readings)[:2]
        return next_s < AGREED * least_s and self._call_s(readings) < GROSS * self.estimate_s

    def _readings(self) -> tuple[float, float]:
        """Return the seconds of the short batch and of the long one."""
        read, fixed_s = self.stopwatch.time, self.long.overhead.batch_s
        short_s = read(self.short.run).elapsed_s if self.short else fixed_s
        return short_s, read(self.long.run).elapsed_s

    def _call_s(self, readings: Sequence[tuple[float, float]]) -> float:
        """Return the seconds of one call.

        Noise adds to a reading and never takes off, so each length of batch is judged by itself:
        the least difference would be that of a disturbed short batch.
        """
        short_s, long_s = (undisturbed(times_s) for times_s in zip(*readings, strict=True))
        return (long_s - short_s) / self.count - self.long.overhead.launch_s

    def timing(self, visits_s: Sequence[float], *, gave_up: bool = False) -> Timing:
        """Return the timing that visits amount to, given their times in seconds."""
        visits_ms = [visit_s * 1e3 for visit_s in visits_s]
        return Timing.of(visits_ms, regime=self.regime, method=self.method, gave_up=gave_up)


def rotate(calls: Sequence[Call], count: int, turns: Iterator[int]) -> Call:
    """Return a batch of plain calls that goes on with the next buffer set.

    Args:
        calls: A variant bound to each buffer set.
        count: Calls in the batch.
        turns: Counts the calls of all batches that share the buffers, so that whoever comes next
            does not find what another variant has just used in the cache.
    """

    def run() -> None:
        for _ in range(count):
            calls[next(turns) % len(calls)]()

    return run
