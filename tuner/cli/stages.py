"""`tune explain KERNEL`: where the time goes, as a table beside the roofline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table

from tuner import codec
from tuner.catalog import Catalog
from tuner.cli.bench import require_timed
from tuner.cli.devices import resolve_device, workers_for
from tuner.cli.display import make_console
from tuner.cli.probe import announce, cards_folder
from tuner.cli.tuning import within
from tuner.evidence.card import card_of
from tuner.evidence.frozen import read_frozen
from tuner.evidence.stages import Profile, profile
from tuner.package.files import require_folder
from tuner.plan import Request, plan
from tuner.records import Candidate, Interval, UsageError
from tuner.render import Renderer
from tuner.session import Subject
from tuner.store import Store


@dataclass(frozen=True, slots=True)
class StagesOptions:
    """The options of `tune explain KERNEL`, as the command line gives them."""

    kernel: str
    device: str
    workloads: tuple[str, ...]
    package: Path
    budget: float
    store: Path
    folders: tuple[Path, ...]
    as_json: bool


def explain_kernel(options: StagesOptions, environment: Mapping[str, str]) -> None:
    """Time a kernel's twins and print what its stages cost."""
    catalog = Catalog(options.folders)
    catalog.space_path(options.kernel)  # before children start
    require_folder("--store", options.store)
    renderer = Renderer(catalog.template_folders)
    name = resolve_device(options.device, environment)
    require_timed(name)
    found = []
    with workers_for(name, options.store, environment) as workers:
        device = workers.info()
        request = Request((options.kernel,), options.workloads)
        subjects = plan(catalog, device, request)
        card = card_of(workers, cards_folder(options.store, environment), announce=announce)
        for subject in (within(card, item) for item in subjects):
            candidate, origin = _candidate(subject, options)
            language = subject.spec.template(candidate.template).language
            twins = renderer.twins(options.kernel, language, candidate)
            source = subject.render(renderer, candidate)
            result = profile(workers, subject.task, source, twins, budget_s=options.budget)
            workload = subject.task.workload
            about = {"kernel": options.kernel, "workload": str(workload), "origin": origin}
            found.append({**about, "candidate": str(candidate), **result.to_json()})
            if not options.as_json:
                click.echo(f"{workload.kernel} {workload}: {origin}: {candidate}")
                for line in roofline(result):
                    click.echo(f"  {line}")
                make_console().print(stages_table(result))
    if options.as_json:
        click.echo(json.dumps(found, indent=2))


def roofline(result: Profile) -> Iterator[str]:
    """Yield what the time is, and what the bytes and operations alone would take."""
    time_ms = result.time_ms
    yield (
        f"{time_ms.value:.4g} ms [{time_ms.low:.4g}, {time_ms.high:.4g}] a call, "
        f"{result.work.caches} caches, {result.method}, noise floor "
        f"{100 * abs(result.noise.value - 1):.2g} %"
    )
    for least_ms, amount, unit, ceiling in (
        (result.memory_ms, result.work.bytes, "GB/s", result.ceilings.gbytes),
        (result.products_ms, result.work.flops, "GFLOP/s", result.ceilings.gflops),
    ):
        if least_ms is not None:
            rate = amount / time_ms.value * 1e-6
            share = 100 * least_ms / time_ms.value
            yield f"{rate:.4g} {unit}, {share:.1f} % of the {ceiling:.4g} measured on this device"
    memory, products = result.memory_ms, result.products_ms
    if memory is not None and products is not None:
        bound = "memory" if memory > products else "products"
        yield f"on the roofline it waits for {bound}, for {max(memory, products):.4g} ms at least"


def stages_table(result: Profile) -> Table:
    """Return what each stage costs."""
    table = Table(
        title="Stages, the dearest first",
        caption="saved by leaving a stage out: what only feeds it goes, too, and what overlaps "
        "with others saves less than it takes. Added by doing it twice: the second turn finds its "
        "data in the caches. Twins are wrong on purpose and kept nowhere.",
    )
    for heading in ("stage", "twin", "cost", "share of the time"):
        table.add_column(heading, no_wrap=heading != "stage")
    for item in result.costs:
        note = "" if item.seen else " (within the noise)"
        table.add_row(
            item.twin.stage,
            "saved, left out" if item.twin.mode == "left out" else "added, doubled",
            f"{item.cost_ms:.4g} ms",
            f"{_percent(item.share)}{note}",
        )
    for twin, reason in result.refused:
        table.add_row(twin.stage, twin.mode, "-", (reason.splitlines() or [""])[0][:60])
    if not (result.costs or result.refused):
        table.add_row("none", "", "", "the template marks no stages")
    return table


def _percent(share: Interval) -> str:
    return f"{100 * share.value:.1f} % \\[{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _candidate(subject: Subject, options: StagesOptions) -> tuple[Candidate, str]:
    """Return the workload's winner from the store or the package, else the default."""
    workload, device = subject.task.workload, subject.task.device
    if (options.store / device.arch / "trials.jsonl").exists():
        for winner in Store(options.store, device.arch).winners:
            fits = winner.searched and winner.candidate in subject.feasible
            if winner.workload == workload and fits:
                return winner.candidate, f"the winner in {options.store}"
    if options.package.is_dir():
        for kernel in read_frozen(options.package):
            for entry in kernel.entries(device.arch):
                candidate = codec.from_json(Candidate, entry["candidate"])
                known = entry["workload"] == codec.to_json(workload)
                if known and candidate in subject.feasible:
                    return candidate, f"the winner in {options.package}"
    if not subject.feasible:
        raise UsageError(f"{workload}: nothing is feasible on {device.name}")
    return subject.feasible.default, "not tuned here, the default"
