"""Times what a frozen package would run, with all that a later comparison needs to know."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner import __version__, codec
from tuner.children.task import Task
from tuner.children.worker import Lethal, Workers
from tuner.evidence.card import DeviceCard, facts_of
from tuner.evidence.frozen import FrozenFiles
from tuner.evidence.results import (
    CLOCK,
    ContenderTimes,
    FrozenSource,
    Protocol,
    ResultsFile,
    WorkloadTimes,
)
from tuner.records import DeviceInfo, Failure, Rejection, Source, Workload
from tuner.timing.race import RaceResult
from tuner.timing.sanity import Work, impossible
from tuner.timing.statistics import median_interval, ratio_interval

OURS = "tuner"
"""Label of the frozen kernel."""

RIVAL = "rival"
"""Label of the library operation while it is timed."""

_DIGITS = 6
_LEAST_S = 60.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all measurements of one file share.

    Attributes:
        workers: The children.
        device: The device.
        budget_s: Seconds for each workload.
        seed: Of the order in the blocks.
        rival: Whether the library is timed along.
        card: The device's card.
    """

    workers: Workers
    device: DeviceInfo
    budget_s: float
    seed: int
    rival: bool
    card: DeviceCard


def measure(run: Conditions, kernel: FrozenFiles, workload: Workload) -> WorkloadTimes | Failure:
    """Return a workload's times, or why the clock or the verifier refuses it."""
    task = Task(kernel.signature.to_json(), kernel.problem, workload, run.device)
    folder = str(kernel.folder.absolute())
    choice = run.workers.ask("choose", timeout_s=_LEAST_S, task=task, folder=folder)["choice"]
    source = kernel.source(choice["arch"], choice["file"])
    try:
        reply = survey(
            run.workers,
            task,
            [(OURS, source)],
            budget_s=run.budget_s,
            options={"seed": run.seed, "rival": run.rival, "verify": True},
        )
    except Lethal as lethal:
        reply = {"rejection": codec.to_json(lethal.rejection)}
    if "rejection" in reply:
        rejection = codec.from_json(Rejection, reply["rejection"])
        return Failure(workload, f"{rejection.stage}: {rejection.reason}")
    result, work = codec.from_json(RaceResult, reply["race"]), codec.from_json(Work, reply["work"])
    median_ms = median_interval(dict(result.times_ms)[OURS]).value
    if fault := impossible(median_ms, work, run.card.ceilings(workload.dtype)):
        return Failure(workload, fault)
    frozen = FrozenSource(
        file=f"{kernel.folder.name}/{choice['arch']}/{choice['file']}",
        sha256=source.sha256,
        reason=choice["reason"],
        tuned_for=choice["workload"],
    )
    return _times_of(workload, result, work=work, frozen=frozen, rival=reply["rival"])


def survey(
    workers: Workers,
    task: Task,
    sources: Sequence[tuple[str, Source]],
    *,
    budget_s: float,
    options: Mapping[str, object],
) -> dict[str, Any]:
    """Return a child's reply about sources that are timed side by side.

    Args:
        workers: The children.
        task: The workload.
        sources: Labelled sources; the first is the reference.
        budget_s: Seconds to spend on timing.
        options: `seed`, `rival` and `verify` of `tuner.serve.server`'s survey.

    Raises:
        Lethal: A source killed or hung its child.
    """
    return workers.ask(
        "survey",
        timeout_s=_LEAST_S * len(sources) + 4 * budget_s,
        task=task,
        contenders=[{"label": label, **workers.describe(source)} for label, source in sources],
        budget_s=budget_s,
        **options,
    )


def results_file(run: Conditions, workloads: Sequence[WorkloadTimes]) -> ResultsFile:
    """Return measured workloads with where, when and how they were measured."""
    return ResultsFile(
        schema_version=1,
        tuner=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=facts_of(run.device),
        seed=run.seed,
        budget_s=run.budget_s,
        workloads=list(workloads),
    )


def _times_of(
    workload: Workload,
    result: RaceResult,
    *,
    work: Work,
    frozen: FrozenSource,
    rival: str | None,
) -> WorkloadTimes:
    noise = ratio_interval(dict(result.times_ms)[OURS], result.copy_ms)
    return WorkloadTimes(
        kernel=workload.kernel,
        workload=str(workload),
        protocol=Protocol(
            clock=CLOCK, caches=work.caches, calls=result.method.partition(" x ")[0]
        ),
        method=result.method,
        flops=work.flops,
        bytes=work.bytes,
        noise=[_short(value) for value in (noise.value, noise.low, noise.high)],
        discarded=result.discarded,
        end="precise" if result.end == "precise" else "budget",
        refused="; ".join(reason for _, reason in result.refused),
        contenders=[
            _contender(
                rival or RIVAL if label == RIVAL else OURS,
                None if label == RIVAL else frozen,
                times_ms,
                work=work,
            )
            for label, times_ms in result.times_ms
        ],
    )


def _contender(
    label: str, source: FrozenSource | None, times_ms: Sequence[float], *, work: Work
) -> ContenderTimes:
    median = median_interval(times_ms)
    return ContenderTimes(
        label=label,
        source=source,
        median_ms=_short(median.value),
        low_ms=_short(median.low),
        high_ms=_short(median.high),
        times_ms=[_short(time_ms) for time_ms in times_ms],
        gflops=_short(work.flops / median.value * 1e-6),
        gbytes=_short(work.bytes / median.value * 1e-6),
    )


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
