"""A simulated machine: a host's clock, a device, and kernels whose true times are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass
class Machine:
    """Time passes only when something runs on it; all costs are in seconds.

    With `queue_s` it is an accelerator: calls return after `launch_s` and the kernel starts
    `queue_s` later. With `gap_s` it also has graphs, in which kernels are that far apart. Noise
    only adds, as on a real machine: half-normal, with
    a number of hiccups of 5 ms a second.
    """

    tick_s: float = 50e-9
    launch_s: float = 200e-9
    queue_s: float | None = None
    gap_s: float | None = None
    noise: float = 0.0
    hiccups: float = 0.0
    drift: Callable[[float], float] = lambda _: 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.time_s = self.busy_until_s = 0.0
        self._recorded: list[float] | None = None
        self._random = np.random.default_rng(self.seed)

    def now(self) -> float:
        self.time_s += 20e-9
        return math.floor(self.time_s / self.tick_s) * self.tick_s

    def kernel(self, true_s: float) -> Callable[[], None]:
        def call() -> None:
            if self._recorded is not None:
                self._recorded.append(true_s)
                return
            self.time_s += self.launch_s
            self._run(true_s)

        return call

    def synchronize(self) -> None:
        self.time_s = max(self.time_s, self.busy_until_s) + 100e-9

    def capture(self, call: Callable[[], None], count: int) -> Callable[[], None] | None:
        if self.gap_s is None:
            return None
        self._recorded = recorded = []
        for _ in range(count):
            call()
        self._recorded = None

        def replay() -> None:
            self.time_s += self.launch_s
            for true_s in recorded:
                self._run(true_s + self.gap_s)

        return replay

    def _run(self, true_s: float) -> None:
        factor = self.drift(self.time_s) * math.exp(self.noise * abs(self._random.normal()))
        actual_s = true_s * factor + (
            5e-3 if self._random.random() < self.hiccups * true_s else 0.0
        )
        if self.queue_s is None:
            self.time_s += actual_s
        else:
            self.busy_until_s = max(self.busy_until_s, self.time_s + self.queue_s) + actual_s
