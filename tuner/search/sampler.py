"""The search as an Optuna sampler: proposes feasible candidates only, none twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial
from optuna.trial import Trial as OptunaTrial

from tuner.records import Candidate, Measurement, Trial, Value
from tuner.search.acquisition import Search
from tuner.space.feasible import FeasibleSet

_TEMPLATE = "template"
_FIXED = "fixed_params"
"""Where Optuna keeps the parameters of an enqueued trial."""


class FeasibleSampler(BaseSampler):
    """Samples the feasible set of a kernel.

    A study's parameters are ``template`` and, for each parameter of that template,
    ``TEMPLATE.PARAMETER``; its value is the time, which is minimised. Trials in the state PRUNED
    count as failures that are learnt from; those that run or wait are not proposed again.
    """

    def __init__(self, feasible: FeasibleSet, seed: int | None = None) -> None:
        """Start knowing nothing; what a study knows is read from its trials.

        Args:
            feasible: What may be proposed.
            seed: Seed of everything random.
        """
        self._feasible = feasible
        self._space = distributions(feasible)
        self._independent = RandomSampler(seed)
        self._keys: dict[int, int | None] = {}
        self.reseed_rng() if seed is None else self._restart(seed)

    def reseed_rng(self) -> None:
        """Draw a new seed, as parallel workers that share a study must."""
        self._independent.reseed_rng()
        self._restart(int(np.random.default_rng().integers(1 << 32)))

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the distributions of every template's parameters.

        Raises:
            ValueError: If the study does not minimise one value.
        """
        del trial
        if study.directions != [StudyDirection.MINIMIZE]:
            raise ValueError(f"the study must minimise one value, but got {study.directions}")
        return dict(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the parameters of the next candidate: those of its template alone.

        An enqueued trial keeps its own. The result is empty when every candidate was tried.
        """
        if not search_space.keys() >= self._space.keys():
            return {}
        if self._key(trial) is not None:
            return dict(trial.system_attrs[_FIXED])
        outcomes, running = self._history(study, trial.number)
        key = self._search.propose(outcomes, running)
        return {} if key is None else as_params(self._feasible.candidate(key))

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return a random value of a parameter that is not the feasible set's."""
        self.infer_relative_search_space(study, trial)
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def most_promising(self, study: Study, trials: Sequence[OptunaTrial]) -> OptunaTrial:
        """Return which of some running trials should be evaluated first.

        Enqueued trials come first, in their order. Of the others, the one of which the most is to
        be expected, given what is known by now: later results make earlier proposals stale.

        Args:
            study: The study that the trials are of.
            trials: At least one.
        """
        known = study.get_trials(deepcopy=False)
        for trial in trials:
            if _FIXED in known[trial.number].system_attrs:
                return trial
        outcomes, _ = self._history(study)
        by_key = {self._feasible.key(from_params(trial.params)): trial for trial in trials}
        return by_key[self._search.most_promising(outcomes, list(by_key))]

    def _history(
        self, study: Study, but: int | None = None
    ) -> tuple[dict[int, float | None], list[int]]:
        """Return the outcomes and what is running, by key, without the trial of one number."""
        outcomes: dict[int, float | None] = {}
        running = []
        for trial in study.get_trials(deepcopy=False):
            key = self._key(trial) if trial.number != but else None
            if key is None:
                continue
            if not trial.state.is_finished():
                running.append(key)
            elif trial.state == TrialState.COMPLETE:
                outcomes[key] = trial.value
            elif trial.state == TrialState.PRUNED:
                outcomes[key] = None
        return outcomes, running

    def _restart(self, seed: int) -> None:
        self._search = Search(self._feasible, seed)

    def _key(self, trial: FrozenTrial) -> int | None:
        """Return the key of a trial's candidate, None for a trial of something else."""
        if trial.number in self._keys:
            return self._keys[trial.number]
        try:
            params = trial.params or trial.system_attrs.get(_FIXED, {})
            key = self._feasible.key(from_params(params))
        except KeyError:
            key = None
        if trial.state.is_finished():
            self._keys[trial.number] = key
        return key


def distributions(feasible: FeasibleSet) -> dict[str, CategoricalDistribution]:
    """Return the distribution of ``template`` and of every ``TEMPLATE.PARAMETER``."""
    return {
        name: CategoricalDistribution(values)
        for name, values in zip(feasible.features, feasible.choices, strict=True)
    }


def as_params(candidate: Candidate) -> dict[str, Value]:
    """Return a candidate as a trial's parameters."""
    values = {f"{candidate.template}.{name}": value for name, value in candidate.parameters}
    return {_TEMPLATE: candidate.template, **values}


def from_params(params: dict[str, Any]) -> Candidate:
    """Return the candidate that a trial's parameters stand for.

    Raises:
        KeyError: If they name no template.
    """
    prefix = f"{params[_TEMPLATE]}."
    values = {
        name.removeprefix(prefix): value
        for name, value in params.items()
        if name.startswith(prefix)
    }
    return Candidate.of(params[_TEMPLATE], values)


def ask(study: Study, feasible: FeasibleSet) -> tuple[OptunaTrial, Candidate] | None:
    """Return a new trial and its candidate, or None when every candidate was tried.

    Args:
        study: A study with a :class:`FeasibleSampler`; what it has enqueued comes first.
        feasible: The sampler's feasible set.
    """
    space = distributions(feasible)
    trial = study.ask()
    if not trial.relative_params:
        study.tell(trial, state=TrialState.FAIL)
        return None
    template = trial.suggest_categorical(_TEMPLATE, space[_TEMPLATE].choices)
    for name, distribution in space.items():
        if name.startswith(f"{template}."):
            trial.suggest_categorical(name, distribution.choices)
    return trial, from_params(trial.params)


def frozen_trial(feasible: FeasibleSet, trial: Trial) -> FrozenTrial:
    """Return a stored trial as one of Optuna's, to be added to a study."""
    params = as_params(trial.candidate)
    space = distributions(feasible)
    timed = isinstance(trial.outcome, Measurement)
    return create_trial(
        params=params,
        distributions={name: space[name] for name in params},
        value=trial.outcome.median_ms if isinstance(trial.outcome, Measurement) else None,
        state=TrialState.COMPLETE if timed else TrialState.PRUNED,
    )
