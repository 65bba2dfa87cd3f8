"""The store's trials as an Optuna journal, which optuna-dashboard opens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.records import Measurement, Trial, UsageError, Workload


def write_journal(path: Path, trials: Iterable[Trial]) -> None:
    """Write one study per workload; the store stays the only source of truth.

    Args:
        path: The journal file, which must not exist.
        trials: Trials of any number of workloads.

    Raises:
        UsageError: The file exists: a journal is appended to, so it would hold trials twice.
    """
    if path.exists():
        raise UsageError(f"--output {path}: it exists; a journal is written anew")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(path)))
    groups: defaultdict[Workload, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[trial.workload].append(trial)
    for workload, group in groups.items():
        study = optuna.create_study(storage=storage, study_name=f"{workload.kernel} {workload}")
        choices = _choices(group)
        study.add_trials(_frozen(trial, choices) for trial in group)


def study_of(trials: Sequence[Trial]) -> optuna.Study:
    """Return the study of one workload's trials, in memory."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    choices = _choices(trials)
    study.add_trials(_frozen(trial, choices) for trial in trials)
    return study


def _choices(trials: Iterable[Trial]) -> dict[str, list[Any]]:
    """Return the values that each parameter took."""
    seen: defaultdict[str, list[Any]] = defaultdict(list)
    for trial in trials:
        for name, value in _parameters(trial).items():
            if value not in seen[name]:
                seen[name].append(value)
    return seen


def _parameters(trial: Trial) -> dict[str, Any]:
    template = trial.candidate.template
    values = {f"{template}.{name}": value for name, value in trial.candidate.parameters}
    return {"template": template, **values}


def _frozen(trial: Trial, choices: dict[str, list[Any]]) -> FrozenTrial:
    parameters = _parameters(trial)
    outcome = trial.outcome
    if isinstance(outcome, Measurement):
        state, value, facts = TrialState.COMPLETE, outcome.median_ms, {"unit": "ms"}
    else:
        state, value, facts = TrialState.PRUNED, None, {"stage": outcome.stage}
        facts["reason"] = outcome.reason
    return create_trial(
        state=state,
        value=value,
        params=parameters,
        distributions={name: CategoricalDistribution(choices[name]) for name in parameters},
        user_attrs={"number": trial.number, "source_sha256": trial.source_sha256, **facts},
    )
