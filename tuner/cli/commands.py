"""What the commands do; imported when one is run, so that `tune --help` is quick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tuner.catalog import Catalog
from tuner.cli.devices import device_info, present_devices, resolve_device
from tuner.cli.display import kernel_tables, make_console
from tuner.records import DeviceInfo, UsageError
from tuner.space.kernel import load_space


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


def _describe(info: DeviceInfo) -> str:
    limits = ", ".join(f"{name}={value}" for name, value in info.limits)
    return f"{info.name} ({info.arch}); {limits}"
