"""Which candidate to try next: expected improvement over the feasible set."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from tuner.combinations import Keys
from tuner.feasible import FeasibleSet
from tuner.surrogate import Array, Kernel, Posterior, Scales, fit

POOL = 20_000
"""The most candidates that are compared at a time; of a larger set, a sample."""

_STARTS = 5
"""Candidates that are spread over the set before the model is asked."""

_MODELLED = 256
"""The most observations that the model is built from: the best half and a random rest."""

_NEIGHBOURS_EVERY = 4
"""Each so many proposals only look at the best candidate's neighbours."""

_REFIT_GROWTH = 1.15
"""The model's scales are fitted anew when the observations grew by this factor."""


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
        self._pool = feasible.keys
        if self._pool is None or len(self._pool) > POOL:
            self._pool = np.sort(feasible.sample(POOL, self._random))
        self._proposals = 0
        self._fitted_at = 0
        self._times: _Rows | None = None
        self._success: _Rows | None = None

    def propose(
        self, outcomes: Mapping[int, float | None], running: Collection[int] = ()
    ) -> int | None:
        """Return the key of the candidate to try next, or None when nothing is left.

        Args:
            outcomes: What was tried: the time in any unit (less is better), None for a failure.
            running: What is being tried or waits to be.
        """
        taken = np.array([*outcomes, *running], np.int64)
        times = {key: value for key, value in outcomes.items() if value is not None}
        if len(taken) < _STARTS or len(times) < 3:
            return self._most_distant(taken)
        self._proposals += 1
        gain = self._gain(times, outcomes, running)
        gain[np.isin(self._pool, taken)] = -1.0
        if self._proposals % _NEIGHBOURS_EVERY == 0:
            best = min(times, key=times.__getitem__)
            near = np.isin(self._pool, self._feasible.neighbours(best))
            if gain[near].max(initial=-1.0) >= 0:
                gain[~near] = -1.0
        place = int(gain.argmax())
        return int(self._pool[place]) if gain[place] >= 0 else self._most_distant(taken)
