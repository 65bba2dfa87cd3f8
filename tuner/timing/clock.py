"""The wall clock: what a kernel takes, from nothing but a host clock and a synchronisation.

A reading of a batch of n calls is ``batch_s + n * (launch_s + kernel)``. The two costs are
calibrated with an empty call and taken off; where the fixed one would matter, it cancels in the
difference of two batch lengths. Captured graphs shrink the launches where a device has them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

from tuner.timing.calibration import BelowFloor, Calibration, calibrate
from tuner.timing.meter import (
    VISIT_S,
    Batch,
    Call,
    Meter,
    Overhead,
    Reading,
    Stopwatch,
    Timer,
    Timing,
    rotate,
)
from tuner.timing.pace import Pacer

SHARE = 100
"""A timed stretch lasts this many fixed costs of a reading, so that their jitter is below 1 %."""

MOST_CALLS = 100_000
"""Calls in a batch beyond which the work is taken for nothing."""

LAUNCH_BOUND = 0.9
"""Share of a batch spent launching from which the kernels hide behind their launches."""

LEAST_VISITS = 10
"""Visits before a measurement or a race may end, unless its budget ends it."""

PRECISION = 0.005
"""Half-width of the median's interval, relative, at which more visits are not worth the time."""

ATTEMPTS = 3
"""Measurements before a variant whose time comes out as nothing is given up."""

GIVE_UP = 2.0
"""How many times slower than the best a variant must be to be stopped early."""

SETTLING = 0.1
"""Share of a budget spent warming up, so that caches and sustained-load clocks settle."""


class Clock:
    """Times calls on one device from the host.

    Args:
        timer: The device's synchronisation and graphs.
        now: The host's clock, in seconds.
    """

    def __init__(self, timer: Timer, *, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._timer = timer
        self._stopwatch = Stopwatch(timer, now)
        self._turns = itertools.count()
        self._calibration: Calibration | None = None

    @property
    def calibration(self) -> Calibration:
        """The last calibration; without one, a first one against a call that does nothing."""
        return self._calibration or self.calibrate()

    def calibrate(self, empty_call: Call | None = None) -> Calibration:
        """Measure what a reading costs beside the work, in this process and on this device.

        Args:
            empty_call: Launches an empty kernel the way that variants are launched.

        Raises:
            BelowFloor: The host's clock does not advance.
        """
        self._calibration = calibrate(self._stopwatch, empty_call)
        return self._calibration

    def measure(
        self,
        calls: Sequence[Call],
        *,
        budget_s: float,
        give_up_ms: float | None,
        pacer: Pacer | None = None,
    ) -> Timing:
        """Return the time of a variant that shares the device with nobody but a pacer.

        Visits end with the budget, or from `LEAST_VISITS` on once the median is known to
        `PRECISION` or to be above the best, looked at whenever they have doubled. Noise on a
        shared machine only adds, so the fastest sample of the warm-up tells whether to give up.

        Args:
            calls: The variant bound to one set of buffers (warm), or to several that together
                exceed the last-level cache (cold).
            budget_s: Seconds to spend.
            give_up_ms: The best time so far; a variant `GIVE_UP` times slower is not pursued.
            pacer: By whose pace the times are corrected.

        Raises:
            BelowFloor: The work is too short for this clock.
        """
        for _ in range(ATTEMPTS):
            timing = self._measure(calls, budget_s, give_up_ms or math.inf, pacer)
            if timing.low_ms > 0:
                return timing
        raise BelowFloor(
            f"the clock reads {timing.median_ms:.3g} ms, between {timing.low_ms:.3g} and"
            f" {timing.high_ms:.3g}: the host was too busy to time {timing.method}"
        )

    def _measure(
        self, calls: Sequence[Call], budget_s: float, best_ms: float, pacer: Pacer | None
    ) -> Timing:
        start_s = self.now()
        meter = self.prepare(calls)
        fastest_s = meter.estimate_s
        while self.now() < start_s + SETTLING * budget_s:
            fastest_s = min(fastest_s, meter.sample())
        if fastest_s * 1e3 > GIVE_UP * best_ms:
            return meter.timing([fastest_s], gave_up=True)
        samples = meter.samples_per_visit(budget_s, VISIT_S)
        visits = _visits(meter, samples, pacer)
        visits_s, look = [next(visits)], LEAST_VISITS
        while self.now() < start_s + budget_s:
            if len(visits_s) == look:
                timing, look = meter.timing(visits_s), 2 * look
                width = (timing.high_ms - timing.low_ms) / timing.median_ms
                if width < 2 * PRECISION or timing.low_ms > best_ms:
                    break
            visits_s.append(next(visits))
        return meter.timing(visits_s)

    def prepare(self, calls: Sequence[Call], *, like: Meter | None = None) -> Meter:
        """Warm a variant up and return it with batches that outweigh the cost of a reading.

        A single call that is long enough is timed by itself, with the calibrated cost taken off;
        a longer batch is compared with one of a fifth of its length.

        Args:
            calls: As for `measure`.
            like: A variant to compare with, whose lengths of batches are used.

        Raises:
            BelowFloor: The work is too short for this clock.
        """
        long = self._batch(calls, like.count if like else 1)
        reading = self._fastest(long)
        while not like and reading.elapsed_s < self._stretch_s(long.overhead):
            if long.count >= MOST_CALLS:
                raise BelowFloor(
                    f"{long.count} calls take {reading.elapsed_s * 1e6:.3g} us in all: nothing"
                    f" beside the {long.overhead.batch_s * 1e6:.3g} us that a reading costs"
                )
            wanted = 1.1 * self._stretch_s(long.overhead) / max(reading.elapsed_s, 1e-9)
            growth = min(math.ceil(wanted), 16)
            long = self._batch(calls, min(long.count * growth, MOST_CALLS))
            reading = self._fastest(long)
        estimate_s = reading.elapsed_s / long.count - long.overhead.launch_s
        self._refuse_hidden(long, reading, estimate_s)
        if long.count == 1:
            return Meter(self._stopwatch, None, long, len(calls), estimate_s)
        short = self._batch(calls, math.ceil(long.count / 5))
        long = self._batch(calls, long.count + short.count)
        return Meter(self._stopwatch, short, long, len(calls), estimate_s)

    def _fastest(self, batch: Batch) -> Reading:
        self._stopwatch.time(batch.run)
        return min(self._stopwatch.time(batch.run) for _ in range(2))

    def _stretch_s(self, overhead: Overhead) -> float:
        return SHARE * (overhead.batch_s + self.calibration.resolution_s)

    def _batch(self, calls: Sequence[Call], count: int) -> Batch:
        """Return at least `count` calls: as a graph where that works, else from the host."""
        calibration = self.calibration
        if calibration.graph and (batch := self._graph(calls, count, calibration.graph)):
            return batch
        plain = calibration.plain
        if calibration.asynchronous:  # the launches run ahead of the kernels and cost nothing
            plain = Overhead(plain.batch_s, 0.0)
        return Batch(rotate(calls, count, self._turns), count, plain, "calls")

    def _graph(self, calls: Sequence[Call], count: int, overhead: Overhead) -> Batch | None:
        if count == 1:
            replays = [self._timer.capture(call, 1) for call in calls]
            captured = [replay for replay in replays if replay]
            whole = len(captured) == len(calls)
            return (
                Batch(rotate(captured, 1, self._turns), 1, overhead, "captured calls")
                if whole
                else None
            )
        # The buffers of a graph are fixed: whole passes keep any of them from coming back early.
        count = math.ceil(count / len(calls)) * len(calls)
        rotation = itertools.cycle(calls)
        replay = self._timer.capture(lambda: next(rotation)(), count)
        return Batch(replay, count, overhead, "captured calls") if replay else None

    def _refuse_hidden(self, batch: Batch, reading: Reading, estimate_s: float) -> None:
        """Raise where the time of a call says more about launching than about the kernel."""
        launch_s = batch.overhead.launch_s
        if self.calibration.asynchronous and batch.kind == "calls":
            hidden = reading.launched_s > LAUNCH_BOUND * reading.elapsed_s
            launch_s = reading.launched_s / batch.count
        else:
            hidden = estimate_s < launch_s  # an error of the residue would count in full
        if hidden:
            raise BelowFloor(
                f"a call takes {reading.elapsed_s / batch.count * 1e6:.3g} us, of which its launch"
                f" takes {launch_s * 1e6:.3g} us: the kernel is too short to be seen by the clock;"
                " use a larger workload"
            )


def _visits(meter: Meter, samples: int, pacer: Pacer | None) -> Iterator[float]:
    """Yield the seconds of a call visit by visit, at the pacer's usual pace if there is one."""
    before = pacer.slowness() if pacer else 1.0
    while True:
        seconds = meter.visit(samples)
        after = pacer.slowness() if pacer else 1.0
        yield seconds / ((before + after) / 2)
        before = after
