"""Chapters to one self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from tuner.records import Winner, Workload
from tuner.report import charts, code, overview
from tuner.report.ceilings import Ceilings, Probed, ceilings_of
from tuner.report.chapters import Chapter
from tuner.report.embedded import embedded, library
from tuner.report.figure import Cell, Figure, Table, candidate_cell, time_text, value_cell
from tuner.report.figures import chapter_figures

MOST_BYTES = 2_000_000
"""Size that a page keeps below: tables and charts of trials become shorter until it does."""

_MOST_ROWS = 200
_LEAST_ROWS = 10
_ALL_ROWS = 600


@dataclass(frozen=True, slots=True)
class Against:
    """What a report is put beside: its name and its chapters."""

    name: str
    chapters: Sequence[Chapter]


@dataclass(frozen=True, slots=True)
class Listing:
    """Highlighted code: its text, or the id of the listing on the page that has the same."""

    key: str
    text: Markup
    lines: int


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter as the template wants it."""

    key: str
    chapter: Chapter
    figures: Sequence[Figure]
    ties: Table | None
    source: Listing | None
    difference: Listing | None
    provenance: Sequence[tuple[str, str]]


def page_of(
    name: str,
    chapters: Sequence[Chapter],
    templates: Path,
    against: Against | None = None,
    *,
    probed: Probed = lambda *_: None,
) -> str:
    """Return the page.

    Args:
        name: Of the store or package, for the reader.
        chapters: At least one.
        templates: The folder that holds ``report/``.
        against: What it is put beside.
        probed: What cards say of the devices.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates / "report"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters["embedded"] = embedded
    environment.filters["time"] = time_text
    template = environment.get_template("page.html.j2")
    most = max(_LEAST_ROWS, min(_MOST_ROWS, _ALL_ROWS // len(chapters)))
    pairs = sorted({(item.arch, item.workload.dtype) for item in chapters})
    ceilings = {pair: ceilings_of(chapters, *pair, probed) for pair in pairs}
    while True:
        context = _context(name, chapters, most, against=against, ceilings=ceilings)
        page = template.render(context, library=library())
        if len(page.encode()) <= MOST_BYTES or most <= _LEAST_ROWS:
            return page
        most //= 2


def _context(
    name: str,
    chapters: Sequence[Chapter],
    most: int,
    *,
    against: Against | None,
    ceilings: Mapping[tuple[str, str], Ceilings | None],
) -> dict[str, Any]:
    keys = _keys(chapters)
    others = _others(keys, against.chapters if against else ())
    sections: list[Section] = []
    listings: dict[str, str] = {}
    for key, chapter in keys.items():
        figures = chapter_figures(
            key,
            chapter,
            ceilings=ceilings[chapter.arch, chapter.workload.dtype],
            other=others.get(key),
            most=most,
        )
        sections.append(_section(key, chapter, list(figures), listings))
    winners = [chapter.winner for chapter in chapters if chapter.winner is not None]
    summary = overview.summary_table(keys)
    gains = overview.gains_figure(chapters, summary)
    comparison = None
    if against is not None:
        comparison = overview.comparison_table(keys, others)
    return {
        "name": name,
        "against": against.name if against else None,
        "devices": sorted({winner.device.name for winner in winners}) or [chapters[0].arch],
        "kernels": sorted({chapter.workload.kernel for chapter in chapters}),
        "dates": sorted({winner.date for winner in winners}),
        "facts": _facts(chapters, winners),
        "summary": summary,
        "gains": gains,
        "rooflines": list(overview.roofline_figures(chapters, ceilings, most)),
        "comparison": comparison,
        "sections": sections,
        "config": charts.config(),
        "code_styles": Markup(code.styles()),
        "version": version("tuner"),
    }


def _facts(chapters: Sequence[Chapter], winners: Sequence[Winner]) -> list[tuple[str, str]]:
    """Return the few numbers that the page begins with."""
    facts = []
    mean = ", geometric mean" if len(winners) > 1 else ""
    for words, ratios in (
        ("as fast as the default" + mean, [winner.gain for winner in winners if winner.searched]),
        ("as fast as the rival" + mean, [winner.rival_ratio for winner in winners]),
    ):
        if (ratio := overview.mean_text(ratios)) is not None:
            facts.append((ratio, words))
    facts.append((str(len(chapters)), "workload" if len(chapters) == 1 else "workloads"))
    if trials := sum(len(chapter.trials) for chapter in chapters):
        rejected = sum(len(chapter.rejected) for chapter in chapters)
        facts.append((f"{trials:,}", f"trials, {rejected:,} rejected"))
    return facts


def _keys(chapters: Sequence[Chapter]) -> dict[str, Chapter]:
    """Return the chapters by ids that are fit for links."""
    keys: dict[str, Chapter] = {}
    for chapter in chapters:
        base = re.sub(r"[^a-z0-9]+", "-", f"{chapter.name} {chapter.arch}".lower()).strip("-")
        key = base if base not in keys else f"{base}-{len(keys)}"
        keys[key] = chapter
    return keys


def _others(keys: Mapping[str, Chapter], others: Sequence[Chapter]) -> dict[str, Chapter]:
    """Return what is put beside each chapter: the same workload, of its architecture if it can."""
    groups: dict[Workload, dict[str, Chapter]] = {}
    for other in others:
        groups.setdefault(other.workload, {})[other.arch] = other
    found = {}
    for key, chapter in keys.items():
        archs = groups.get(chapter.workload)
        if archs:
            found[key] = archs.get(chapter.arch) or next(iter(archs.values()))
    return found


def _section(
    key: str, chapter: Chapter, figures: Sequence[Figure], listings: dict[str, str]
) -> Section:
    winner = chapter.winner
    if winner is None:
        return Section(key, chapter, figures, None, None, None, ())
    source, default = winner.source, winner.default
    lines = source.text.count("\n")
    listing = _listing(f"{key}-source", code.source_html(source), lines, listings)
    difference = None
    if text := code.difference_html(default, source):
        difference = _listing(f"{key}-difference", text, lines, listings)
    ties, provenance = _ties(winner), _provenance(winner)
    return Section(key, chapter, figures, ties, listing, difference, provenance)


def _listing(key: str, html: str, lines: int, listings: dict[str, str]) -> Listing:
    """Return a listing; one that is on the page already is referred to."""
    first = listings.setdefault(html, key)
    return Listing(first, Markup(html) if first == key else Markup(), lines)


def _ties(winner: Winner) -> Table | None:
    """Return the winner and what the clock could not tell from it; None if that is nothing."""
    others = [candidate for candidate in winner.ties if candidate != winner.candidate]
    if not others:
        return None
    tied = [winner.candidate, *others]
    if len({candidate.template for candidate in tied}) > 1:
        rows = [(_role(item == winner.candidate), candidate_cell(item)) for item in tied]
        return Table(("", "candidate"), rows)
    values = [dict(candidate.parameters) for candidate in tied]
    names = [name for name in values[0] if len({str(item[name]) for item in values}) > 1]
    cells: list[tuple[Cell, ...]] = [
        (_role(candidate == winner.candidate), *(value_cell(item[name]) for name in names))
        for candidate, item in zip(tied, values, strict=True)
    ]
    return Table(("", *names), cells, "only parameters that differ are shown")


def _role(wins: bool) -> Cell:
    return Cell("winner" if wins else "tied")


def _provenance(winner: Winner) -> list[tuple[str, str]]:
    device = winner.device
    limits = ", ".join(f"{name} {value:,}" for name, value in device.limits)
    versions = ", ".join(f"{name} {value}" for name, value in device.versions)
    command = f"tune {winner.workload.kernel} --workload {winner.workload} "
    command += f"--device {device.kind} --seed {winner.seed}"
    return [
        ("Device", f"{device.name} ({device.kind}, {device.arch})"),
        ("Limits", limits),
        ("Versions", versions),
        ("Clock", f"{winner.protocol}; {winner.measurement.samples} samples"),
        ("Date", winner.date),
        ("Winner", str(winner.candidate)),
        ("Source", f"{winner.source.language}, sha256 {winner.source.sha256}"),
        ("Default", f"{winner.default_candidate}, sha256 {winner.default.sha256}"),
        ("Again", command),
    ]
