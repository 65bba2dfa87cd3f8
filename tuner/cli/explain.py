"""`tune explain`: why a candidate was rejected or slow, from the store alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import click

from tuner.cli.display import describe_outcome, outcome_word
from tuner.records import Measurement, Rejection, Trial, UsageError, format_value
from tuner.store import open_stores

_MOST_REASONS = 12


def explain_store(root: Path, *, kernel: str | None, number: int | None) -> None:
    """Print why one trial ended as it did, or how many ended at which stage.

    Args:
        root: Folder of the stores.
        kernel: Only trials of this kernel.
        number: Number of the trial; None counts all.

    Raises:
        UsageError: There is no such trial, or the kernel has none.
    """
    stores = open_stores(root)
    known = sorted({trial.workload.kernel for store in stores for trial in store.trials})
    if kernel is not None and kernel not in known:
        raise UsageError(f"--kernel {kernel}: has no trials; these have: {', '.join(known)}")
    chosen = {
        store: [item for item in store.trials if kernel in (None, item.workload.kernel)]
        for store in stores
    }
    numbers = {trial.number for trials in chosen.values() for trial in trials}
    if number is not None and number not in numbers:
        raise UsageError(
            f"there is no trial {number}; numbers here: {min(numbers)} to {max(numbers)}"
        )
    for store, trials in chosen.items():
        damaged = f", {store.damaged_lines} damaged lines skipped" if store.damaged_lines else ""
        click.echo(f"{store.folder.name}: {len(trials)} trials{damaged}")
        if number is None:
            _explain_all(trials)
        for trial in trials:
            if trial.number == number:
                _explain_one(trials, trial)


def _explain_all(trials: Sequence[Trial]) -> None:
    groups: defaultdict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[f"{trial.workload.kernel} {trial.workload}"].append(trial)
    for name, group in groups.items():
        counts = Counter(outcome_word(trial.outcome) for trial in group)
        spelled = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        click.echo(f"{name}: {spelled}")
        reasons = Counter(
            describe_outcome(trial.outcome)
            for trial in group
            if isinstance(trial.outcome, Rejection)
        )
        for reason, count in reasons.most_common(_MOST_REASONS):
            click.echo(f"  {count} x {reason}")


def _explain_one(trials: Sequence[Trial], found: Trial) -> None:
    click.echo(f"trial {found.number} of {found.workload.kernel} {found.workload}")
    click.echo(f"  {found.candidate}")
    click.echo(f"  source {found.source_sha256}")
    if found.card is not None:
        click.echo(f"  measured on {found.card}")
    if isinstance(found.outcome, Rejection):
        click.echo(f"  rejected at stage {found.outcome.stage}:\n{found.outcome.reason}")
        return
    best = min(
        (item for item in trials if item.workload == found.workload), key=_time_of, default=found
    )
    click.echo(f"  {describe_outcome(found.outcome)}, {found.outcome.samples} samples")
    click.echo(f"  {_time_of(found) / _time_of(best):.2f}x the time of the best: {best.candidate}")
    ours, theirs = dict(found.candidate.parameters), dict(best.candidate.parameters)
    if found.candidate.template != best.candidate.template:
        click.echo(f"  template: {found.candidate.template}, the best: {best.candidate.template}")
        return
    for name, value in ours.items():
        if value != theirs[name]:
            line = f"  {name}: {format_value(value)}, the best: {format_value(theirs[name])}"
            click.echo(line)


def _time_of(trial: Trial) -> float:
    return trial.outcome.median_ms if isinstance(trial.outcome, Measurement) else float("inf")
