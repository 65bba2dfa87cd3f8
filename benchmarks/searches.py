"""Searches of a feasible set whose times are yet to be measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from tuner.search.replay import Strategy
from tuner.space.feasible import FeasibleSet

MOST_KEYS = 100_000
"""Of a set that is too large to list, TPE and random search get as many candidates, at random."""


class Keys(Mapping[int, float | None]):
    """The keys of a feasible set in the place of recorded times, which are yet to be measured."""

    def __init__(self, feasible: FeasibleSet) -> None:
        keys = feasible.keys
        if keys is None:
            keys = np.unique(feasible.sample(MOST_KEYS, np.random.default_rng(0)))
        self._keys = keys

    def __getitem__(self, key: int) -> float | None:
        raise KeyError(f"{key} is measured when it is asked for")

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys.tolist())

    def __len__(self) -> int:
        return len(self._keys)


@dataclass(slots=True)
class Run:
    """One sampler's search.

    Attributes:
        sampler: Its name.
        seed: Its seed.
        strategy: What asks and is told.
        waiting: Keys that were asked for and are being compiled.
        times_ms: The time of each trial, None for a failure.
        seconds: What each trial cost.
    """

    sampler: str
    seed: int
    strategy: Strategy
    waiting: list[int] = field(default_factory=list)
    times_ms: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def best_ms(self) -> float | None:
        """The least time so far."""
        return min((item for item in self.times_ms if item is not None), default=None)

    def reached(self, limit_ms: float) -> int | None:
        """Return the number of trials after which a time was at most a limit."""
        for number, time_ms in enumerate(self.times_ms, 1):
            if time_ms is not None and time_ms <= limit_ms:
                return number
        return None
