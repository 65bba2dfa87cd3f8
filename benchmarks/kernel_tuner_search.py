"""Kernel Tuner's own search strategies, answered from a recorded table."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from kernel_tuner import util
from kernel_tuner.interface import Options, strategy_map
from kernel_tuner.searchspace import Searchspace

from tuner.search.replay import Run
from tuner.search.tables import Table

STRATEGIES = ("simulated_annealing", "genetic_algorithm", "adaptive_tabu_greywolf")
"""Its two best known strategies and the one that did best of all on these spaces."""

_Values = tuple[Any, ...]


class _Device:
    """What strategies want to know of a device."""

    max_threads, name, env, quiet = 1 << 30, "table", {}, True

    def get_environment(self) -> dict[str, Any]:
        return {}


class _Runner:
    """Answers a strategy from a table instead of compiling and running."""

    def __init__(self, times: dict[_Values, float | None], names: Sequence[str]) -> None:
        self.dev, self.units, self.quiet = _Device(), {}, True
        self.simulation_mode, self.accumulated_strategy_time = True, 0
        self.kernel_options = Options(kernel_name="table")
        self.seen: dict[_Values, float | None] = {}
        self._times, self._names = times, names

    def run(self, space: Sequence[Sequence[Any]], options: Any) -> list[dict[str, Any] | None]:
        """Return a result for each configuration; a new one spends one evaluation."""
        return [self._result(tuple(values), options) for values in space]

    def _result(self, values: _Values, options: Any) -> dict[str, Any] | None:
        if options.budget.is_done():
            return None
        if values not in self.seen:
            options.budget.add_evaluations(1)
            self.seen[values] = self._times[values]
        time_ms = self.seen[values]
        result = dict(zip(self._names, values, strict=True))
        if time_ms is None:
            failure = util.RuntimeFailedConfig()
            return {**result, "time": failure, "__error__": failure}
        return {**result, "time": time_ms}

    def add_strategy_time(self, seconds: float) -> None:
        """Ignore what the strategy took."""

    def get_device_info(self) -> _Device:
        """Return the device."""
        return self.dev

    def get_environment(self, options: Any = None) -> dict[str, Any]:
        """Return nothing: a table has no environment."""
        del options
        return {}

    def shutdown(self) -> None:
        """Do nothing: there is nothing to end."""


def run(table: Table, strategy: str, seed: int, evaluations: int) -> Run:
    """Let one of Kernel Tuner's strategies search a table of one template.

    Every run gets a search space of its own: its cache of neighbours would carry what one run
    visited into the next.
    """
    logging.disable(logging.WARNING)
    random.seed(seed)
    np.random.seed(seed)
    parameters = dict(table.feasible.templates[0].spec.parameters)
    times = {
        tuple(dict(table.feasible.candidate(key).parameters)[name] for name in parameters): time
        for key, time in table.times.items()
    }
    cache = {
        ",".join(map(str, values)): {**dict(zip(parameters, values, strict=True)), "time": 1.0}
        for values in times
    }
    choices = {name: list(values) for name, values in parameters.items()}
    space = Searchspace(None, None, None, from_cache={"tune_params": choices, "cache": cache})
    options = Options(
        objective=["time"],
        objective_higher_is_better=[False],
        strategy=strategy,
        strategy_options=Options(max_fevals=evaluations),
        tune_params=choices,
        restrictions=None,
        verbose=False,
        metrics=None,
        cache={},
        cachefile=None,
        max_fevals=evaluations,
        budget=util.TuningBudget(None, evaluations),
        simulated_time=0,
    )
    runner = _Runner(times, list(parameters))
    with suppress(util.StopCriterionReached):
        strategy_map[strategy].tune(space, runner, options)
    return _as_run(table, list(runner.seen.values()), evaluations)


def _as_run(table: Table, found: Sequence[float | None], evaluations: int) -> Run:
    """Return the run of some times; a strategy that gave up early keeps what it had."""
    times = np.array([math.inf if time is None else time for time in found[:evaluations]])
    best = np.minimum.accumulate(times)
    best = np.append(best, np.full(evaluations - len(best), best[-1]))
    return Run(table.best_ms / best, np.array([math.nan]))
