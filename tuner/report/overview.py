"""The beginning of a report: what all its workloads gained, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tuner.records import Interval, Winner
from tuner.report import charts, charts_space
from tuner.report.ceilings import Ceilings, rate
from tuner.report.chapters import Chapter
from tuner.report.figure import (
    Cell,
    Figure,
    Table,
    amount_text,
    ratio_cell,
    ratio_text,
    thinned,
    time_cell,
)


def summary_table(keys: Mapping[str, Chapter]) -> Table:
    """Return a row for each chapter, with a link to it.

    Args:
        keys: The chapters by their ids on the page.
    """
    several = len({chapter.arch for chapter in keys.values()}) > 1
    headings: tuple[str, ...] = ("workload", "winner", "against default", "against rival")
    headings += ("default", "rival")
    searched = any(chapter.trials for chapter in keys.values())
    headings += ("architecture",) if several else ()
    headings += ("trials", "rejected") if searched else ()
    rows = []
    for key, chapter in keys.items():
        winner, best_ms = chapter.winner, chapter.best_ms
        rival = winner.rival_measurement if winner else None
        rows.append(
            (
                Cell(chapter.title, href=f"#{key}"),
                time_cell(best_ms) if best_ms else Cell("–"),
                _gain_cell(winner),
                ratio_cell(winner.rival_ratio if winner else None),
                time_cell(winner.default_measurement.median_ms) if winner else Cell("–"),
                time_cell(rival.median_ms) if rival else Cell("–"),
                *((Cell(chapter.arch),) if several else ()),
                *(
                    Cell(str(count), count)
                    for count in (len(chapter.trials), len(chapter.rejected))
                    if searched
                ),
            )
        )
    return Table(headings, rows)


def _gain_cell(winner: Winner | None) -> Cell:
    if winner is not None and not winner.searched:
        return Cell("not searched")
    return ratio_cell(winner.gain if winner else None)


def gains_figure(chapters: Sequence[Chapter], table: Table) -> Figure | None:
    """Return every winner's ratio to default and rival; None where nothing has won."""
    rows = []
    for chapter in chapters:
        winner = chapter.winner
        if winner is None:
            continue
        name = _label(chapter, chapters)
        ratios = {"default": winner.gain, "rival": winner.rival_ratio}
        rows += [
            {
                "name": name,
                "against": against,
                "value": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "ratio": ratio_text(ratio),
            }
            for against, ratio in ratios.items()
            if ratio is not None
        ]
    if not rows:
        return None
    note = "How many times as fast the winner is, with 95 % intervals; right of 1 it is faster."
    return Figure("gains", "What was gained", note, table, charts.gains(rows))


def roofline_figures(
    chapters: Sequence[Chapter], ceilings: Mapping[tuple[str, str], Ceilings | None], most: int
) -> Iterator[Figure]:
    """Yield a roofline of all workloads for each architecture and dtype of several.

    Args:
        chapters: All.
        ceilings: By architecture and dtype.
        most: Candidates that are shown of a workload.
    """
    for place, ((arch, dtype), roof) in enumerate(ceilings.items()):
        group = [
            chapter
            for chapter in chapters
            if (chapter.arch, chapter.workload.dtype) == (arch, dtype) and chapter.cost
        ]
        if roof is not None and len(group) > 1:
            title = "The roofline" if len(ceilings) == 1 else f"The roofline: {arch}, {dtype}"
            yield _roofline(f"roofline-{place}", title, group, (roof, most))


def _roofline(
    key: str, title: str, chapters: Sequence[Chapter], limits: tuple[Ceilings, int]
) -> Figure:
    rows, cells = [], []
    roof, most = limits
    for chapter in chapters:
        cost = chapter.cost
        assert cost is not None
        timed = thinned(chapter.timed, most)
        times = [("candidate", measured.median_ms) for _, measured in timed]
        if chapter.winner is not None and chapter.winner.rival_measurement is not None:
            times.append(("rival", chapter.winner.rival_measurement.median_ms))
        if (best_ms := chapter.best_ms) is not None:
            times.append(("winner", best_ms))
        intensity = cost.flops / cost.bytes
        for role, time_ms in times:
            reached = rate(cost, time_ms)
            row = {"role": role, "name": chapter.title, "rate": amount_text(reached, "FLOP/s")}
            rows.append({**row, "intensity": intensity, "reached": reached})
        share = reached / roof.at(intensity)
        cells.append(
            (
                Cell(chapter.title),
                Cell(f"{intensity:.3g}", intensity),
                Cell(amount_text(reached, "FLOP/s"), reached),
                Cell(amount_text(roof.at(intensity), "FLOP/s"), roof.at(intensity)),
                Cell(f"{share:.0%}", share),
            )
        )
    order = ("candidate", "rival", "winner")
    rows.sort(key=lambda row: order.index(row["role"]))
    headings = ("workload", "operations per byte", "winner's rate", "ceiling", "share")
    note = (
        f"Every measured candidate under {amount_text(roof.flops_per_s, 'FLOP/s')} and "
        f"{amount_text(roof.bytes_per_s, 'B/s')}, {roof.origin}."
    )
    return Figure(key, title, note, Table(headings, cells), charts_space.roofline(rows, roof))


def comparison_table(keys: Mapping[str, Chapter], others: Mapping[str, Chapter]) -> Table:
    """Return the times of two stores or packages side by side.

    Args:
        keys: The report's chapters by their ids.
        others: The chapters that it is put against, by the ids of those of the same workload.
    """
    rows = []
    for key, other in others.items():
        chapter = keys[key]
        if chapter.best_ms is None or other.best_ms is None:
            continue
        ratio = other.best_ms / chapter.best_ms
        rows.append(
            (
                Cell(chapter.title, href=f"#{key}"),
                Cell(chapter.arch),
                Cell(other.arch),
                time_cell(chapter.best_ms),
                time_cell(other.best_ms),
                Cell(f"{ratio:.2f}×", ratio),
            )
        )
    headings = ("workload", "architecture here", "there", "time here", "there", "there over here")
    return Table(headings, rows, f"{len(rows)} workloads are in both")


def mean_text(ratios: Iterable[Interval | None]) -> str | None:
    """Return the geometric mean of the known ratios, such as ``1.52×``; None if none is known."""
    logs = [math.log(ratio.value) for ratio in ratios if ratio is not None]
    return f"{math.exp(sum(logs) / len(logs)):.2f}×" if logs else None


def _label(chapter: Chapter, chapters: Sequence[Chapter]) -> str:
    """Return what of a chapter's name is its own, with its architecture if there are several."""
    several = len({item.arch for item in chapters}) > 1
    words = [item.title.split() for item in chapters]
    common = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set()
    title = " ".join(word for word in chapter.title.split() if word not in common)
    title = title or chapter.title
    return f"{title} on {chapter.arch}" if several else title
