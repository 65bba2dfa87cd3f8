"""A fair race of two calls in one process: what a frozen package verifies itself with."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ratio:
    """Their time over ours, above 1 when we are faster, with an interval of about 99 %."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the value with its interval, ``1.52x [1.49, 1.55]``."""
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def compare(
    ours: Callable[[], None],
    theirs: Callable[[], None],
    *,
    device: torch.device,
    rounds: int = 11,
    batch_ms: float = 4.0,
) -> Ratio:
    """Time two calls in turn, so that whatever drifts meets both.

    Args:
        ours: One call.
        theirs: The other.
        device: Where they run; it is waited for.
        rounds: Number of pairs of batches; the interval leaves out the lowest and the highest
            ratio, which covers the median with a probability of 1 - (rounds + 1) / 2^(rounds - 1).
        batch_ms: Least length of a batch, in milliseconds.
    """
    pair = (ours, theirs)
    repeats = []
    for call in pair:
        _seconds(call, 1, device)  # the first call compiles, allocates or fills the caches
        once = _seconds(call, 1, device)
        repeats.append(max(1, math.ceil(batch_ms * 1e-3 / max(once, 1e-9))))
    ratios = []
    for number in range(rounds):
        seconds = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            seconds[side] = _seconds(pair[side], repeats[side], device) / repeats[side]
        ratios.append(seconds[1] / seconds[0])
    ratios.sort()
    return Ratio(statistics.median(ratios), ratios[1], ratios[-2])


def _seconds(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start
