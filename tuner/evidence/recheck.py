"""Frozen winners timed again beside their stored runners-up: does what was decided still hold?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tuner import codec
from tuner.children.task import Task
from tuner.children.worker import Lethal, Workers
from tuner.evidence.frozen import FrozenFiles
from tuner.package.manifest import file_name
from tuner.records import (
    Candidate,
    DeviceInfo,
    Interval,
    Measurement,
    Rejection,
    Source,
    Trial,
    Workload,
)
from tuner.timing.blocks import TIE, confidence
from tuner.timing.finals import disturbed, ratio
from tuner.timing.race import SURE, RaceResult
from tuner.timing.statistics import median_interval, ratio_interval

WINNER = "winner"
"""Label of the frozen winner while it is timed."""

RUNNERS_UP = 3
"""How many of the stored runners-up race along."""

Json = dict[str, Any]
Render = Callable[[Candidate], Source | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a frozen winner stands today.

    Attributes:
        workload: What it was tuned for.
        file: Its file in the package.
        word: ``"holds"``, ``"faster"``, ``"slower"``, ``"overtaken"`` or ``"rejected"``.
        reason: Why it was rejected, or by whom it was overtaken; empty otherwise.
        then_ms: Its time when it was frozen, with its interval.
        now_ms: Its time today; None where it was rejected.
        change: Today's time over that time, with an interval of at least 92 %: the manifest's
            holds the median in 95 %, today's in 97.5 %.
        rival_change: The same for the library's operation: what changed for everybody.
        changes: What is different in the provenance.
    """

    workload: Workload
    file: str
    word: str
    reason: str
    then_ms: Interval
    now_ms: Interval | None
    change: Interval | None
    rival_change: Interval | None
    changes: tuple[str, ...]

    @property
    def bad(self) -> bool:
        """Whether the winner should no longer be trusted."""
        return self.word in ("slower", "overtaken", "rejected")


def recheck(
    workers: Workers,
    device: DeviceInfo,
    kernel: FrozenFiles,
    entry: Json,
    *,
    runners: Mapping[str, Source],
    budget_s: float,
) -> Verdict:
    """Return how one entry of a manifest stands today.

    Args:
        workers: The children.
        device: The device.
        kernel: The kernel's folder.
        entry: The entry of the device's architecture.
        runners: Sources of its runners-up, by name.
        budget_s: Seconds to spend on timing.
    """
    workload = codec.from_json(Workload, entry["workload"])
    task = Task(kernel.signature.to_json(), kernel.problem, workload, device)
    sources = [(WINNER, kernel.source(device.arch, entry["file"])), *runners.items()]
    then_ms = _measured(entry["measurement"])
    race = partial(_race, workers, task, budget_s=budget_s, then_ms=then_ms.value)
    reply = race(sources)
    if "rejection" in reply and len(sources) > 1:  # of whom? the winner alone will tell
        reply = race(sources[:1])
    standing = Verdict(
        workload=workload,
        file=f"{kernel.folder.name}/{device.arch}/{entry['file']}",
        word="rejected",
        reason="",
        then_ms=then_ms,
        now_ms=None,
        change=None,
        rival_change=None,
        changes=tuple(provenance_changes(kernel.manifests[device.arch], entry, device)),
    )
    if "rejection" in reply:
        rejection = codec.from_json(Rejection, reply["rejection"])
        return replace(standing, reason=f"{rejection.stage}: {rejection.reason}")
    return _timed(standing, codec.from_json(RaceResult, reply["race"]), entry["rival"])


def runners_up(
    trials: Sequence[Trial], entry: Json, render: Render, *, kernel: FrozenFiles, arch: str
) -> dict[str, Source]:
    """Return the sources that came closest to a winner: stored trials, ties, and the default.

    Args:
        trials: The store's trials.
        entry: The winner's entry.
        render: Returns a candidate's source, or None where it does not render any more.
        kernel: The kernel's folder, which holds the default.
        arch: Architecture of the entry.
    """
    workload = codec.from_json(Workload, entry["workload"])
    timed = {
        trial.candidate: trial.outcome.median_ms
        for trial in trials
        if trial.workload == workload and isinstance(trial.outcome, Measurement)
    }
    near = [codec.from_json(Candidate, item) for item in entry["ties"]]
    near += sorted(timed, key=lambda candidate: timed[candidate])
    known = {trial.candidate: trial.source_sha256 for trial in trials}
    found: dict[str, Source] = {}
    hashes = {entry["sha256"]}
    for candidate in near:
        source = render(candidate)
        if source is None or source.sha256 in hashes or len(found) == RUNNERS_UP:
            continue
        if known.get(candidate, source.sha256) == source.sha256:  # else it was another source
            hashes.add(source.sha256)
            found[file_name(candidate, source)] = source
    default = entry["default"]
    if default["sha256"] not in hashes:
        found[f"{default['file']} (default)"] = kernel.source(arch, default["file"])
    return found


def provenance_changes(manifest: Json, entry: Json, device: DeviceInfo) -> Iterator[str]:
    """Yield what is no longer as it was when an entry was timed: ``torch 2.11.0 -> 2.13.0``."""
    pairs = (
        (entry["versions"], dict(device.versions)),
        (manifest["device"]["limits"], dict(device.limits)),
        ({"device": manifest["device"]["name"]}, {"device": device.name}),
    )
    for before, after in pairs:
        for name in dict.fromkeys((*before, *after)):
            old, new = before.get(name, "unknown"), after.get(name, "unknown")
            if old != new:
                yield f"{name} {old} -> {new}"


def _race(
    workers: Workers,
    task: Task,
    sources: Sequence[tuple[str, Source]],
    *,
    budget_s: float,
    then_ms: float,
) -> Json:
    """Return a child's reply; the second, where the first was grossly slower than a winner was.

    That is a regression, or a busy machine at that moment.
    """
    reply: Json = {}
    for _ in range(2):
        try:
            reply = workers.race(task, sources, budget_s=budget_s, seed=0)
        except Lethal as lethal:
            return {"rejection": codec.to_json(lethal.rejection)}
        if "rejection" in reply:
            break
        if not disturbed(codec.from_json(RaceResult, reply["race"]), {WINNER: then_ms}):
            break
    return reply


def _timed(standing: Verdict, result: RaceResult, rival: Json | None) -> Verdict:
    """Return the verdict on a winner that could be timed."""
    times_ms = dict(result.times_ms)
    now = median_interval(times_ms[WINNER], SURE)
    change = _quotient(now, standing.then_ms)
    rival_change = None
    if rival and result.rival in times_ms:
        rival_now = median_interval(times_ms[result.rival], SURE)
        rival_change = _quotient(rival_now, _measured(rival["measurement"]))
    word, reason = _judge(result, change)
    return replace(
        standing, word=word, reason=reason, now_ms=now, change=change, rival_change=rival_change
    )


def _judge(result: RaceResult, change: Interval) -> tuple[str, str]:
    """Return the word for a winner that was timed, and by whom it was overtaken."""
    times_ms = dict(result.times_ms)
    noise = ratio_interval(result.copy_ms, times_ms[WINNER]).value
    floor = max(noise, 1 / noise, 1 + TIE)
    contenders = [label for label in times_ms if label not in (WINNER, result.rival)]
    sure = confidence(result.error, len(contenders))
    ahead = {
        label: found
        for label in contenders
        if (found := ratio(result, label, WINNER, sure)).high < 1 / floor
    }
    if ahead:
        best = min(ahead, key=lambda label: ahead[label].value)
        found = ahead[best]
        return "overtaken", (
            f"{best} takes {found.value:.3f} [{found.low:.3f}, {found.high:.3f}] of its time: "
            "tune again"
        )
    if change.low > floor:
        return "slower", ""
    return ("faster" if change.high < 1 / floor else "holds"), ""


def _measured(measurement: Json) -> Interval:
    return Interval(*(measurement[name] for name in ("median_ms", "low_ms", "high_ms")))


def _quotient(over: Interval, under: Interval) -> Interval:
    """Return a ratio of independent medians: it lies within the extremes where both do."""
    return Interval(over.value / under.value, over.low / under.high, over.high / under.low)
