"""What the stages of a kernel cost, by the clock alone: it races twins that lack or repeat one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner import codec
from tuner.children.task import Task
from tuner.children.worker import Lethal, Workers
from tuner.evidence.measure import survey
from tuner.records import Interval, Rejection, Source, TunerError
from tuner.render import Twin
from tuner.timing.finals import ratio
from tuner.timing.race import RaceResult
from tuner.timing.sanity import Ceilings, Work
from tuner.timing.statistics import median_interval, ratio_interval

WHOLE = "whole"
"""Label of the kernel itself among its twins."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage costs.

    Attributes:
        twin: The stage, and what was done to it.
        share: Time saved by leaving it out, or added by doing it twice, as a share of the whole.
        cost_ms: That time.
        seen: Whether the difference is beyond its interval and beyond the noise floor.
    """

    twin: Twin
    share: Interval
    cost_ms: float
    seen: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of a kernel goes.

    Attributes:
        time_ms: Time of a call, with its interval.
        noise: Time of the kernel over that of its own copy.
        work: What a call does at least.
        ceilings: What the device was measured to do at most.
        costs: What its stages cost, the dearest first.
        refused: Twins that could not be timed, with the reason.
        method: How a sample was taken.
    """

    time_ms: Interval
    noise: Interval
    work: Work
    ceilings: Ceilings
    costs: tuple[StageCost, ...]
    refused: tuple[tuple[Twin, str], ...]
    method: str

    @property
    def memory_ms(self) -> float | None:
        """The least time that the compulsory bytes take, were they all to come from memory."""
        return self.work.bytes / self.ceilings.gbytes * 1e-6 if self.ceilings.gbytes else None

    @property
    def products_ms(self) -> float | None:
        """The least time that the operations take."""
        return self.work.flops / self.ceilings.gflops * 1e-6 if self.ceilings.gflops else None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "time_ms": codec.to_json(self.time_ms),
            "noise": codec.to_json(self.noise),
            "method": self.method,
            "flops": self.work.flops,
            "bytes": self.work.bytes,
            "caches": self.work.caches,
            "memory_ms": self.memory_ms,
            "products_ms": self.products_ms,
            "stages": [
                {
                    "stage": item.twin.stage,
                    "mode": item.twin.mode,
                    "cost_ms": item.cost_ms,
                    "share": codec.to_json(item.share),
                    "seen": item.seen,
                }
                for item in self.costs
            ],
            "refused": {str(twin): reason for twin, reason in self.refused},
        }


def profile(
    workers: Workers,
    task: Task,
    source: Source,
    twins: Mapping[Twin, Source],
    *,
    budget_s: float,
) -> Profile:
    """Return where the time of a kernel goes.

    The kernel is verified; its twins are wrong on purpose and are not. They are no trials: no
    store hears of them.

    Args:
        workers: The children.
        task: The workload, with the device's ceilings.
        source: The kernel.
        twins: Its twins.
        budget_s: Seconds to spend on timing.

    Raises:
        TunerError: The kernel itself is wrong or cannot be timed.
    """
    _require_right(workers, task, source)
    usable, refused = _compile(workers, task, twins)
    replies = _time(workers, task, source, usable, budget_s=budget_s)
    costs, unseen = _costs(replies, str(task.workload))
    whole = codec.from_json(RaceResult, replies[0][0]["race"])
    return Profile(
        time_ms=median_interval(dict(whole.times_ms)[WHOLE]),
        noise=_noise(whole),
        work=codec.from_json(Work, replies[0][0]["work"]),
        ceilings=task.ceilings or Ceilings(None, None),
        costs=tuple(sorted(costs, key=lambda item: -item.cost_ms)),
        refused=tuple((refused | unseen).items()),
        method=whole.method,
    )


def _require_right(workers: Workers, task: Task, source: Source) -> None:
    try:
        rejection = workers.verify(task, workers.path_of(source), source.language)
    except Lethal as lethal:
        rejection = lethal.rejection
    if rejection is not None:
        raise TunerError(f"{task.workload}: rejected at {rejection.stage}: {rejection.reason}")


def _costs(
    replies: Sequence[tuple[dict[str, Any], Sequence[Twin]]], workload: str
) -> tuple[list[StageCost], dict[Twin, str]]:
    """Return what the stages cost, and why some twins could not be timed."""
    costs: list[StageCost] = []
    refused: dict[Twin, str] = {}
    for reply, timed in replies:
        if "rejection" in reply:
            reason = codec.from_json(Rejection, reply["rejection"]).reason
            if not timed:
                raise TunerError(f"{workload}: cannot be timed: {reason}")
            refused |= dict.fromkeys(timed, reason)
            continue
        result = codec.from_json(RaceResult, reply["race"])
        unseen = dict(result.refused)
        refused |= {twin: unseen[str(twin)] for twin in timed if str(twin) in unseen}
        costs += [_cost(result, twin) for twin in timed if str(twin) not in unseen]
    return costs, refused


def _compile(
    workers: Workers, task: Task, twins: Mapping[Twin, Source]
) -> tuple[dict[Twin, Source], dict[Twin, str]]:
    """Return the twins that the compiler takes, and why it refuses the others."""
    builds = {twin: workers.compile(task, source) for twin, source in twins.items()}
    usable, refused = {}, {}
    for twin, build in builds.items():
        try:
            built = build.result()
        except Lethal as lethal:
            built = lethal.rejection
        if isinstance(built, Rejection):
            refused[twin] = built.reason
        else:
            usable[twin] = twins[twin]
    return usable, refused


def _time(
    workers: Workers,
    task: Task,
    source: Source,
    twins: Mapping[Twin, Source],
    *,
    budget_s: float,
) -> list[tuple[dict[str, Any], Sequence[Twin]]]:
    """Return replies about the kernel beside its twins, and which these are.

    All of them are timed together, unless one fails: then each is with the kernel alone.
    """
    options = {"seed": 0, "rival": False, "verify": False}
    together = [(WHOLE, source), *((str(twin), item) for twin, item in twins.items())]
    with contextlib.suppress(Lethal):
        reply = survey(workers, task, together, budget_s=budget_s, options=options)
        if "rejection" not in reply:
            return [(reply, list(twins))]
    share_s = budget_s / (len(twins) + 1)
    alone = survey(workers, task, [(WHOLE, source)], budget_s=share_s, options=options)
    replies: list[tuple[dict[str, Any], Sequence[Twin]]] = [(alone, [])]
    for twin, item in twins.items():
        pair = [(WHOLE, source), (str(twin), item)]
        try:
            reply = survey(workers, task, pair, budget_s=share_s, options=options)
        except Lethal as lethal:
            reply = {"rejection": codec.to_json(lethal.rejection)}
        replies.append((reply, [twin]))
    return replies


def _cost(result: RaceResult, twin: Twin) -> StageCost:
    slower = ratio(result, str(twin), WHOLE)
    share = Interval(slower.value - 1, slower.low - 1, slower.high - 1)
    if twin.mode == "left out":
        share = Interval(-share.value, -share.high, -share.low)
    noise = _noise(result)
    floor = max(noise.value, 1 / noise.value) - 1
    whole_ms = median_interval(dict(result.times_ms)[WHOLE]).value
    seen = share.low > floor or share.high < -floor
    return StageCost(twin, share, share.value * whole_ms, seen)


def _noise(result: RaceResult) -> Interval:
    return ratio_interval(dict(result.times_ms)[WHOLE], result.copy_ms)
