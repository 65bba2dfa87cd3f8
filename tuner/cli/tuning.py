"""`tune run`: what it needs whatever it runs on, the run on this machine, and how it ends."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console

from tuner import codec
from tuner.budget import Budget
from tuner.catalog import Catalog
from tuner.children.host import HostLost
from tuner.children.worker import Lethal, Workers
from tuner.cli.crew import RunOptions, crews_of, run_sessions, same_device, session_of, store_name
from tuner.cli.devices import resolve_cards
from tuner.cli.display import Progress, make_console, outcomes_of, results_table
from tuner.cli.packaging import chosen, freeze_winners
from tuner.cli.probe import cards_folder
from tuner.cli.seeding import print_landings, seeded
from tuner.cover import limits_of
from tuner.evidence.card import DeviceCard, card_of
from tuner.package.freeze import check_output
from tuner.plan import Request, check_request, plan
from tuner.records import DeviceInfo, Failure, UsageError, Winner, Workload
from tuner.render import Renderer
from tuner.seeds import Seed, read_seeds
from tuner.session import Subject
from tuner.store import Store

_SHORT_S = 10.0
"""Seconds of a workload's budget of which the first compilations and the final leave little."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a run was asked for, and what it needs on whatever card.

    Attributes:
        options: The command line.
        console: Where to print.
        catalog: Where the kernels are.
        budget: How long to search.
        seeds: What others found, by file.
        renderer: Renders the candidates.
        cards: Folder of the cards that say what devices can do.
    """

    options: RunOptions
    console: Console
    catalog: Catalog
    budget: Budget
    seeds: Mapping[Path, Sequence[Seed]]
    renderer: Renderer
    cards: Path


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


def tune_kernels(options: RunOptions, environment: Mapping[str, str]) -> int:
    """Tune, freeze, verify what was frozen, and print; return the exit status."""
    job = job_of(options, environment)
    names = resolve_cards(options.device, environment)
    progress = [Progress(job.console, name if len(names) > 1 else "") for name in names]
    with ExitStack() as stack:
        crews = [stack.enter_context(crew) for crew in crews_of(names, options, environment)]
        device = same_device(names, crews)
        name = store_name(device, options.ranks)
        subjects = prepare(job, device, crews[0], name)
        sessions = [
            session_of(device, workers, (name, card), options=options, renderer=job.renderer)
            for card, workers in zip(names, crews, strict=True)
        ]
        ended = run_sessions(sessions, subjects, job.budget, progress)
        faults = freeze_ended(job, name, crews[:1], ended)
    return report_run(job, [Ended(device, len(subjects), ended, faults, outcomes_of(progress))])


def job_of(options: RunOptions, environment: Mapping[str, str]) -> Job:
    """Return what a run needs whatever it runs on; what is wrong with it is said here."""
    console = make_console(stderr=options.as_json)
    catalog = Catalog(options.folders)
    budget = Budget.parse(options.budget)
    check_output(options.output)  # not after an hour
    seeds = {path: read_seeds(path) for path in options.seed_from}
    check_request(catalog, _request(options))
    renderer = Renderer(catalog.template_folders)
    cards = cards_folder(options.store, environment)
    return Job(options, console, catalog, budget, seeds, renderer, cards)


def prepare(job: Job, device: DeviceInfo, workers: Workers, name: str) -> list[Subject]:
    """Return what to tune for on a kind of card, its store begun.

    Args:
        job: What was asked for.
        device: The card.
        workers: Its children, which find out what it can do.
        name: Its store.
    """
    options = job.options
    planned = plan(job.catalog, device, _request(options))
    card = card_of(workers, job.cards)
    seeds = [seed for given in job.seeds.values() for seed in given]
    subjects = list(seeded(job.console, [within(card, item) for item in planned], seeds))
    store = Store(options.store, name)
    if options.fresh:
        store.forget()
    store.begin(device)
    job.console.print(f"[bold]{device.name}[/bold] ({device.arch}), trials in {options.store}")
    each_s = (job.budget.seconds or math.inf) / len(subjects)
    if each_s < _SHORT_S:
        enough_s = math.ceil(_SHORT_S * len(subjects))
        job.console.print(
            f"{each_s:.0f} s for each of {len(subjects)} workloads is short for a search: "
            f"--budget {enough_s}s"
        )
    return subjects


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
    _print_next_steps(job.console, results, job.options)
    for fault in (fault for kind in kinds for fault in kind.faults):
        job.console.print(fault, style="red", markup=False)
    return 0 if kinds and all(kind.sound for kind in kinds) else 1


def within(card: DeviceCard, subject: Subject) -> Subject:
    """Return a subject whose times must be possible by a device's card."""
    ceilings = card.ceilings(subject.task.workload.dtype)
    return replace(subject, task=replace(subject.task, ceilings=ceilings))


def _request(options: RunOptions) -> Request:
    """Return what to tune for; what is or looks like a file among the sets is a captured one."""
    files = [name for name in options.sets if _is_file(name)]
    sets = tuple(name for name in options.sets if name not in files)
    captured = tuple(map(Path, files))
    return Request(options.kernels, options.workloads, sets, captured, options.goal, options.ranks)


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


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or Path(name).is_file()
