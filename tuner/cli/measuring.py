"""The commands that measure what is there, apart from tuning it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tuner.cli.options import (
    BUDGET,
    SEED,
    OutputFile,
    device_option,
    existing_store_option,
    kernels_option,
    package_option,
    process_environment,
    store_option,
)


@click.command()
@click.argument("kernel")
@device_option
@click.option("--workload", "workloads", multiple=True, help="Such as M=512,N=512,K=512.")
@click.option("--workloads", "sets", multiple=True, help="Name of a workload set.")
@click.option("--rival", is_flag=True, help="Time the library's operation beside it.")
@package_option
@click.option(
    "--output",
    required=True,
    type=OutputFile(),
    help="JSON file for `tune compare`.",
)
@click.option(
    "--budget",
    default=5.0,
    show_default=True,
    type=BUDGET,
    help="For each workload: 90, 90s or 5m.",
)
@click.option(
    "--seed", type=SEED, default=0, show_default=True, help="Of the order in which it is timed."
)
@store_option
@kernels_option
def bench(**options: Any) -> None:
    """Time what the frozen package runs; without workloads, what it was tuned for."""
    from tuner.cli.bench import BenchOptions, bench_kernel

    sys.exit(bench_kernel(BenchOptions(**options), process_environment()))


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def compare(files: tuple[Path, ...], as_json: bool) -> None:
    """Print files of `tune bench` side by side; the first is the reference."""
    from tuner.cli.bench import compare_files

    compare_files(files, as_json=as_json)


@click.command()
@device_option
@click.option("--fresh", is_flag=True, help="Make the card anew.")
@click.option("--json", "as_json", is_flag=True, help="Print the card as JSON.")
@store_option
def probe(device: str, fresh: bool, as_json: bool, store: Path) -> None:
    """Find out by trying what a device can do, and print its card."""
    from tuner.cli.probe import probe_device

    probe_device(device, store, process_environment(), fresh=fresh, as_json=as_json)


@click.command()
@click.argument("subject", required=False, metavar="[TRIAL | KERNEL]")
@click.option("--kernel", help="Only this kernel's trials.")
@click.option(
    "--workload", "workloads", multiple=True, help="Of a KERNEL; its starters if left out."
)
@click.option(
    "--budget",
    default=10.0,
    show_default=True,
    type=BUDGET,
    help="For each workload of a KERNEL: 90, 90s or 5m.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a KERNEL's stages as JSON.")
@device_option
@package_option
@existing_store_option
@kernels_option
def explain(subject: str | None, kernel: str | None, **options: Any) -> None:
    """Say why a TRIAL was rejected or slow, or where the time of a KERNEL goes.

    Without either, count outcomes by stage. A KERNEL's stages are timed by leaving them out or
    doing them twice, in its winner, or in its default where it was not tuned.
    """
    from tuner.cli.explain import explain_store
    from tuner.cli.stages import StagesOptions, explain_kernel

    if subject is None or subject.isdecimal():
        number = None if subject is None else int(subject)
        explain_store(options["store"], kernel=kernel, number=number)
    else:
        explain_kernel(StagesOptions(kernel=subject, **options), process_environment())


@click.command()
@click.argument("kernels", nargs=-1)
@device_option
@package_option
@click.option(
    "--budget",
    default=5.0,
    show_default=True,
    type=BUDGET,
    help="For each workload: 90, 90s or 5m.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the verdicts as JSON.")
@existing_store_option
@kernels_option
def recheck(**options: Any) -> None:
    """Time frozen winners again beside their stored runners-up; exit 1 if one has lost ground."""
    from tuner.cli.recheck import RecheckOptions, recheck_package

    sys.exit(recheck_package(RecheckOptions(**options), process_environment()))


COMMANDS = (bench, compare, probe, explain, recheck)
