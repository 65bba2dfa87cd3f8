"""A chapter's figures, from its race to where its candidates were rejected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.records import Measurement, Winner, format_value
from tuner.report import charts
from tuner.report.ceilings import Ceilings
from tuner.report.chapters import Chapter, contenders
from tuner.report.figure import (
    Cell,
    Figure,
    Table,
    candidate_cell,
    measured_text,
    ratio_cell,
    thinned,
    time_cell,
    time_text,
    time_unit,
)
from tuner.report.figures_space import candidate_figures, roofline_figure
from tuner.report.insight import (
    Region,
    Step,
    region_label,
    rejected_regions,
)

_MOST_REGIONS = 12
_MOST_REGION_ROWS = 40
_MOST_IMPORTANCES = 10


def chapter_figures(
    key: str, chapter: Chapter, *, ceilings: Ceilings | None, other: Chapter | None, most: int
) -> Iterator[Figure]:
    """Yield the figures that a chapter has the data for.

    Args:
        key: What the figures' ids begin with.
        chapter: The workload.
        ceilings: Of its device for its dtype, where they are known.
        other: The same workload in what the report is put against.
        most: Rows that a table of trials may have.
    """
    if chapter.winner is not None:
        yield _race(key, chapter.winner)
    if chapter.cost is not None and ceilings is not None:
        yield roofline_figure(key, chapter, ceilings, most)
    if len(chapter.timed) > 1:
        yield from _progress(key, chapter, other, most)
    if chapter.importances:
        yield _importances(key, chapter.importances)
    if chapter.rejected:
        yield _rejections(key, rejected_regions(chapter.trials), chapter)
    if len(chapter.timed) > 1:
        yield from candidate_figures(key, chapter, most)


def _race(key: str, winner: Winner) -> Figure:
    entries = contenders(winner)
    unit, factor = time_unit(measured.median_ms for _, _, measured in entries)
    rows = [
        {
            "contender": name,
            "role": role,
            "time": measured.median_ms * factor,
            "low": measured.low_ms * factor,
            "high": measured.high_ms * factor,
            "median": time_text(measured.median_ms),
            "interval": measured_text(measured),
        }
        for role, name, measured in entries
    ]
    ratios = {"winner": None, "default": winner.gain, "rival": winner.rival_ratio}
    table = Table(
        ("contender", "what", "median", "low", "high", "its time over the winner's"),
        [
            (
                Cell(role),
                Cell(name, code=True),
                *map(time_cell, (measured.median_ms, measured.low_ms, measured.high_ms)),
                ratio_cell(ratios[role]),
            )
            for role, name, measured in entries
        ],
    )
    note = "Medians with 95 % intervals, measured in turns; shorter is faster."
    return Figure(f"{key}-race", "The final", note, table, charts.race(rows, unit))


def _progress(key: str, chapter: Chapter, other: Chapter | None, most: int) -> Iterator[Figure]:
    unit, factor = time_unit([chapter.timed[0][1].median_ms])
    rows = _progress_rows("here", _shown(chapter.steps, 2 * most), factor)
    if other is not None and other.timed:
        rows += _progress_rows("against", _shown(other.steps, 2 * most), factor)
    lines = []
    if chapter.winner is not None:
        for role, _, measured in contenders(chapter.winner)[1:]:
            lines.append({"label": role, "time": measured.median_ms * factor})
    note = "A dot is a measured candidate, the line the least so far."
    note += " Dashed: times of the final." if lines else ""
    for x, title, axis in (
        ("count", "Best so far, over trials", "trials"),
        ("elapsed", "Best so far, over time", "seconds of work"),
    ):
        spec = charts.best_so_far(rows, lines, unit=unit, x=x, title=axis)
        yield Figure(f"{key}-{x}", title, note, _progress_table(chapter.steps), spec)


def _shown(steps: Sequence[Step], most: int) -> list[Step]:
    """Return the steps that improved, and about so many of all."""
    better = {
        step.count
        for before, step in zip((None, *steps), steps, strict=False)
        if before is None or step.best_ms != before.best_ms
    }
    kept = better | {step.count for step in thinned(steps, most)}
    return [step for step in steps if step.count in kept]


def _progress_rows(source: str, steps: Sequence[Step], factor: float) -> list[charts.Row]:
    return [
        {
            "trial": step.trial.number,
            "count": step.count,
            "elapsed": round(step.elapsed_s, 2),
            "time": outcome.median_ms * factor,
            "took": time_text(outcome.median_ms),
            "best": (step.best_ms or 0.0) * factor,
            "source": source,
        }
        for step in steps
        if isinstance(outcome := step.trial.outcome, Measurement)
    ]


def _progress_table(steps: Sequence[Step]) -> Table:
    rows, last_ms = [], None
    for step in steps:
        if step.best_ms is None or step.best_ms == last_ms:
            continue
        last_ms = step.best_ms
        rows.append(
            (
                Cell(str(step.count), step.count),
                Cell(f"{step.elapsed_s:.1f} s", step.elapsed_s),
                time_cell(last_ms),
                candidate_cell(step.trial.candidate),
            )
        )
    headings = ("trials", "after", "best so far", "candidate")
    return Table(headings, rows, "only the trials that were faster than all before")


def _importances(key: str, shares: dict[str, float]) -> Figure:
    templates = {name.partition(".")[0] for name in shares if "." in name}
    items = [
        (name.rpartition(".")[2] if len(templates) == 1 else name, share)
        for name, share in shares.items()
    ]
    rows = [
        {"name": name, "share": share, "importance": f"{share:.0%}"}
        for name, share in items[:_MOST_IMPORTANCES]
    ]
    table = Table(
        ("parameter", "importance"),
        [(Cell(name, code=True), Cell(f"{share:.1%}", share)) for name, share in items],
    )
    note = "How much each parameter decides whether a candidate is among the fastest (PED-ANOVA)."
    return Figure(f"{key}-importances", "What matters", note, table, charts.shares(rows))


def _rejections(key: str, regions: Sequence[Region], chapter: Chapter) -> Figure:
    rows = [
        {
            "name": region_label(region),
            "stage": stage,
            "share": count / region.trials,
            "rejected": f"{count} of {region.trials} trials",
        }
        for region in regions[:_MOST_REGIONS]
        for stage, count in region.stages
    ]
    cells = [
        (
            Cell(region.parameter, code=True),
            Cell(format_value(region.value), code=True),
            Cell(str(region.trials), region.trials),
            Cell(f"{region.rejected / region.trials:.0%}", region.rejected / region.trials),
            Cell(", ".join(f"{count} {stage}" for stage, count in region.stages)),
            Cell(region.reason[:200]),
        )
        for region in regions[:_MOST_REGION_ROWS]
    ]
    headings = ("parameter", "value", "trials", "rejected", "stages", "most frequent reason")
    note = (
        f"{len(chapter.rejected)} of {len(chapter.trials)} trials, by stage; on top the values of "
        "parameters that were rejected most surely."
    )
    spec = charts.rejections(rows) if rows else None
    return Figure(f"{key}-rejections", "What was rejected", note, Table(headings, cells), spec)
