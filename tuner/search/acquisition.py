"""Which candidate to try next: expected improvement, maximised over the feasible set alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from tuner.search.covariance import Array, Kernel
from tuner.search.surrogate import Posterior, fit
from tuner.space.combinations import Keys
from tuner.space.feasible import FeasibleSet

POOL = 20_000
"""The most candidates that are compared at a time; of a larger set, a sample."""

STARTS = 5
"""Candidates that are spread over the set before the model is asked."""

_AMBITION = 10.0
"""Over the number of times: the improvement that counts, in units of the model, at most one.

Expected improvement over the best alone lingers on plateaus of almost equal candidates."""

_LEAST = 3
"""The fewest times that a model is built from."""

_MODELLED = 256
"""The most values that a model is built from."""

_REFIT_GROWTH = 1.15
"""The model is fitted anew when the number of times has grown by this factor."""

_DOUBT = 0.1
"""Standard deviation that the model of failures has at least, failures being 0 or 1."""


class Search:
    """Proposes candidates of a feasible set, none twice."""

    def __init__(self, feasible: FeasibleSet, seed: int) -> None:
        """Start knowing nothing.

        Args:
            feasible: What may be proposed.
            seed: Seed of everything random.
        """
        self._feasible = feasible
        self._random = np.random.default_rng(seed)
        self._kernel = Kernel(feasible.choices)
        self._best = -1
        self._leader: int | None = None
        self._pool: Keys = np.empty(0, np.int64)
        self._widen(feasible.sample(POOL, self._random))

    def propose(
        self, outcomes: Mapping[int, float | None], running: Iterable[int] = ()
    ) -> int | None:
        """Return the key of the candidate to try next, or None when nothing is left.

        After the starts, the leader is chosen as if nothing were in flight: where whatever is in
        flight can be tried at once, `most_promising` picks it, and the search is the one that
        tries one at a time. Where it has to wait, more leaders would crowd around it; so while
        there is one, the others are chosen to tell something else than all that is in flight.

        Args:
            outcomes: What was tried, by key: the time in any unit, None for a failure.
            running: Keys of what is being tried or waits to be.
        """
        running = [key for key in running if key not in outcomes]
        taken = np.array([*outcomes, *running], np.int64)
        if len(taken) < STARTS or not _tells(outcomes):
            return self._most_distant(taken)
        if len(outcomes) >= STARTS and self._leader not in running:
            self._leader = self._top(outcomes, ())
            if self._leader is not None and self._leader not in running:
                return self._leader
        key = self._top(outcomes, running)
        return self._most_distant(taken) if key is None else key

    def most_promising(self, outcomes: Mapping[int, float | None], keys: Sequence[int]) -> int:
        """Return the key, among some proposed earlier, that is the best to try next by now.

        It is the first until the starts are told.
        """
        if len(keys) == 1 or len(outcomes) < STARTS or not _tells(outcomes):
            return keys[0]
        self._widen(np.array(keys))
        order = np.argsort(self._pool)
        places = order[np.searchsorted(self._pool, keys, sorter=order)]
        return keys[int(self._promise(outcomes, ())[places].argmax())]

    def _most_distant(self, taken: Keys) -> int | None:
        """Return, of some random candidates, the one least like those taken."""
        keys = np.setdiff1d(self._random.choice(self._pool, min(400, len(self._pool))), taken)
        if not len(keys):
            keys = np.setdiff1d(self._feasible.sample(len(taken) + 400, self._random), taken)
        if not len(keys):
            return None
        if not len(taken):
            return int(self._random.choice(keys))
        here, there = self._feasible.coordinates(keys), self._feasible.coordinates(taken)
        distance = np.abs(here[:, None, :] - there[None]).sum(axis=2).min(axis=1)
        return int(keys[distance.argmax()])

    def _top(self, outcomes: Mapping[int, float | None], running: Iterable[int]) -> int | None:
        """Return the most promising of the pool that was not tried and is not running, if any."""
        promise = self._promise(outcomes, running)
        promise[np.isin(self._pool, [*outcomes, *running])] = -1.0
        place = int(promise.argmax())
        return int(self._pool[place]) if promise[place] >= 0.0 else None

    def _promise(self, outcomes: Mapping[int, float | None], running: Iterable[int]) -> Array:
        """Return the gain to expect of every candidate of the pool, failures considered."""
        times = {key: time for key, time in outcomes.items() if time is not None}
        best = min(times, key=times.__getitem__)
        if best != self._best:
            self._best = best
            self._widen(self._feasible.neighbours(best))
        gain = self._gain(times, running)
        return gain if len(times) == len(outcomes) else gain * self._chance(outcomes)

    def _gain(self, times: Mapping[int, float], running: Iterable[int]) -> Array:
        """Return the expected improvement over the best time, in units of the model."""
        levels = _levels(np.array(list(times.values())))
        values = dict(zip(times, levels.tolist(), strict=True))
        mean, spread = self._times.predict(values, running)
        ambition = min(1.0, _AMBITION / len(times))
        ahead = (levels.min() - ambition - mean) / spread
        density = np.exp(-0.5 * ahead * ahead) / math.sqrt(2 * math.pi)
        gain: Array = spread * (ahead * ndtr(ahead) + density)
        return gain

    def _chance(self, outcomes: Mapping[int, float | None]) -> Array:
        """Return the probability that a candidate does not fail: that its label is above half."""
        labels = np.array([float(time is not None) for time in outcomes.values()])
        rate, deviation = labels.mean(), labels.std()
        values = dict(zip(outcomes, ((labels - rate) / deviation).tolist(), strict=True))
        mean, spread = self._labels.predict(values)
        doubt = np.hypot(deviation * spread, _DOUBT)
        chance: Array = ndtr((rate + deviation * mean - 0.5) / doubt)
        return chance

    def _widen(self, keys: Keys) -> None:
        """Add candidates to those that are compared."""
        new = np.setdiff1d(keys, self._pool)
        if len(new):
            self._pool = np.concatenate([self._pool, new])
            hot = self._kernel.one_hot(self._feasible.codes(self._pool))
            self._times = _Model(self._feasible, self._kernel, hot)
            self._labels = _Model(self._feasible, self._kernel, hot)


class _Model:
    """A process whose rows are known by their keys, fitted anew as they grow."""

    def __init__(self, feasible: FeasibleSet, kernel: Kernel, hot: NDArray[np.float32]) -> None:
        self._feasible, self._kernel, self._hot = feasible, kernel, hot
        self._scales = kernel.prior
        self._fitted = 0
        self._keys: list[int] = []
        self._left_out: set[int] = set()

    def predict(
        self, values: Mapping[int, float], running: Iterable[int] = ()
    ) -> tuple[Array, Array]:
        """Return the mean and standard deviation of every candidate of the pool."""
        if len(values) >= _REFIT_GROWTH * self._fitted:
            self._fit(values)
        # Rows of what was in flight are forgotten: told by now, or not counted this time.
        self._keys = list(takewhile(values.__contains__, self._keys))
        self._posterior.keep(len(self._keys))
        known = {*self._keys, *self._left_out}
        new = [key for key in (*values, *running) if key not in known]
        if new:
            self._posterior.add(self._feasible.codes(np.array(new)))
            self._keys += new
        return self._posterior.predict(np.array([values.get(key, np.nan) for key in self._keys]))

    def _fit(self, values: Mapping[int, float]) -> None:
        """Fit the scales and begin a posterior; of many values, with those that matter."""
        keys = sorted(values, key=values.__getitem__)
        half = _MODELLED // 2
        if len(keys) > _MODELLED:
            # The best half and an even choice of the rest.
            keys = keys[:half] + keys[half :: -(-(len(keys) - half) // half)]
        codes = self._feasible.codes(np.array(keys))
        self._scales = fit(
            self._kernel, codes, np.array([values[key] for key in keys]), self._scales
        )
        self._posterior = Posterior(self._kernel, self._scales, self._hot)
        self._fitted = len(values)
        self._keys = []
        self._left_out = values.keys() - keys


def _tells(outcomes: Mapping[int, float | None]) -> bool:
    """Return whether there are times enough for a model."""
    return sum(time is not None for time in outcomes.values()) >= _LEAST


def _levels(times: Array) -> Array:
    """Return the logarithms of times, slower ones squeezed, at zero mean and unit variance.

    What is slower than the median does not matter by how much: the model should not bend for it.
    """
    levels = np.log(times) if times.min() > 0 else times.copy()
    middle = np.median(levels)
    half = 0.5 * max(float(middle - levels.min()), 1e-6)
    slow = levels > middle
    levels[slow] = middle + half * np.log1p((levels[slow] - middle) / half)
    centred: Array = levels - levels.mean()
    return centred / max(float(levels.std()), 1e-9)
