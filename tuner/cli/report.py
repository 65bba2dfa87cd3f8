"""`tune report`: a page that shows what was tried and what won."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.catalog import Catalog
from tuner.cli.probe import cards_folder
from tuner.evidence.card import cards_in
from tuner.package.files import replace, require_file
from tuner.records import UsageError

if TYPE_CHECKING:
    from tuner.report.ceilings import Probed

_NEEDS = ("altair", "vl_convert", "pygments")


def write_report(
    source: Path,
    output: Path,
    *,
    against: Path | None,
    catalog: Catalog,
    environment: Mapping[str, str],
) -> None:
    """Write the page of a store or package, beside another if one is given.

    Raises:
        UsageError: What draws the charts is not installed, or there is nothing to report.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"tune report needs {', '.join(missing)}: install it with pip install 'tuner[report]'"
        )
    require_file("--output", output)
    from tuner.report.chapters import read_chapters
    from tuner.report.page import Against, page_of

    other = None
    if against is not None:
        other = Against(str(against), read_chapters(against, catalog, environment))
    chapters = read_chapters(source, catalog, environment)
    probed = probed_ceilings(cards_folder(source, environment))
    page = page_of(str(source), chapters, catalog.template_folders[-1], other, probed=probed)
    replace(output, page)
    click.echo(f"{output}: {len(chapters)} workloads, {len(page.encode()) / 1e6:.2f} MB")


def probed_ceilings(folder: Path) -> Probed:
    """Return the ceilings that a folder's cards tell, the latest card's first."""
    from tuner.report.ceilings import Ceilings

    cards = cards_in(folder)[::-1]

    def ceilings(arch: str, dtype: str, names: set[str]) -> Ceilings | None:
        for card in cards:
            device = card.device
            if device.arch != arch or (names and device.name not in names):
                continue
            found = card.ceilings(dtype)
            if found.gflops and found.gbytes:
                origin = f"measured by `tune probe` on {device.name}, {card.date[:10]}"
                return Ceilings(found.gflops * 1e9, found.gbytes * 1e9, origin)
        return None

    return ceilings
