"""What the commands do; imported when one is run, so that `tune --help` is quick."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tuner import codec
from tuner.budget import Budget
from tuner.catalog import Catalog
from tuner.children.worker import Lethal, Workers
from tuner.cli.crew import RunOptions, crews_of, run_sessions, same_device, session_of, store_name
from tuner.cli.devices import (
    device_info,
    present_devices,
    resolve_cards,
    resolve_device,
)
from tuner.cli.display import Progress, kernel_tables, make_console, outcomes_of, results_table
from tuner.cli.packaging import freeze_winners
from tuner.cli.probe import cards_folder
from tuner.evidence.card import DeviceCard, card_of
from tuner.package.freeze import check_output
from tuner.plan import Request, plan
from tuner.records import DeviceInfo, Failure, UsageError, Winner
from tuner.render import Renderer
from tuner.seeds import Seed, fit, read_seeds
from tuner.session import Subject
from tuner.space.kernel import load_space
from tuner.store import Store

_MOST_REASONS = 12


def tune_kernels(options: RunOptions, environment: Mapping[str, str]) -> int:
    """Tune, freeze, verify what was frozen, and print; return the exit status."""
    console = make_console(stderr=options.as_json)
    catalog = Catalog(options.folders)
    budget = Budget.parse(options.budget)
    check_output(options.output)  # not after an hour
    seeds = [seed for path in options.seed_from for seed in read_seeds(path)]
    names = resolve_cards(options.device, environment)
    progress = [Progress(console, name if len(names) > 1 else "") for name in names]
    with ExitStack() as stack:
        crews = [stack.enter_context(crew) for crew in crews_of(names, options, environment)]
        device = same_device(names, crews)
        card = card_of(crews[0], cards_folder(options.store, environment))
        planned = [within(card, subject) for subject in plan(catalog, device, _request(options))]
        subjects = list(_seeded(console, planned, seeds))
        name = store_name(device, options.ranks)
        if options.fresh:
            Store(options.store, name).forget()
        renderer = Renderer(catalog.template_folders)
        sessions = [
            session_of(device, workers, name, options=options, renderer=renderer)
            for name, workers in zip(names, crews, strict=True)
        ]
        sessions[0].store.begin(device)
        console.print(f"[bold]{device.name}[/bold] ({device.arch}), trials in {options.store}")
        ended = run_sessions(sessions, subjects, budget, progress)
        freeze_winners(catalog, Store(options.store, name).winners, options.output)
        faults = list(_verify_frozen(crews[0], ended))
    results = [result for _, result in ended]
    if options.as_json:
        click.echo(json.dumps([_result_json(result) for result in results], indent=2))
    console.print(results_table(results, outcomes_of(progress)))
    _print_next_steps(console, ended, options)
    for fault in faults:
        console.print(fault, style="red", markup=False)
    sound = len(results) == len(subjects) and not faults and not _failures(results)
    return 0 if sound else 1


def _request(options: RunOptions) -> Request:
    """Return what to tune for; what is or looks like a file among the sets is a captured one."""
    files = [name for name in options.sets if _is_file(name)]
    sets = tuple(name for name in options.sets if name not in files)
    captured = tuple(map(Path, files))
    return Request(options.kernels, options.workloads, sets, captured, options.goal, options.ranks)


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or "/" in name or Path(name).is_file()


def _seeded(
    console: Console, subjects: Sequence[Subject], seeds: Sequence[Seed]
) -> Iterator[Subject]:
    """Yield the subjects with what they take over from others; say what they do not."""
    left_out: Counter[str] = Counter()
    for subject in subjects:
        found = fit(subject, seeds)
        if seeds:
            workload = subject.task.workload
            console.print(
                f"{workload.kernel} {workload}: {len(found.candidates)} first candidates of "
                f"{len(seeds)} configurations"
            )
        left_out.update(found.left_out)
        yield replace(subject, seeds=tuple(found.candidates))
    for reason, count in left_out.most_common(_MOST_REASONS):
        console.print(f"  left out {count} x {reason}", markup=False)
    if (more := len(left_out) - _MOST_REASONS) > 0:
        console.print(f"  and for {more} further reasons")


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
    paths: Sequence[Path],
    samplers: Sequence[str],
    *,
    evals: int,
    seeds: int,
    batch: int,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Replay tables with samplers and print a row for each pair as it ends."""
    from tuner.search.replay import replay
    from tuner.search.tables import read_tables

    rows = []
    for table in (table for path in paths for table in read_tables(path)):
        for sampler in samplers:
            summary = replay(table, sampler, seeds=seeds, evaluations=evals, batch=batch)
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


def _failures(results: Sequence[Winner | Failure]) -> list[Failure]:
    return [result for result in results if isinstance(result, Failure)]


def _result_json(result: Winner | Failure) -> Any:
    return codec.to_json(result)


def _describe(info: DeviceInfo) -> str:
    limits = ", ".join(f"{name}={value}" for name, value in info.limits)
    return f"{info.name} ({info.arch}); {limits}"
