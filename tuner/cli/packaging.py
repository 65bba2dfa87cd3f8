"""`tune freeze` and `tune export`: how winners leave the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from tuner.catalog import Catalog
from tuner.cli.devices import workers_for
from tuner.cli.display import NOT_SEARCHED
from tuner.cover import Limits, cover
from tuner.package.freeze import FrozenKernel, freeze
from tuner.package.prebuild import FrozenVariant, frozen_variants, prebuild
from tuner.plan import frozen_kernel
from tuner.records import Rejection, UsageError, Winner
from tuner.render import Renderer
from tuner.space.kernel import load_space
from tuner.store import Store, open_stores


def freeze_winners(catalog: Catalog, winners: Sequence[Winner], output: Path) -> list[Winner]:
    """Freeze the winners that the templates still render as they were timed; return them."""
    renderer = Renderer(catalog.template_folders)
    specs = {
        kernel: load_space(catalog.space_path(kernel))
        for kernel in {winner.workload.kernel for winner in winners} & set(catalog.kernels)
    }
    current = []
    for winner in winners:
        spec = specs.get(winner.workload.kernel)
        if spec is None:
            continue
        language = winner.source.language
        rendered = renderer.render(spec.kernel, language, winner.candidate)
        if rendered == winner.source:
            current.append(winner)
    if current:
        used = sorted({winner.workload.kernel for winner in current})
        kernels = [frozen_kernel(catalog, specs[kernel]) for kernel in used]
        freeze(current, kernels, output, templates=catalog.template_folders[-1])
    return current


def freeze_store(catalog: Catalog, root: Path, output: Path, limits: Limits | None = None) -> None:
    """Write the package from the winners of every architecture in a store.

    What the package has of other kernels stays, brought up to date with what they are now.

    Args:
        catalog: Where the kernels are.
        root: Folder of the stores.
        output: The package.
        limits: How few variants must serve how well; None freezes every winner.
    """
    kernels = _packaged(catalog, output)
    found = _opened(root) if root.is_dir() or not kernels else []
    # Of merged stores, the one with the architecture's own name is the latest: its winners,
    # which come last, replace those of other devices or versions.
    stores = sorted(found, key=lambda store: "@" not in store.folder.name)
    winners = [winner for store in stores for winner in chosen(store, limits)]
    if not winners and not kernels:
        raise UsageError(f"--store {root}: it holds no winners; run `tune` first")
    if kernels:
        freeze([], kernels, output, templates=catalog.template_folders[-1])
    current = freeze_winners(catalog, winners, output)
    tuned = [winner for winner in current if winner.searched]
    click.echo(f"{output}: {len(tuned)} winners frozen")
    if alone := len(current) - len(tuned):
        click.echo(f"{alone} workloads left out: {NOT_SEARCHED}")
    served = {(winner.device.arch, winner.workload) for winner in tuned}
    if replaced := len(tuned) - len(served):
        click.echo(f"{replaced} of them replaced by those of a later device or version")
    there = [winner for winner in winners if winner.workload.kernel in catalog.kernels]
    if unknown := {winner.workload.kernel for winner in winners} - set(catalog.kernels):
        click.echo(
            f"winners of {', '.join(sorted(unknown))} left out: is their --kernels missing?"
        )
    if stale := len(there) - len(current):
        click.echo(f"{stale} winners left out: their templates changed; run `tune` again")


def _opened(root: Path) -> list[Store]:
    """Return the stores under a folder, and say what of them could not be read."""
    stores = open_stores(root)
    for store in stores:
        if store.damaged_lines:
            click.echo(f"{store.path}: {store.damaged_lines} damaged lines skipped", err=True)
    return stores


def chosen(
    store: Store, limits: Limits | None, announce: Callable[[str], None] = click.echo
) -> list[Winner]:
    """Return a store's winners, or the few variants that cover them.

    Args:
        store: Where they are.
        limits: How few variants must serve how well; None takes every winner. Where only the
            default was timed, nothing is asked.
        announce: Is told how few they are.

    Raises:
        UsageError: Too few variants are allowed to serve what was measured.
    """
    if limits is None:
        return list(store.winners)
    covers = cover([item for item in store.winners if item.searched], store.trials, limits)
    for covered in covers:
        announce(
            f"{covered.kernel} on {covered.arch}: {covered.after} of {covered.before} variants "
            f"serve {len(covered.winners)} workloads, the worst in {covered.worst:.3f} x its "
            "winner's time"
        )
    covered_winners = [winner for covered in covers for winner in covered.winners]
    return [*covered_winners, *(item for item in store.winners if not item.searched)]


def prebuild_package(output: Path, environment: Mapping[str, str]) -> int:
    """Build what a package can store for its workloads' first calls; return the exit status."""
    stored = 0
    with TemporaryDirectory(prefix="tuner-") as folder:
        for kind, variants in groupby(_by_kind(output), key=_kind):
            with workers_for(kind, Path(folder), environment) as workers:
                for variant in variants:
                    name = variant.path.relative_to(output)
                    result = prebuild(variant, workers, Path(folder) / "built" / name)
                    if isinstance(result, Rejection):
                        click.echo(f"{name}: left to the compiler: {result.reason}", err=True)
                        continue
                    stored += result
                    workloads = len(variant.tasks)
                    click.echo(f"{name}: {result / 1e3:.0f} kB for {workloads} workloads")
    click.echo(f"{output}: {stored / 1e6:.1f} MB of binaries stored")
    return 0 if stored else 1


def _by_kind(output: Path) -> list[FrozenVariant]:
    return sorted(frozen_variants(output), key=_kind)


def _kind(variant: FrozenVariant) -> str:
    """Return the kind of device that a variant was frozen for."""
    return variant.tasks[0].device.kind


def check_package(catalog: Catalog, output: Path) -> int:
    """Print what differs between a package and what would be frozen; return the exit status."""
    from tuner.package.drift import check

    kernels = _packaged(catalog, output)
    renderer = Renderer(catalog.template_folders)
    drifts = check(output, kernels, renderer, templates=catalog.template_folders[-1])
    for drift in drifts:
        click.echo(drift, err=True)
    click.echo(f"{output}: {len(drifts)} differences")
    return 1 if drifts else 0


def _packaged(catalog: Catalog, output: Path) -> list[FrozenKernel]:
    """Return the kernels that a package has, as they are now."""
    return [
        frozen_kernel(catalog, load_space(catalog.space_path(kernel)))
        for kernel in catalog.kernels
        if (output / kernel).is_dir()
    ]


def export_store(form: str, root: Path, output: str) -> None:
    """Write the winners or trials of a store in a format that others read.

    Args:
        form: The format.
        root: Folder of the stores.
        output: The file or folder, as the user spelled it.
    """
    from tuner.package.export import require_output, write

    require_output(form, output)
    stores = _opened(root)
    winners = [winner for store in stores for winner in store.winners]
    trials = [trial for store in stores for trial in store.trials]
    for path in write(form, Path(output), winners=winners, trials=trials):
        click.echo(str(path))
