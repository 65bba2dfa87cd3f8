"""What won: the candidates of a frozen package and of a store, and single changes of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.package.reading import package_winners
from tuner.records import Candidate, DeviceInfo, Value, Winner, Workload, format_value
from tuner.session import Subject
from tuner.space.combinations import TemplateSet
from tuner.store import open_stores


def winners_of(options: argparse.Namespace, info: DeviceInfo) -> Iterator[Winner]:
    """Yield the winners for an architecture, of the store if one is given, else of the package."""
    if options.store:
        found = [winner for store in open_stores(options.store) for winner in store.winners]
    else:
        found = package_winners(options.package)
    yield from (winner for winner in found if winner.device.arch == info.arch)


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


MOST_CHANGES = 5
"""Parameters that may change with one that cannot change alone."""


@dataclass(frozen=True, slots=True)
class Change:
    """A winner with another value of one parameter.

    Attributes:
        parameter: Its name.
        before: The winner's value.
        after: The other value.
        candidate: The winner with that value and `also`; None if nothing feasible has the value.
        also: What else had to change, since the constraints refuse that value alone.
        broken: The constraints that refuse it.
    """

    parameter: str
    before: Value
    after: Value
    candidate: Candidate | None
    also: str = ""
    broken: str = ""

    @property
    def label(self) -> str:
        """Its name in the race."""
        return f"{self.parameter}={format_value(self.after)}"


def changes(part: TemplateSet, winner: Candidate) -> list[Change]:
    """Return every change of one parameter: choices of a schedule first, then of sizes.

    Args:
        part: What is feasible of the winner's template.
        winner: The winner.
    """
    parameters, values = part.spec.parameters, dict(winner.parameters)
    structural = [
        name
        for name, choices in parameters
        if any(isinstance(choice, str | bool) for choice in choices)
    ]
    found = [
        _change(part, winner, name, choice)
        for name, choices in parameters
        for choice in choices
        if choice != values[name]
    ]
    return sorted(found, key=lambda change: change.parameter not in structural)


def _change(part: TemplateSet, winner: Candidate, name: str, value: Value) -> Change:
    values = dict(winner.parameters)
    alone = Candidate.of(winner.template, {**values, name: value})
    broken = "; ".join(str(item) for item in part.spec.broken(alone, part.limits))
    if not broken:
        return Change(name, values[name], value, alone)
    near = _nearest(part, alone, name)
    differ = () if near is None else set(near.parameters) - set(alone.parameters)
    also = ", ".join(f"{key}={format_value(item)}" for key, item in sorted(differ))
    return Change(name, values[name], value, near, also, broken)


def _nearest(part: TemplateSet, wanted: Candidate, kept: str) -> Candidate | None:
    """Return the feasible candidate with one value kept that differs in the fewest others.

    Of those that differ in as many, it is the one whose values are the fewest steps away.
    """
    choices = dict(part.spec.parameters)
    places = {name: choices[name].index(value) for name, value in wanted.parameters}

    def steps(candidate: Candidate) -> int:
        return sum(
            abs(choices[name].index(value) - places[name]) for name, value in candidate.parameters
        )

    layer = {wanted: frozenset({kept})}
    for _ in range(MOST_CHANGES):
        following: dict[Candidate, frozenset[str]] = {}
        for candidate, changed in layer.items():
            values = dict(candidate.parameters)
            # Whatever is feasible differs in a parameter of every constraint that is broken.
            broken = next(part.spec.broken(candidate, part.limits))
            for name in sorted(broken.require.names & (choices.keys() - changed)):
                for choice in choices[name]:
                    if choice != values[name]:
                        near = Candidate.of(wanted.template, {**values, name: choice})
                        following[near] = changed | {name}
        feasible = [item for item in following if not any(part.spec.broken(item, part.limits))]
        if feasible:
            return min(feasible, key=steps)
        layer = following
    return None
