"""Options that several commands share, and the environment that they run in."""

from __future__ import annotations

import os
from pathlib import Path

import click

DEFAULT_STORE = ".tuner"
DEFAULT_OUTPUT = "kernels_generated"

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
    help="Folder where trials are kept.",
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
