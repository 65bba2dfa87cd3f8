"""`tune bench` and `tune compare`: times that are kept, and times side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table

from tuner.catalog import Catalog, device_class, split_device
from tuner.cli.devices import resolve_device, workers_for
from tuner.cli.display import make_console
from tuner.cli.probe import announce, cards_folder
from tuner.evidence.card import card_of
from tuner.evidence.compare import ComparedTime, compare
from tuner.evidence.frozen import FrozenFiles, read_frozen
from tuner.evidence.measure import Conditions, measure, results_file
from tuner.evidence.results import WorkloadTimes, read_results, write_section
from tuner.package.files import require_file
from tuner.records import DeviceInfo, Failure, UsageError, Workload
from tuner.space.kernel import load_space


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `tune bench`, as the command line gives them."""

    kernel: str
    device: str
    workloads: tuple[str, ...]
    sets: tuple[str, ...]
    rival: bool
    package: Path
    output: Path
    budget: float
    seed: int
    store: Path
    folders: tuple[Path, ...]


def bench_kernel(options: BenchOptions, environment: Mapping[str, str]) -> int:
    """Time a kernel of a package, write the file, print it; return the exit status."""
    (kernel,) = read_frozen(options.package, (options.kernel,))
    require_file("--output", options.output)
    name = resolve_device(options.device, environment)
    require_timed(name)
    kernel.dtypes(split_device(name)[0])  # raises where it holds nothing for the device
    asked = _asked(kernel, split_device(name)[0], options)
    console = make_console()
    measured: list[WorkloadTimes] = []
    failures: list[Failure] = []
    with workers_for(name, options.store, environment, jobs=1) as workers:
        run = Conditions(
            workers,
            workers.info(),
            options.budget,
            options.seed,
            options.rival,
            card_of(workers, cards_folder(options.store, environment), announce=announce),
        )
        for workload in asked or _tuned(kernel, run.device):
            outcome = measure(run, kernel, workload)
            if isinstance(outcome, Failure):
                failures.append(outcome)
                click.echo(f"{workload.kernel} {workload}: refused at {outcome.reason}", err=True)
            else:
                measured.append(outcome)
                console.print(times_table(outcome))
    if not measured:
        raise UsageError(f"{options.output}: not written, since nothing could be timed")
    write_section(results_file(run, measured), options.output)
    click.echo(f"{options.output}: {len(measured)} workloads; tune compare {options.output} ...")
    return 1 if failures else 0


def require_timed(device: str) -> None:
    """Raise UsageError where a device's times mean nothing."""
    if not device_class(split_device(device)[0]).timed:
        raise UsageError(f"--device {device}: it verifies and never times")


def compare_files(paths: Sequence[Path], *, as_json: bool) -> None:
    """Print files side by side, the first as the reference."""
    if len(paths) < 2:
        raise UsageError(f"tune compare {paths[0]}: give at least two files of `tune bench`")
    rows = compare([(str(path), read_results(path)) for path in paths])
    if as_json:
        click.echo(json.dumps([row.to_json() for row in rows], indent=2))
    else:
        make_console().print(compared_table(rows))


def times_table(times: WorkloadTimes) -> Table:
    """Return what was measured of one workload."""
    value, low, high = times.noise
    table = Table(
        title=times.name,
        caption=f"{times.protocol}; noise floor {value:.4f} [{low:.4f}, {high:.4f}]".replace(
            "[", "\\["
        ),
    )
    for heading in ("contender", "median", "95 %", "samples", "GFLOP/s", "GB/s", "source"):
        table.add_column(heading, overflow="fold")
    for item in times.contenders:
        source = item.source
        table.add_row(
            item.label,
            f"{item.median_ms:.4g} ms",
            f"{item.low_ms:.4g} to {item.high_ms:.4g}",
            str(len(item.times_ms)),
            f"{item.gflops:.4g}",
            f"{item.gbytes:.4g}",
            f"{source.file} ({source.reason})" if source else times.refused,
        )
    return table


def compared_table(rows: Sequence[ComparedTime]) -> Table:
    """Return compared times, a line for each contender of each file."""
    table = Table(
        title="Side by side",
        caption="ratio: time over the reference's, its interval at least 95 %; what differs from "
        "process to process, such as where memory lies, is in no interval",
    )
    for heading in ("workload", "file", "contender", "time", "ratio", "efficiency", "verdict"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("ratio", "time"))
    seen = ""
    for row in rows:
        ratio = row.ratio
        table.add_row(
            row.workload if row.workload != seen else "",
            row.file,
            row.label,
            f"{row.median_ms:.4g} ms",
            f"{ratio.value:.3f} \\[{ratio.low:.3f}, {ratio.high:.3f}]",
            f"{row.efficiency:.1f} %",
            row.verdict,
        )
        seen = row.workload
    return table


def _asked(kernel: FrozenFiles, kind: str, options: BenchOptions) -> list[Workload]:
    """Return the workloads that the user named."""
    found = [kernel.parse(kind, text) for text in options.workloads]
    if options.sets:
        spec = load_space(Catalog(options.folders).space_path(options.kernel))
        for name in options.sets:
            if name not in spec.workloads:
                known = ", ".join(spec.workloads)
                raise UsageError(f"{spec.kernel} has no workloads {name!r}; it has: {known}")
            served = [item for item in spec.workloads[name] if item.dtype in kernel.dtypes(kind)]
            if not served:
                raise UsageError(f"{kernel.folder}: nothing of {name!r} was frozen for {kind!r}")
            found += served
    return list(dict.fromkeys(found))


def _tuned(kernel: FrozenFiles, device: DeviceInfo) -> list[Workload]:
    """Return what the kernel was tuned for here, or else on another device of the kind."""
    if found := kernel.workloads(device.arch, device.kind):
        return found
    raise UsageError(
        f"{kernel.folder}: no workload was tuned for {device.kind!r}: give one with --workload"
    )
