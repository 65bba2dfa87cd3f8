"""How a run ends: its winners are frozen, verified from their files, and told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import click
from rich.console import Console

from tuner import codec
from tuner.children.host import HostLost
from tuner.children.worker import Lethal, Workers
from tuner.cli.display import NOT_SEARCHED, results_table
from tuner.cli.job import Job, RunOptions
from tuner.cli.packaging import chosen, freeze_winners
from tuner.cli.seeding import print_landings
from tuner.cover import limits_of
from tuner.records import DeviceInfo, Failure, UsageError, Winner, Workload
from tuner.session import Subject
from tuner.store import Store


@dataclass(frozen=True, slots=True)
class Ended:
    """How the workloads of one kind of card ended.

    Attributes:
        device: The kind of card.
        asked: How many workloads there were.
        results: How each that was begun ended, in their order.
        faults: What is wrong with what was frozen.
        outcomes: How the trials of each ended.
    """

    device: DeviceInfo
    asked: int
    results: Sequence[tuple[Subject, Winner | Failure]]
    faults: Sequence[str]
    outcomes: dict[Workload, Counter[str]]

    @property
    def sound(self) -> bool:
        """Whether every workload has a winner and nothing is wrong with it."""
        won = [result for _, result in self.results if isinstance(result, Winner)]
        return len(won) == self.asked and not self.faults


def freeze_ended(
    job: Job,
    name: str,
    crews: Sequence[Workers],
    ended: Sequence[tuple[Subject, Winner | Failure]],
) -> list[str]:
    """Freeze the winners of a store; return what is wrong with those of this run.

    Args:
        job: What was asked for.
        name: The store.
        crews: The children of its cards, the next for when a card is lost.
        ended: How the workloads of this run ended.
    """
    options, store, faults = job.options, Store(job.options.store, name), []
    limits = limits_of(options.max_variants, options.max_slowdown)
    try:
        winners = chosen(store, limits, job.console.print)
    except UsageError as error:  # not a reason to lose what was found
        winners, faults = list(store.winners), [f"every winner is frozen: {error}"]
    freeze_winners(job.catalog, winners, options.output)
    print_landings(job.console, job.seeds, ended, store.trials)
    served = {winner.workload: winner for winner in winners}
    frozen = [
        (subject, served[result.workload] if isinstance(result, Winner) else result)
        for subject, result in ended
    ]
    for crew in crews:
        with suppress(HostLost):
            return [*faults, *_verify_frozen(crew, frozen)]
    return [*faults, "the frozen winners are not verified: no card is left"]


def report_run(job: Job, kinds: Sequence[Ended]) -> int:
    """Print how a run ended, by kind of card; return 0 if there is one and all is sound."""
    results = [pair for kind in kinds for pair in kind.results]
    if job.options.as_json:
        click.echo(json.dumps([codec.to_json(result) for _, result in results], indent=2))
    for kind in kinds:
        title = f"Winners on {kind.device.name} ({kind.device.arch})"
        found = [result for _, result in kind.results]
        table = results_table(found, kind.outcomes, title if len(kinds) > 1 else "Winners")
        job.console.print(table)
    _print_not_searched(job, results)
    _print_disturbed(job, results)
    _print_next_steps(job.console, results, job.options)
    for fault in (fault for kind in kinds for fault in kind.faults):
        job.console.print(fault, style="red", markup=False)
    return 0 if kinds and all(kind.sound for kind in kinds) else 1


def _verify_frozen(
    workers: Workers, ended: Sequence[tuple[Subject, Winner | Failure]]
) -> Iterator[str]:
    """Verify each winner once more, from its file and in a fresh process."""
    workers.restart()
    for subject, result in ended:
        if isinstance(result, Failure):
            continue
        path = workers.path_of(result.source)
        try:
            rejection = workers.verify(subject.task, path, result.source.language)
        except Lethal as lethal:
            rejection = lethal.rejection
        if rejection is not None:
            yield f"{result.workload}: the frozen winner fails: {rejection.reason}"


def _print_not_searched(job: Job, ended: Sequence[tuple[Subject, Winner | Failure]]) -> None:
    """Say what has no winner of its own, and what serves it."""
    won = [result for _, result in ended if isinstance(result, Winner)]
    if alone := sum(not winner.searched for winner in won):
        job.console.print(
            f"{alone} of {len(ended)} workloads: {NOT_SEARCHED}; the nearest winner serves them, "
            "or else the default. Run again to search on, with a larger --budget"
        )


def _print_disturbed(job: Job, ended: Sequence[tuple[Subject, Winner | Failure]]) -> None:
    """Say whose times are not to be believed."""
    for _, result in ended:
        if isinstance(result, Winner) and result.disturbed:
            job.console.print(
                f"{result.workload}: {result.disturbed}: the machine was too busy for its times; "
                "tune again when it is quiet",
                style="yellow",
                markup=False,
            )


def _print_next_steps(
    console: Console, ended: Sequence[tuple[Subject, Winner | Failure]], options: RunOptions
) -> None:
    names = {result.workload.kernel for _, result in ended if isinstance(result, Winner)}
    for section in (subject.spec.autograd for subject, _ in ended):
        if section is not None and section.backward in names:
            names.add(section.operation)
    if names:
        console.print(f"import: from {options.output.name} import {', '.join(sorted(names))}")
        console.print(
            f"export: tune export --format json --store {options.store} --output winners.json"
        )
