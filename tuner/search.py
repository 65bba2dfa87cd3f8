"""Which candidate to try next: expected improvement, maximised over the feasible set alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from scipy.special import ndtr

from tuner.combinations import Keys
from tuner.covariance import Array, Kernel, Scales
from tuner.feasible import FeasibleSet
from tuner.surrogate import Posterior, fit

POOL = 20_000
"""The most candidates that are compared at a time; of a larger set, a sample."""

STARTS = 5
"""Candidates that are spread over the set before the model is asked."""

_MODELLED = 256
"""The most times that the model is built from: the best half and a random rest."""

_AMBITION = 0.5
"""The improvement that counts as one, in standard deviations of the times' logarithms.

Expected improvement over the best alone lingers on plateaus of almost equal candidates."""

_REFIT_GROWTH = 1.15
"""The model is fitted anew when the number of times has grown by this factor."""

_LABEL_NOISE = math.log(0.2)


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
        self._scales = self._kernel.prior
        self._pool: Keys = feasible.sample(POOL, self._random)
        self._hot = self._kernel.one_hot(feasible.codes(self._pool))
        self._fitted = 0
        self._best = -1
        self._times: _Model | None = None
        self._labels: _Model | None = None

    def propose(
        self, outcomes: Mapping[int, float | None], running: Iterable[int] = ()
    ) -> int | None:
        """Return the key of the candidate to try next, or None when nothing is left.

        Args:
            outcomes: What was tried, by key: the time in any unit, None for a failure.
            running: Keys of what is being tried or waits to be.
        """
        running = [key for key in running if key not in outcomes]
        taken = np.array([*outcomes, *running], np.int64)
        times = {key: time for key, time in outcomes.items() if time is not None}
        if len(taken) < STARTS or len(times) < 3:
            return self._most_distant(taken)
        gain = self._gain(times, running) * self._chance(outcomes)
        gain[np.isin(self._pool, taken)] = -1.0
        place = int(gain.argmax())
        return int(self._pool[place]) if gain[place] >= 0.0 else self._most_distant(taken)

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

    def _gain(self, times: Mapping[int, float], running: Iterable[int]) -> Array:
        """Return the expected improvement over the best time, in units of the model."""
        best = min(times, key=times.__getitem__)
        levels = dict(zip(times, _levels(np.array(list(times.values()))).tolist(), strict=True))
        widened = best != self._best and self._widen(best)
        self._best = best
        if self._times is None or widened or len(times) >= _REFIT_GROWTH * self._fitted:
            self._times = self._fitted_model(levels)
            self._fitted = len(times)
        self._times.include([*times, *running])
        mean, spread = self._times.predict(levels)
        ahead = (min(levels.values()) - _AMBITION - mean) / spread
        density = np.exp(-0.5 * ahead * ahead) / math.sqrt(2 * math.pi)
        gain: Array = spread * (ahead * ndtr(ahead) + density)
        return gain

    def _chance(self, outcomes: Mapping[int, float | None]) -> Array | float:
        """Return the probability that a candidate does not fail."""
        labels = {key: float(time is not None) for key, time in outcomes.items()}
        rate = (sum(labels.values()) + 1) / (len(labels) + 1)
        if rate == 1.0:
            return 1.0
        if self._labels is None:
            self._labels = self._model(Scales(self._kernel.prior.weights, _LABEL_NOISE))
        self._labels.include(outcomes)
        mean, _ = self._labels.predict({key: label - rate for key, label in labels.items()})
        return np.clip(rate + mean, 0.02, 1.0)

    def _fitted_model(self, levels: Mapping[int, float]) -> _Model:
        """Return a model of some times, fitted to the best half of them if they are many."""
        keys = sorted(levels, key=levels.__getitem__)
        half = _MODELLED // 2
        if len(keys) > _MODELLED:
            rest = self._random.choice(len(keys) - half, half, replace=False) + half
            keys = keys[:half] + [keys[place] for place in rest]
        codes = self._feasible.codes(np.array(keys))
        values = np.array([levels[key] for key in keys])
        self._scales = fit(self._kernel, codes, values, self._scales)
        model = self._model(self._scales)
        model.include(keys)
        return model

    def _model(self, scales: Scales) -> _Model:
        return _Model(self._feasible, Posterior(self._kernel, scales, self._hot))

    def _widen(self, best: int) -> bool:
        """Add the neighbours of the best candidate to the pool; return whether any was new."""
        new = np.setdiff1d(self._feasible.neighbours(best), self._pool)
        if len(new):
            self._pool = np.concatenate([self._pool, new])
            self._hot = self._kernel.one_hot(self._feasible.codes(self._pool))
            self._labels = None
        return bool(len(new))


class _Model:
    """A posterior whose rows are known by their keys."""

    def __init__(self, feasible: FeasibleSet, posterior: Posterior) -> None:
        self._feasible = feasible
        self._posterior = posterior
        self._keys: dict[int, None] = {}

    def include(self, keys: Iterable[int]) -> None:
        """Add the rows that are not there yet."""
        new = [key for key in keys if key not in self._keys]
        if new:
            self._posterior.add(self._feasible.codes(np.array(new)))
            self._keys.update(dict.fromkeys(new))

    def predict(self, values: Mapping[int, float]) -> tuple[Array, Array]:
        """Return the pool's means and standard deviations; see :class:`Posterior`."""
        return self._posterior.predict(np.array([values.get(key, np.nan) for key in self._keys]))


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
