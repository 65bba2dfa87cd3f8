"""Search replayed on recorded tables: how good a sampler is, without a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState, create_trial

from tuner.records import UsageError
from tuner.search.sampler import FeasibleSampler, as_params, ask, distributions
from tuner.search.tables import Table

BUDGETS = (25, 50, 100, 200)
"""Numbers of evaluations after which the share of the optimum is reported."""

_GOOD = 0.95
"""The share at which a run counts as having found a good candidate."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How a sampler did on a table.

    Attributes:
        space: Name of the table.
        sampler: Name of the sampler.
        seeds: Number of runs.
        share: Least time of all over the least time found, by number of evaluations (failures
            count as evaluations), mean over the runs.
        evaluations_to_95: Evaluations to come within 5 % of the optimum, median over the runs;
            None if most runs do not come so far.
        proposal_ms: Time that the sampler took to propose a candidate, median.
    """

    space: str
    sampler: str
    seeds: int
    share: Mapping[str, float]
    evaluations_to_95: float | None
    proposal_ms: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """One search of a table.

    Attributes:
        shares: Least time of all over the least time found so far: [evaluations].
        proposal_s: Seconds that each proposal took: [evaluations].
    """

    shares: NDArray[np.float64]
    proposal_s: NDArray[np.float64]

    @property
    def evaluations_to_95(self) -> float:
        """Evaluations to come within 5 % of the optimum, infinite if it never did."""
        good = np.flatnonzero(self.shares >= _GOOD)
        return float(good[0]) + 1.0 if len(good) else math.inf


class Strategy(Protocol):
    """A search that a table answers."""

    def ask(self) -> int:
        """Return the key of a candidate that was not asked for before."""

    def tell(self, key: int, time_ms: float | None) -> None:
        """Take in a candidate's time, None for a failure."""

    def first(self, keys: list[int]) -> int:
        """Return which of some candidates that were asked for should be evaluated first."""
        return keys[0]


def replay(table: Table, sampler: str, *, seeds: int, evaluations: int, batch: int = 1) -> Summary:
    """Return how a sampler does on a table, over several runs.

    Args:
        table: The recorded search space.
        sampler: One of `SAMPLERS`.
        seeds: Number of runs.
        evaluations: Number of candidates that each run evaluates.
        batch: Number of candidates that are asked for ahead, as they are to be compiled ahead.

    Raises:
        UsageError: If the sampler is unknown.
    """
    if sampler not in SAMPLERS:
        raise UsageError(f"sampler {sampler!r} is unknown; known: {', '.join(SAMPLERS)}")
    make = SAMPLERS[sampler]
    runs = [search(table, make(table, seed), evaluations, batch) for seed in range(seeds)]
    return summarise(table.space, sampler, runs)


def search(table: Table, strategy: Strategy, evaluations: int, batch: int = 1) -> Run:
    """Let a strategy search a table until its evaluations are spent or nothing is left."""
    shares, seconds = [], []
    waiting: list[int] = []
    optimum, best = table.best_ms, math.inf
    for done in range(min(evaluations, len(table.feasible))):
        while len(waiting) < min(batch, len(table.feasible) - done):
            start = time.perf_counter()
            waiting.append(strategy.ask())
            seconds.append(time.perf_counter() - start)
        key = strategy.first(waiting)
        waiting.remove(key)
        time_ms = table.times[key]
        strategy.tell(key, time_ms)
        best = min(best, math.inf if time_ms is None else time_ms)
        shares.append(optimum / best)
    return Run(np.array(shares), np.array(seconds))


def summarise(space: str, sampler: str, runs: list[Run]) -> Summary:
    """Return the means and medians of some runs."""
    shares = np.mean([run.shares for run in runs], axis=0)
    reached = float(np.median([run.evaluations_to_95 for run in runs]))
    return Summary(
        space=space,
        sampler=sampler,
        seeds=len(runs),
        share={str(n): round(float(shares[n - 1]), 4) for n in BUDGETS if n <= len(shares)},
        evaluations_to_95=reached if math.isfinite(reached) else None,
        proposal_ms=round(1e3 * float(np.median([run.proposal_s for run in runs])), 3),
    )


class _Tuner(Strategy):
    """The tuner's own sampler, asked as a study asks it."""

    def __init__(self, table: Table, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._feasible = table.feasible
        self._sampler = FeasibleSampler(table.feasible, seed)
        self._study = optuna.create_study(sampler=self._sampler)
        self._trials: dict[int, optuna.Trial] = {}

    def ask(self) -> int:
        asked = ask(self._study, self._feasible)
        if asked is None:
            raise AssertionError("a table is searched no longer than it has candidates")
        trial, candidate = asked
        key = self._feasible.key(candidate)
        self._trials[key] = trial
        return key

    def tell(self, key: int, time_ms: float | None) -> None:
        trial = self._trials.pop(key)
        if time_ms is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, time_ms)

    def first(self, keys: list[int]) -> int:
        trials = [self._trials[key] for key in keys]
        return keys[trials.index(self._sampler.most_promising(self._study, trials))]


class _Tpe(Strategy):
    """Optuna's TPE over categories, each proposal moved to the nearest feasible new candidate."""

    def __init__(self, table: Table, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._feasible = table.feasible
        self._space = distributions(table.feasible)
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        self._random = np.random.default_rng(seed)
        self._keys = np.array(list(table.times))
        self._free = np.ones(len(self._keys), bool)
        codes = table.feasible.codes(self._keys)
        self._parts = [_Part.of(codes, place) for place in range(len(table.feasible.templates))]
        spans = [max(len(values) - 1, 1) for values in table.feasible.choices]
        self._spans = np.array(spans, np.float32)

    def ask(self) -> int:
        trial = self._study.ask(fixed_distributions=dict(self._space))
        self._study.tell(trial, state=TrialState.FAIL)
        point = np.array(
            [self._space[n].to_internal_repr(trial.params[n]) for n in self._feasible.features],
            np.float32,
        )
        # Another template is further away than any change of parameters.
        first = int(point[0])
        for part in (self._parts[first], *self._parts):
            if self._free[part.rows].any():
                break
        steps = np.abs(part.codes - point[part.columns]) / self._spans[part.columns]
        distance = steps.sum(axis=1)
        distance[~self._free[part.rows]] = np.inf
        nearest = part.rows[distance <= distance.min() + 1e-5]
        place = int(self._random.choice(nearest))
        self._free[place] = False
        return int(self._keys[place])

    def tell(self, key: int, time_ms: float | None) -> None:
        if time_ms is not None:
            params = as_params(self._feasible.candidate(key))
            space: dict[str, BaseDistribution] = {name: self._space[name] for name in params}
            self._study.add_trial(create_trial(params=params, distributions=space, value=time_ms))


class _Part(NamedTuple):
    """The candidates of one template: their rows of all keys, and their parameters' categories."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    codes: NDArray[np.float32]

    @classmethod
    def of(cls, codes: NDArray[np.int16], place: int) -> _Part:
        """Return the template at a place, given all codes: [keys, features]."""
        rows = np.flatnonzero(codes[:, 0] == place)
        columns = np.flatnonzero(codes[rows[:1]].max(axis=0, initial=-1) >= 0)[1:]
        return cls(rows, columns, codes[np.ix_(rows, columns)].astype(np.float32))


class _Random(Strategy):
    """Feasible candidates in random order."""

    def __init__(self, table: Table, seed: int) -> None:
        keys = np.random.default_rng(seed).permutation(list(table.times))
        self._order = iter(keys.tolist())

    def ask(self) -> int:
        return int(next(self._order))

    def tell(self, key: int, time_ms: float | None) -> None:
        pass


SAMPLERS: Mapping[str, Callable[[Table, int], Strategy]] = {
    "tuner": _Tuner,
    "tpe": _Tpe,
    "random": _Random,
}
"""Samplers by name: what makes one for a table and a seed."""
