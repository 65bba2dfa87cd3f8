"""Options that several commands share, and the environment that they run in."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click

from tuner.budget import Budget
from tuner.package.files import require_folder
from tuner.records import UsageError


class FiniteRange(click.FloatRange):
    """A range of numbers that refuses NaN, which no comparison does, and infinity."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class Seconds(click.ParamType):  # type: ignore[type-arg] # not generic before click 8.4
    """A time to spend, spelled as `Budget` has it; at most an hour."""

    name = "seconds"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Return the number of seconds."""
        try:
            seconds = Budget.parse(str(value)).seconds
        except UsageError:
            seconds = None
        if seconds is None or seconds > _MOST_S:
            self.fail(f"{value!r}: write at most an hour, such as 90, 90s or 5m.", param, ctx)
        return seconds


_MOST_S = 3600.0

SEED = click.IntRange(0, 2**32 - 1)
TIMEOUT = FiniteRange(min=0.0, min_open=True)
BUDGET = Seconds()

DEFAULT_STORE = ".tuner"
DEFAULT_OUTPUT = "kernels_generated"


def _existing(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    """Return a store to read; there need not be one where the user names none."""
    del ctx, param
    if value != Path(DEFAULT_STORE) and not any(value.glob("*/trials.jsonl")):
        what = "there are no trials in it" if value.is_dir() else "there is no such folder"
        raise UsageError(f"--store {value}: {what}; run `tune --store {value}` first")
    return value


def _writable(ctx: click.Context, param: click.Parameter, value: Path) -> Path:
    """Return a store that may be written to."""
    del ctx, param
    require_folder("--store", value)
    return value


class OutputFile(click.Path):
    """A file to write, refused where its name says that it is a folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the path."""
        if str(value).endswith("/"):
            self.fail(f"{value} is the name of a folder; a file is written.", param, ctx)
        return super().convert(value, param, ctx)


kernels_option = click.option(
    "--kernels",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A folder of your own with templates/, search_spaces/ and problems/.",
)
device_option = click.option(
    "--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, hip, ... or auto."
)
store_option = click.option(
    "--store",
    default=DEFAULT_STORE,
    show_default=True,
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Folder where trials are kept.",
)
existing_store_option = click.option(
    "--store",
    default=DEFAULT_STORE,
    show_default=True,
    type=click.Path(path_type=Path),
    callback=_existing,
    help="Folder where trials were kept.",
)
seed_from_option = click.option(
    "--seed-from",
    "seed_from",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Others' results to try first, a file or folder: of vLLM, SGLang, Triton, Helion, Kernel "
    "Tuner, or a package, store or export of ours.",
)
cluster_option = click.option(
    "--cluster", metavar="ADDRESS|auto", help="A Ray cluster, whose cards of --device all work."
)
max_variants_option = click.option(
    "--max-variants", type=click.IntRange(1), help="Of a kernel on an architecture, when frozen."
)
max_slowdown_option = click.option(
    "--max-slowdown",
    type=FiniteRange(1.0),
    help="Share variants where a workload takes at most this many times its winner's time.",
)
output_option = click.option(
    "--output",
    default=DEFAULT_OUTPUT,
    show_default=True,
    type=click.Path(path_type=Path),
    help="The package that is written; its folder's name is its import name.",
)
package_option = click.option(
    "--package",
    default=DEFAULT_OUTPUT,
    show_default=True,
    type=click.Path(path_type=Path),
    help="The frozen package.",
)


def process_environment() -> dict[str, str]:
    """Return the environment: no other module of the tuner reads it."""
    return dict(os.environ)
