"""`tune --cluster`: a run on the cards of a Ray cluster, a search for each kind of card."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tuner.children.host import HostLost
from tuner.children.task import Limits
from tuner.children.worker import Workers
from tuner.cli.crew import session_of
from tuner.cli.display import Progress, outcomes_of
from tuner.cli.ending import Ended, freeze_ended, report_run
from tuner.cli.job import Job, RunOptions, job_of
from tuner.cli.tuning import prepare
from tuner.fleet import Fleet
from tuner.merge import folder_name
from tuner.records import DeviceInfo, UsageError
from tuner.session import Subject
from tuner.store import Store

if TYPE_CHECKING:
    from tuner.cluster.cluster import Card, Cluster

_GLANCE_S = 0.5
_TELL_S = 15.0
"""Seconds without a card after which it is said."""

_PATIENCE_S = 60.0
"""Seconds to wait for a card while none is at work."""


def tune_on_cluster(options: RunOptions, environment: Mapping[str, str]) -> int:
    """Tune on the cards of a cluster, freeze, verify and print; return the exit status."""
    assert options.cluster is not None
    if find_spec("ray") is None:
        raise UsageError(
            f"--cluster {options.cluster}: Ray is not installed: pip install 'tuner[cluster]'"
        )
    if options.ranks > 1:
        raise UsageError(f"--ranks {options.ranks}: ranks share a host; leave out --cluster")
    from tuner.cluster.cluster import Cluster

    job = job_of(options, environment)
    cache = options.store.absolute() / "cache"
    with Cluster(options.cluster, options.device, cache) as cluster, ExitStack() as stack:
        run = _Run(job, cluster, stack)
        try:
            run.work()
        except KeyboardInterrupt:
            job.console.print("interrupted; workloads at hand still get their finals")
        ended = run.conclude()
    return report_run(job, ended)


@dataclass
class _Kind:
    """Equal cards, which share workloads and a store."""

    device: DeviceInfo
    store: str
    subjects: list[Subject]
    fleet: Fleet
    crews: dict[str, Workers] = field(default_factory=dict)
    progress: list[Progress] = field(default_factory=list)


class _Run:
    """The kinds of card of a cluster, each with a search of its own.

    Args:
        job: What was asked for.
        cluster: Where the cards are.
        stack: Ends what is begun.
    """

    def __init__(self, job: Job, cluster: Cluster, stack: ExitStack) -> None:
        self._job = job
        self._cluster = cluster
        self._stack = stack
        self._kinds: list[_Kind] = []
        self._active_s = time.monotonic()
        self._told = False

    def work(self) -> None:
        """Have every card that joins take workloads, until all have ended or no card is left.

        Raises:
            UsageError: There never was a card.
        """
        self._job.console.print(f"cluster: {self._cluster.describe()}")
        while not self._ended():
            for card in self._cluster.joined(_GLANCE_S):
                try:
                    self._enlist(card)
                except HostLost as lost:
                    self._job.console.print(f"{card.name} is gone: {lost}", markup=False)
            while self._cluster.complaints:
                self._job.console.print(self._cluster.complaints.pop(0), markup=False)
        if not self._kinds:
            options = self._job.options
            busy = self._cluster.waiting
            used = f", {busy} of its cards in use by others: see `ray status`" if busy else ""
            raise UsageError(
                f"--cluster {options.cluster}: no card for --device {options.device} in "
                f"{_PATIENCE_S:g} s: {self._cluster.describe()}{used}"
            )

    def conclude(self) -> list[Ended]:
        """End the searches, freeze and verify what won, and return how each kind ended."""
        ended = []
        for kind in self._kinds:
            kind.fleet.stop()
        # The store with the architecture's own name comes last: its winners replace those of
        # another device of the same architecture, as with `tune freeze`.
        for kind in sorted(self._kinds, key=lambda kind: "@" not in kind.store):
            results = kind.fleet.results()
            names = {card.name for card in self._cluster.cards.values() if not card.host.lost}
            crews = [crew for name, crew in kind.crews.items() if name in names]
            faults = freeze_ended(self._job, kind.store, crews, results)
            outcomes = outcomes_of(kind.progress)
            ended.append(Ended(kind.device, len(kind.subjects), results, faults, outcomes))
        return ended

    def _ended(self) -> bool:
        if self._kinds and all(kind.fleet.finished for kind in self._kinds):
            return True
        if any(kind.fleet.failed for kind in self._kinds):
            return True
        if not all(kind.fleet.idle for kind in self._kinds):
            self._active_s, self._told = time.monotonic(), False
        idle_s = time.monotonic() - self._active_s
        if idle_s > _TELL_S and not self._told:
            self._job.console.print(f"no card is at work: waiting {_PATIENCE_S:g} s for one")
            self._told = True
        return idle_s > _PATIENCE_S

    def _enlist(self, card: Card) -> None:
        options = self._job.options
        workers = self._stack.enter_context(
            Workers(
                card.host,
                jobs=min(card.jobs, options.jobs or card.jobs),
                sources=options.store.absolute() / "sources",
                limits=Limits(options.timeout, options.timeout),
            )
        )
        kind = next((kind for kind in self._kinds if kind.device == card.info), None)
        if kind is None:
            kind = self._begin(card, workers)
            self._active_s = time.monotonic()
        place = (kind.store, card.name)
        session = session_of(
            card.info, workers, place, options=options, renderer=self._job.renderer
        )
        progress = Progress(self._job.console, card.name)
        kind.crews[card.name] = workers
        kind.progress.append(progress)
        self._job.console.print(f"{card.name} joins: {card.info.name} ({card.info.arch})")
        kind.fleet.join(session, progress)

    def _begin(self, card: Card, workers: Workers) -> _Kind:
        """Begin the search of a kind of card with its first one."""
        store = self._store_name(card.info)
        subjects = prepare(self._job, card.info, workers, store)
        fleet = self._stack.enter_context(Fleet(subjects, self._job.budget))
        kind = _Kind(card.info, store, subjects, fleet)
        self._kinds.append(kind)
        return kind

    def _store_name(self, device: DeviceInfo) -> str:
        """Return the store of a kind: the one it has, or one that no kind at work has."""
        root, arch = self._job.options.store, device.arch
        taken = {kind.store: kind.device for kind in self._kinds}
        there = [path.parent.name for path in sorted(root.glob(f"{arch}*/trials.jsonl"))]
        for name in there:
            ours = name == arch or name.startswith(f"{arch}@")
            if ours and name not in taken and Store(root, name).device == device:
                return name
        if arch not in taken:
            return arch
        others = [_maker(other) for name, other in taken.items() if other.arch == arch]
        name = folder_name(arch, _maker(device), others)
        while name in taken or name in there:
            name += "_"
        return name


def _maker(device: DeviceInfo) -> tuple[str, tuple[tuple[str, str], ...]]:
    return device.name, tuple(sorted(device.versions))
