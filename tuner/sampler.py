"""Provisional: random feasible candidates (to be replaced by the search helper's sampler)."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna

from tuner.feasible import FeasibleSet
from tuner.records import Candidate, Measurement, Trial


class FeasibleSampler(optuna.samplers.RandomSampler):
    """Random."""

    def __init__(self, feasible: FeasibleSet, seed: int = 0) -> None:
        super().__init__(seed)
        self.generator = np.random.default_rng(seed)
        self.seen: set[Candidate] = set()


def distributions(feasible: FeasibleSet) -> dict[str, Any]:
    """Return them."""
    Choice = optuna.distributions.CategoricalDistribution
    names = [part.spec.name for part in feasible.templates]
    found: dict[str, Any] = {"template": Choice(names)}
    for part in feasible.templates:
        for name, values in part.spec.parameters:
            found[f"{part.spec.name}.{name}"] = Choice(values)
    return found


def as_params(candidate: Candidate) -> dict[str, Any]:
    """Return params."""
    values = {f"{candidate.template}.{name}": value for name, value in candidate.parameters}
    return {"template": candidate.template, **values}


def from_params(params: dict[str, Any]) -> Candidate:
    """Return candidate."""
    values = {name.split(".", 1)[1]: value for name, value in params.items() if "." in name}
    return Candidate.of(params["template"], values)


def ask(study: Any, feasible: FeasibleSet) -> tuple[Any, Candidate]:
    """Ask."""
    waiting = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.WAITING])
    if waiting:
        candidate = from_params(waiting[0].system_attrs["fixed_params"])
    else:
        for _ in range(50):
            candidate = feasible.candidate(int(feasible.sample(1, study.sampler.generator)[0]))
            if candidate not in study.sampler.seen:
                break
    study.sampler.seen.add(candidate)
    trial = study.ask()
    for name, distribution in distributions(feasible).items():
        if name in as_params(candidate):
            trial.set_user_attr(name, as_params(candidate)[name])
    return trial, candidate


def frozen_trial(feasible: FeasibleSet, trial: Trial) -> Any:
    """Return it."""
    params = as_params(trial.candidate)
    every = distributions(feasible)
    timed = isinstance(trial.outcome, Measurement)
    State = optuna.trial.TrialState
    return optuna.trial.create_trial(
        params=params,
        distributions={name: every[name] for name in params},
        value=trial.outcome.median_ms if isinstance(trial.outcome, Measurement) else None,
        state=State.COMPLETE if timed else State.PRUNED,
    )
