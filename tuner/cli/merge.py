"""`tune merge`: stores of several machines to one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tuner.merge import UNKNOWN, Maker, merge
from tuner.package.files import require_folder


def merge_stores(roots: Sequence[Path], output: Path) -> None:
    """Merge stores and say what went where, what was there twice and what disagrees."""
    require_folder("--output", output)
    for log in merge(roots, output):
        click.echo(
            f"{output / log.name}: {len(log.trials)} trials, {len(log.winners)} winners of "
            f"{_spell(log.maker)}"
        )
        if log.doubled:
            click.echo(f"  {log.doubled} trials were in several stores: kept once")
        if log.repeated:
            click.echo(f"  {log.repeated} trials repeat one with another outcome: the last counts")
        for name in dict.fromkeys(log.rivals):
            click.echo(f"  {name} has several winners: the latest counts, then the fastest")


def _spell(maker: Maker) -> str:
    name, versions = maker
    if maker == UNKNOWN:
        return "a device that the store does not name"
    return f"{name} ({', '.join(f'{tool} {version}' for tool, version in versions)})"
