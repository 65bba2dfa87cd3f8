"""`tune build`: what candidates need of a card, without the card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from tuner.ahead import build_ahead, choose
from tuner.catalog import Catalog, device_class
from tuner.cli.devices import workers_for
from tuner.plan import Request, plan
from tuner.records import Rejection, UsageError
from tuner.render import Renderer
from tuner.store import Store


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """The options of `tune build`, as the command line gives them."""

    kernel: str
    target: str
    workloads: tuple[str, ...]
    sample: int
    everything: bool
    jobs: int | None
    store: Path
    folders: tuple[Path, ...]


def build_kernel(options: BuildOptions, environment: Mapping[str, str]) -> int:
    """Compile candidates, print a line for each, and return the exit status."""
    kind, colon, arch = options.target.partition(":")
    if not colon:
        raise UsageError(f"--target {options.target!r}: write KIND:ARCH, such as cuda:90")
    device = device_class(kind).target(arch)
    catalog = Catalog(options.folders)
    renderer = Renderer(catalog.template_folders)
    subject = plan(catalog, device, Request((options.kernel,), options.workloads))[0]
    sample = None if options.everything else options.sample
    candidates = choose(subject.feasible, sample, seed=0)
    click.echo(f"{subject.task.workload}: {len(candidates)} candidates for {options.target}")
    counts: Counter[str] = Counter()
    with workers_for(kind, options.store, environment, jobs=options.jobs) as workers:
        store = Store(options.store, device.arch)
        for built in build_ahead(
            subject, candidates, workers=workers, store=store, renderer=renderer
        ):
            result = built.result
            if isinstance(result, Rejection):
                counts[f"rejected at {result.stage}"] += 1
                reason = (result.reason.splitlines() or [""])[0]
                click.echo(f"{built.candidate}: rejected at {result.stage}: {reason}")
                continue
            counts["built"] += 1
            needs = result.resources
            click.echo(
                f"{built.candidate}: {needs.shared_bytes} shared bytes, {needs.registers} "
                f"registers, {needs.spills} spills, {result.compile_s:.1f} s"
            )
    click.echo(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 0 if counts["built"] else 1
