"""What a reading of the wall clock costs beside the work, found with a call that does nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from tuner.records import TunerError
from tuner.timing.meter import Call, Overhead, Stopwatch, rotate
from tuner.timing.statistics import undisturbed

READINGS = 31
"""Readings behind each calibrated cost."""

SHORT, LONG = 40, 240
"""Lengths of the batches of empty calls whose difference is the residue per launch."""

MOST_LOOKS = 1_000_000
"""Looks at the host's clock within which it has to advance."""


class BelowFloor(TunerError):
    """The work is too short for this clock to see, so it must not be ranked."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What the clock of this process can see on this device.

    Attributes:
        resolution_s: Smallest step of the host's clock.
        synchronize_s: A reading with nothing to wait for: a synchronisation and the clock itself.
        call_s: A lone empty call with its synchronisation.
        plain: Costs of a batch of calls from the host.
        graph: Costs of a captured batch; None without graphs.
        asynchronous: Whether a call returns before its kernel has run.
    """

    resolution_s: float
    synchronize_s: float
    call_s: float
    plain: Overhead
    graph: Overhead | None
    asynchronous: bool


def calibrate(stopwatch: Stopwatch, empty_call: Call | None = None) -> Calibration:
    """Return what readings cost in this process and on this device.

    Args:
        stopwatch: The clock and the device.
        empty_call: Launches an empty kernel the way that variants are launched; by default a
            Python function that does nothing, so that launches count as work.

    Raises:
        BelowFloor: The host's clock does not advance.
    """
    call = empty_call or _nothing
    resolution_s = _resolution(stopwatch.now)
    for _ in range(READINGS):
        stopwatch.time(call)
    lone = [stopwatch.time(call) for _ in range(READINGS)]
    call_s = undisturbed([reading.elapsed_s for reading in lone])
    waited_s = undisturbed([reading.elapsed_s - reading.launched_s for reading in lone])
    idle_s = undisturbed([stopwatch.time(_nothing).elapsed_s for _ in range(READINGS)])
    short, long = (stopwatch.timer.capture(call, count) for count in (SHORT, LONG))
    return Calibration(
        resolution_s=resolution_s,
        synchronize_s=idle_s,
        call_s=call_s,
        plain=_overhead(stopwatch, *(rotate([call], n, itertools.count()) for n in (SHORT, LONG))),
        graph=_overhead(stopwatch, short, long) if short and long else None,
        # A call that is done when it returns leaves nothing to wait for.
        asynchronous=waited_s > idle_s + 0.1 * call_s + resolution_s,
    )


def _overhead(stopwatch: Stopwatch, short: Call, long: Call) -> Overhead:
    pairs = [(stopwatch.time(short), stopwatch.time(long)) for _ in range(READINGS)]
    short_s, long_s = (undisturbed([pair[i].elapsed_s for pair in pairs]) for i in range(2))
    launch_s = max((long_s - short_s) / (LONG - SHORT), 0.0)
    return Overhead(max(short_s - SHORT * launch_s, 0.0), launch_s)


def _nothing() -> None:
    """Stand for a kernel that takes no time."""


def _resolution(now: Callable[[], float]) -> float:
    """Return the smallest step seen between two looks at the clock, in seconds."""
    steps: list[float] = []
    before = now()
    for _ in range(MOST_LOOKS):
        after = now()
        if after > before:
            steps.append(after - before)
        if len(steps) == READINGS:
            break
        before = after
    if not steps:
        raise BelowFloor(f"the host's clock did not move in {MOST_LOOKS} looks at it")
    return min(steps)
