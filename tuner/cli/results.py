"""Commands that look at what runs have found, or hand it on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tuner.catalog import Catalog
from tuner.cli.options import (
    DEFAULT_STORE,
    OutputFile,
    existing_store_option,
    kernels_option,
    max_slowdown_option,
    max_variants_option,
    output_option,
    process_environment,
)


@click.command()
@output_option
@existing_store_option
@click.option("--check", is_flag=True, help="Only say whether the package has drifted.")
@click.option("--aot", is_flag=True, help="Store binaries: first calls need no compiler.")
@max_variants_option
@max_slowdown_option
@kernels_option
def freeze(output: Path, store: Path, folders: Sequence[Path], **options: Any) -> None:
    """Write the package from the store's winners, or check the one that is there."""
    from tuner.cli.packaging import check_package, freeze_store, prebuild_package
    from tuner.cover import limits_of
    from tuner.package.files import require_folder

    if options["check"]:
        sys.exit(check_package(Catalog(folders), output))
    require_folder("--output", output)
    limits = limits_of(options["max_variants"], options["max_slowdown"])
    freeze_store(Catalog(folders), store, output, limits)
    if options["aot"]:
        sys.exit(prebuild_package(output, process_environment()))


@click.command()
@click.option("--format", "form", required=True, help="json, csv, vllm, t4 or optuna.")
@click.option("--output", required=True, help="File; folder for vllm, and for t4 unless *.json.")
@existing_store_option
def export(form: str, output: str, store: Path) -> None:
    """Write winners (json, vllm) or trials (csv, t4, optuna) in a format that others read."""
    from tuner.cli.packaging import export_store

    export_store(form, store, output)


@click.command()
@click.argument("source", default=DEFAULT_STORE, type=click.Path(path_type=Path))
@click.option("--output", default="report.html", show_default=True, type=OutputFile())
@click.option("--against", type=click.Path(path_type=Path), help="Another store or package.")
@kernels_option
def report(source: Path, output: Path, against: Path | None, folders: Sequence[Path]) -> None:
    """Write a page about a store or a package: what was tried, what won and why."""
    from tuner.cli.report import write_report

    write_report(
        source,
        output,
        against=against,
        catalog=Catalog(folders),
        environment=process_environment(),
    )


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output", default="captured.yaml", show_default=True, type=OutputFile())
@kernels_option
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def capture(output: Path, folders: Sequence[Path], program: Sequence[str]) -> None:
    """Run a Python program and write what it spends on operations that kernels of ours do.

    Write `--` before the program: `tune capture -- python train.py --epochs 1`.
    """
    from tuner.cli.capture import capture_program

    sys.exit(capture_program(program, output, folders=folders, environment=process_environment()))


@click.command()
@click.argument("store", default=DEFAULT_STORE, type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Show what is there and stop.")
def watch(store: Path, once: bool) -> None:
    """Follow a run that works on a store: a table in a terminal, else a line per trial."""
    from tuner.cli.watch import watch_store

    watch_store(store, once=once)


@click.command()
@click.argument("stores", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="A new folder.")
def merge(stores: Sequence[Path], output: Path) -> None:
    """Join stores of several machines; what cannot be compared is kept apart."""
    from tuner.cli.merge import merge_stores

    merge_stores(stores, output)


@click.command()
@click.argument("tables", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--sampler", "samplers", multiple=True, default=("tuner",), show_default=True)
@click.option(
    "--evals",
    default=100,
    type=click.IntRange(1),
    show_default=True,
    help="Evaluations per replay.",
)
@click.option(
    "--seeds", default=20, type=click.IntRange(1), show_default=True, help="Replays per table."
)
@click.option(
    "--batch", default=1, type=click.IntRange(1), show_default=True, help="Candidates in flight."
)
@click.option("--json", "as_json", is_flag=True)
def replay(tables: Sequence[Path], samplers: Sequence[str], as_json: bool, **counts: int) -> None:
    """Search recorded tables instead of a device, to compare samplers."""
    from tuner.cli.commands import replay_tables

    rows = replay_tables(tables, samplers, quiet=as_json, **counts)
    if as_json:
        click.echo(json.dumps(rows, indent=2))


COMMANDS = (capture, export, freeze, merge, replay, report, watch)
