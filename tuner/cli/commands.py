"""What the commands do; imported when one is run, so that `tune --help` is quick."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tuner import codec
from tuner.budget import Budget
from tuner.catalog import Catalog, device_class, split_device
from tuner.cli.devices import (
    device_info,
    jobs_or_cores,
    present_devices,
    resolve_device,
    workers_for,
)
from tuner.cli.display import Progress, kernel_tables, make_console, results_table
from tuner.cli.packaging import freeze_winners
from tuner.cli.probe import cards_folder
from tuner.evidence.card import DeviceCard, card_of
from tuner.plan import Request, plan
from tuner.records import DeviceInfo, Failure, UsageError, Winner
from tuner.render import Renderer
from tuner.run import run
from tuner.session import Session, Subject
from tuner.space import load_space
from tuner.store import Store
from tuner.task import Limits
from tuner.worker import Lethal, Workers


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `tune run`, as the command line gives them."""

    kernels: tuple[str, ...]
    device: str
    workloads: tuple[str, ...]
    sets: tuple[str, ...]
    budget: str
    seed: int
    jobs: int | None
    timeout: float
    output: Path
    store: Path
    fresh: bool
    folders: tuple[Path, ...]
    as_json: bool


def tune_kernels(options: RunOptions, environment: Mapping[str, str]) -> int:
    """Tune, freeze, verify what was frozen, and print; return the exit status."""
    console = make_console(stderr=options.as_json)
    catalog = Catalog(options.folders)
    budget = Budget.parse(options.budget)
    request = Request(options.kernels, options.workloads, options.sets)
    progress = Progress(console)
    limits = Limits(options.timeout, options.timeout)
    name = resolve_device(options.device, environment)
    kind = device_class(split_device(name)[0])
    if not kind.timed:
        raise UsageError(
            f"--device {name}: it verifies and never times; nothing can be tuned on it"
        )
    with workers_for(
        name, options.store, environment, jobs=options.jobs, limits=limits
    ) as workers:
        device = workers.info()
        card = card_of(workers, cards_folder(options.store, environment))
        subjects = [within(card, subject) for subject in plan(catalog, device, request)]
        store = Store(options.store, device.arch)
        if options.fresh:
            store.forget()
        renderer = Renderer(catalog.template_folders)
        session = Session(
            device,
            kind.shares_host,
            store=store,
            workers=workers,
            renderer=renderer,
            jobs=jobs_or_cores(options.jobs),
            seed=options.seed,
        )
        console.print(f"[bold]{device.name}[/bold] ({device.arch}), trials in {options.store}")
        workers.warm_up()
        results = run(session, subjects, budget, progress)
        freeze_winners(catalog, store.winners, options.output)
        faults = list(_verify_frozen(workers, subjects, results))
    if options.as_json:
        click.echo(json.dumps([_result_json(result) for result in results], indent=2))
    console.print(results_table(results, progress.outcomes))
    _print_next_steps(console, subjects, results, options)
    for fault in faults:
        console.print(f"[red]{fault}[/red]")
    complete = len(results) == len(subjects)
    return 0 if complete and not faults and not _failures(results) else 1


def show_kernel(
    kernel: str, device: str, catalog: Catalog, environment: Mapping[str, str]
) -> None:
    """Print a kernel's space, and its feasible part on a device."""
    spec = load_space(catalog.space_path(kernel))
    info = device_info(resolve_device(device, environment), environment)
    try:
        dtypes = [
            dtype
            for template in spec.templates
            if info.kind in template.devices
            for dtype in template.dtypes
        ]
        first = dtypes[0] if dtypes else spec.dtypes[0]
        feasible = spec.feasible(dict(info.limits), info.kind, first)
    except UsageError as error:
        click.echo(f"nothing is feasible on {info.name}: {error}", err=True)
        feasible = None
    console = make_console()
    for table in kernel_tables(spec, feasible):
        console.print(table)


def list_devices(environment: Mapping[str, str]) -> None:
    """Print every kind of device with what is here, or why it is not."""
    for kind, found in present_devices(environment).items():
        click.echo(f"{kind}: {found if isinstance(found, str) else _describe(found)}")


def replay_tables(
    paths: Sequence[Path], samplers: Sequence[str], *, evals: int, seeds: int, quiet: bool
) -> list[dict[str, Any]]:
    """Replay tables with samplers and print a row for each pair as it ends."""
    from tuner.replay import replay
    from tuner.tables import read_tables

    rows = []
    for table in (table for path in paths for table in read_tables(path)):
        for sampler in samplers:
            summary = replay(table, sampler, seeds=seeds, evaluations=evals)
            rows.append(summary.to_json())
            if not quiet:
                shares = ", ".join(f"{share:.3f} at {at}" for at, share in summary.share.items())
                click.echo(
                    f"{summary.space} {sampler}: share of the optimum {shares}; "
                    f"{summary.evaluations_to_95} evaluations to 95 %, "
                    f"{summary.proposal_ms:.0f} ms a proposal"
                )
    return rows


def within(card: DeviceCard, subject: Subject) -> Subject:
    """Return a subject whose times must be possible by a device's card."""
    ceilings = card.ceilings(subject.task.workload.dtype)
    return replace(subject, task=replace(subject.task, ceilings=ceilings))


def _verify_frozen(
    workers: Workers, subjects: Sequence[Subject], results: Sequence[Winner | Failure]
) -> Iterator[str]:
    """Verify each winner once more, from its file and in a fresh process."""
    workers.restart()
    for subject, result in zip(subjects, results, strict=False):
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
    console: Console,
    subjects: Sequence[Subject],
    results: Sequence[Winner | Failure],
    options: RunOptions,
) -> None:
    names = {result.workload.kernel for result in results if isinstance(result, Winner)}
    for section in (subject.spec.autograd for subject in subjects):
        if section is not None and section.backward in names:
            names.add(section.operation)
    if names:
        console.print(f"import: from {options.output.name} import {', '.join(sorted(names))}")
        console.print(
            f"export: tune export --format json --store {options.store} --output winners.json"
        )


def _failures(results: Sequence[Winner | Failure]) -> list[Failure]:
    return [result for result in results if isinstance(result, Failure)]


def _result_json(result: Winner | Failure) -> Any:
    return codec.to_json(result)


def _describe(info: DeviceInfo) -> str:
    limits = ", ".join(f"{name}={value}" for name, value in info.limits)
    return f"{info.name} ({info.arch}); {limits}"
