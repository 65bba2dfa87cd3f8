"""`tune probe`: what a device was found to do, as a table; and where cards are kept."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from tuner.cli.devices import resolve_device, workers_for
from tuner.cli.display import make_console
from tuner.evidence.card import DeviceCard, Finding, card_of, card_path

announce = partial(click.echo, err=True)
"""Tells the user what takes a while."""


def probe_device(
    device: str, store: Path, environment: Mapping[str, str], *, fresh: bool, as_json: bool
) -> None:
    """Print a device's card, made now if there is none."""
    name = resolve_device(device, environment)
    folder = cards_folder(store, environment)
    with workers_for(name, store, environment, jobs=1) as workers:
        card = card_of(workers, folder, fresh=fresh, announce=announce)
        path = card_path(folder, workers.info())
    if as_json:
        click.echo(card.model_dump_json(indent=2))
    else:
        make_console().print(card_table(card))
    click.echo(f"kept in {path}", err=as_json)


def cards_folder(store: Path, environment: Mapping[str, str]) -> Path:
    """Return where cards are kept: the user's cache, or the store where there is none."""
    root = environment.get("XDG_CACHE_HOME") or (
        str(Path(environment["HOME"]) / ".cache") if environment.get("HOME") else ""
    )
    folder = Path(root) / "tuner" / "cards"
    try:
        if root:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return folder
    except OSError:  # a container's home may be missing or read-only
        pass
    return store / "cards"


def card_table(card: DeviceCard) -> Table:
    """Return a card as a table, a line for each finding."""
    versions = ", ".join(f"{name} {text}" for name, text in card.device.versions.items())
    table = Table(
        title=f"{card.device.name} ({card.device.arch}), {card.date}",
        caption=f"{versions}; found in {card.seconds:g} s",
    )
    table.add_column("finding")
    table.add_column("value", justify="right")
    table.add_column("note", overflow="fold")
    for name, finding in card.findings.items():
        table.add_row(name, _spell(finding), escape(finding.note))
    return table


def _spell(finding: Finding) -> str:
    if finding.value is None:
        return "-"
    if isinstance(finding.value, bool):
        return "works" if finding.value else "fails"
    return f"{finding.value:.4g} {finding.unit}"
