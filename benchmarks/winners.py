"""What won: the candidates of a frozen package and of a store, and single changes of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.package.reading import package_winners
from tuner.records import Candidate, DeviceInfo, Value, Winner, Workload, format_value
from tuner.session import Subject
from tuner.space.template import TemplateSpec
from tuner.store import open_stores


def winners_of(options: argparse.Namespace, info: DeviceInfo) -> Iterator[Winner]:
    """Yield the store's and the package's winners for this architecture, the store's first."""
    if options.store:
        for store in open_stores(options.store):
            yield from (item for item in store.winners if item.device.arch == info.arch)
    if options.package.exists():
        yield from (
            item for item in package_winners(options.package) if item.device.arch == info.arch
        )


def chosen(options: argparse.Namespace, winners: Sequence[Winner]) -> dict[Workload, Candidate]:
    """Return the winners of the asked-for workloads, else of the last workload of each kernel."""
    found: dict[Workload, Candidate] = {}
    by_kernel: dict[str, list[Winner]] = {}
    for winner in winners:
        by_kernel.setdefault(winner.workload.kernel, []).append(winner)
    for kernel in options.kernel:
        mine = by_kernel.get(kernel, [])
        asked = [item for item in mine if str(item.workload) in options.workload]
        for winner in asked or ([] if options.workload else mine[-1:]):
            found.setdefault(winner.workload, winner.candidate)
    return found


def frozen_winners(package: Path, subject: Subject, info: DeviceInfo) -> list[Candidate]:
    """Return the candidates that a package was frozen with, for a workload and architecture."""
    if not package.exists():
        return []
    return [
        winner.candidate
        for winner in package_winners(package)
        if winner.workload == subject.task.workload
        and winner.device.arch == info.arch
        and winner.candidate in subject.feasible
    ]


@dataclass(frozen=True, slots=True)
class Change:
    """A winner with one parameter changed."""

    parameter: str
    before: Value
    after: Value
    candidate: Candidate

    @property
    def label(self) -> str:
        """Its name in the race."""
        return f"{self.parameter}={format_value(self.after)}"


def changes(spec: TemplateSpec, winner: Candidate) -> list[Change]:
    """Return every change of one parameter: choices of a schedule first, then of sizes."""
    values = dict(winner.parameters)
    structural = [
        name
        for name, choices in spec.parameters
        if any(isinstance(choice, str | bool) for choice in choices)
    ]
    found = [
        Change(name, values[name], choice, Candidate.of(spec.name, {**values, name: choice}))
        for name, choices in spec.parameters
        for choice in choices
        if choice != values[name]
    ]
    return sorted(found, key=lambda change: change.parameter not in structural)
