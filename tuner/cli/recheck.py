"""`tune recheck`: do the frozen winners still win, after a driver or a compiler has changed?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from tuner import codec
from tuner.catalog import Catalog
from tuner.children.worker import Workers
from tuner.cli.bench import require_timed
from tuner.cli.devices import resolve_device, workers_for
from tuner.cli.display import make_console
from tuner.evidence.frozen import FrozenFiles, read_frozen
from tuner.evidence.recheck import Render, Verdict, recheck, runners_up
from tuner.package.files import require_folder
from tuner.records import Candidate, DeviceInfo, Interval, Source, Trial, UsageError
from tuner.render import Renderer
from tuner.space.kernel import load_space
from tuner.store import Store


@dataclass(frozen=True, slots=True)
class RecheckOptions:
    """The options of `tune recheck`, as the command line gives them."""

    kernels: tuple[str, ...]
    device: str
    package: Path
    budget: float
    store: Path
    folders: tuple[Path, ...]
    as_json: bool


def recheck_package(options: RecheckOptions, environment: Mapping[str, str]) -> int:
    """Time frozen winners again, print how they stand, and return the exit status."""
    frozen = read_frozen(options.package, options.kernels)
    name = resolve_device(options.device, environment)
    require_timed(name)
    require_folder("--store", options.store)
    with workers_for(name, options.store, environment) as workers:
        verdicts = _verdicts(workers, workers.info(), frozen, options)
    if options.as_json:
        click.echo(json.dumps([_json(verdict) for verdict in verdicts], indent=2))
    else:
        make_console().print(_table(verdicts))
        for line in dict.fromkeys(line for verdict in verdicts for line in verdict.changes):
            click.echo(f"changed since it was frozen: {line}")
    bad = [verdict for verdict in verdicts if verdict.bad]
    for verdict in bad:
        workload = f"{verdict.workload.kernel} {verdict.workload}"
        click.echo(f"{workload}: {verdict.word} {verdict.reason}".rstrip(), err=True)
    click.echo(f"{len(verdicts)} winners, {len(bad)} regressions", err=options.as_json)
    return 1 if bad else 0


def _verdicts(
    workers: Workers,
    device: DeviceInfo,
    frozen: Sequence[FrozenFiles],
    options: RecheckOptions,
) -> list[Verdict]:
    stored = (options.store / device.arch / "trials.jsonl").exists()
    trials: Sequence[Trial] = Store(options.store, device.arch).trials if stored else ()
    catalog = Catalog(options.folders)
    verdicts = []
    for kernel in frozen:
        render = _renderer(catalog, kernel.folder.name)
        for entry in kernel.entries(device.arch):
            runners = runners_up(trials, entry, render, kernel=kernel, arch=device.arch)
            verdicts.append(
                recheck(workers, device, kernel, entry, runners=runners, budget_s=options.budget)
            )
    if not verdicts:
        tuned = sorted({arch for item in frozen for arch in item.manifests if item.entries(arch)})
        raise UsageError(
            f"--package {options.package}: no winner was frozen for {device.arch}, only for "
            f"{', '.join(tuned) or 'none'}; `tune` finds some"
        )
    return verdicts


def _renderer(catalog: Catalog, kernel: str) -> Render:
    """Return what renders a kernel's candidates, as far as its templates still can."""
    if kernel not in catalog.kernels:
        return lambda _: None
    spec, renderer = load_space(catalog.space_path(kernel)), Renderer(catalog.template_folders)

    def render(candidate: Candidate) -> Source | None:
        try:
            language = spec.template(candidate.template).language
            return renderer.render(kernel, language, candidate)
        except UsageError:  # a template or parameter that is no more
            return None

    return render


def _table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(
        title="Frozen winners today",
        caption="change: today's time over that when it was frozen, at least 92 %; that of the "
        "library tells whether the machine or the kernel changed",
    )
    for heading in ("workload", "then", "now", "change", "library's change", "verdict"):
        table.add_column(heading, overflow="fold", no_wrap="change" in heading)
    for verdict in verdicts:
        now = verdict.now_ms
        table.add_row(
            f"{verdict.workload.kernel} {verdict.workload}",
            f"{verdict.then_ms.value:.4g} ms",
            f"{now.value:.4g} ms" if now else "-",
            _spell(verdict.change),
            _spell(verdict.rival_change),
            escape(verdict.word),
        )
    return table


def _spell(change: Interval | None) -> str:
    if change is None:
        return "-"
    return f"{change.value:.3f} \\[{change.low:.3f}, {change.high:.3f}]"


def _json(verdict: Verdict) -> dict[str, Any]:
    data: dict[str, Any] = codec.to_json(verdict)
    return {**data, "regression": verdict.bad}
