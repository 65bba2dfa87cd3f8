"""What the trials of a workload show: progress, importances, where candidates were rejected."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.package.journal import study_of
from tuner.records import Measurement, Trial, Value, format_value

_LEAST_TIMED = 8
"""Fewer times say nothing of what matters."""


@dataclass(frozen=True, slots=True)
class Step:
    """The state of a search after one of its trials.

    Attributes:
        count: Trials so far.
        elapsed_s: Seconds of work so far; the pauses between runs are left out.
        trial: The trial.
        best_ms: The least time so far, None while there is none.
    """

    count: int
    elapsed_s: float
    trial: Trial
    best_ms: float | None


@dataclass(frozen=True, slots=True)
class Region:
    """The trials that have one value of one parameter, and how many of them were rejected."""

    parameter: str
    value: Value
    trials: int
    stages: tuple[tuple[str, int], ...]
    reason: str

    @property
    def rejected(self) -> int:
        """Number of rejected trials."""
        return sum(count for _, count in self.stages)


def progress(trials: Sequence[Trial]) -> list[Step]:
    """Return the state of a search after each of its trials."""
    steps: list[Step] = []
    elapsed_s, last_s, best = 0.0, -math.inf, math.inf
    for count, trial in enumerate(trials, 1):
        if trial.ended_s is None:
            elapsed_s += trial.seconds
        else:  # trials overlap, since compilation runs ahead: count every second once
            elapsed_s += max(trial.ended_s - max(trial.ended_s - trial.seconds, last_s), 0.0)
            last_s = max(last_s, trial.ended_s)
        if isinstance(trial.outcome, Measurement):
            best = min(best, trial.outcome.median_ms)
        steps.append(Step(count, elapsed_s, trial, best if math.isfinite(best) else None))
    return steps


def importances(trials: Sequence[Trial]) -> dict[str, float]:
    """Return how much each parameter matters for reaching the fastest times; they add up to 1.

    By Optuna's PED-ANOVA (Watanabe et al. 2023, https://arxiv.org/abs/2304.10255). Empty where
    too few were timed or nothing varied.
    """
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    timed = [trial for trial in trials if isinstance(trial.outcome, Measurement)]
    if len(timed) < _LEAST_TIMED:
        return {}
    found = get_param_importances(study_of(timed), evaluator=PedAnovaImportanceEvaluator())
    return {name: share for name, share in found.items() if math.isfinite(share) and share > 0}


def rejected_regions(trials: Sequence[Trial]) -> list[Region]:
    """Return the values of parameters whose trials were rejected, the surest first."""
    groups: defaultdict[tuple[str, Value], list[Trial]] = defaultdict(list)
    several = len({trial.candidate.template for trial in trials}) > 1
    for trial in trials:
        if several:
            groups["template", trial.candidate.template].append(trial)
        for name, value in trial.candidate.parameters:
            groups[f"{trial.candidate.template}.{name}" if several else name, value].append(trial)
    regions = []
    for (parameter, value), group in groups.items():
        failed = [item.outcome for item in group if not isinstance(item.outcome, Measurement)]
        if failed:
            stages = tuple(Counter(outcome.stage for outcome in failed).most_common())
            lines = [(item.reason.strip().splitlines() or [""])[0] for item in failed]
            reason = Counter(lines).most_common(1)[0][0]
            regions.append(Region(parameter, value, len(group), stages, reason))
    return sorted(regions, key=lambda item: -_surely(item.rejected, item.trials))


def _surely(count: int, total: int) -> float:
    """Return the lower end of Wilson's 95 % interval of a share."""
    z, share = 1.96, count / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (centre - spread) / (1 + z * z / total)


def region_label(region: Region) -> str:
    """Return ``PARAMETER = value``."""
    return f"{region.parameter} = {format_value(region.value)}"
