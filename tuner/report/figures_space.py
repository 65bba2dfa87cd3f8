"""Figures of all candidates: across their parameters, and under the roofline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuner.records import Candidate, Measurement, Rejection, Trial
from tuner.report import charts_space
from tuner.report.ceilings import Ceilings, rate
from tuner.report.chapters import Chapter, contenders
from tuner.report.figure import Cell, Figure, Table, amount_text, thinned, time_cell, value_cell


def candidate_figures(key: str, chapter: Chapter, most: int) -> Iterator[Figure]:
    """Yield parallel coordinates for each template, the winner's first.

    Args:
        key: What the figures' ids begin with.
        chapter: The workload, with at least one time.
        most: Candidates that are shown of a template: the fastest.
    """
    best = chapter.winner.candidate if chapter.winner else chapter.timed[0][0].candidate
    fast = {item.number for item, _ in chapter.timed[: max(1, len(chapter.timed) // 10)]}
    groups: dict[str, list[Trial]] = {best.template: []}
    for trial in [item for item, _ in (*chapter.timed, *chapter.rejected)]:
        groups.setdefault(trial.candidate.template, []).append(trial)
    for place, (template, trials) in enumerate(groups.items()):
        shown = trials[:most]
        entries = [
            (item.number, item.candidate, _group(item, best, fast), _outcome(item).text)
            for item in reversed(shown)  # the fastest are drawn last, on top
        ]
        if not entries or not entries[0][1].parameters:
            continue
        spec, width = charts_space.parallel(entries)
        title = f"The candidates of {template}" if len(groups) > 1 else "The candidates"
        note = "A line is a candidate; where it crosses an axis is the value it takes there."
        table = _trials_table(shown, len(trials))
        yield Figure(f"{key}-candidates-{place}", title, note, table, spec, least_width=width)


def _group(trial: Trial, best: Candidate, fast: set[int]) -> str:
    if trial.candidate == best:
        return "winner"
    if trial.number in fast:
        return "fastest tenth"
    return "slower" if isinstance(trial.outcome, Measurement) else "rejected"


def _outcome(trial: Trial) -> Cell:
    if isinstance(trial.outcome, Rejection):
        return Cell(f"rejected: {trial.outcome.stage}")
    return time_cell(trial.outcome.median_ms)


def _trials_table(trials: Sequence[Trial], total: int) -> Table:
    names = [name for name, _ in trials[0].candidate.parameters]
    rows = [
        (
            Cell(str(trial.number), trial.number),
            _outcome(trial),
            *(value_cell(value) for _, value in trial.candidate.parameters),
        )
        for trial in trials
    ]
    note = f"{total} trials"
    if total > len(trials):
        note = f"the fastest {len(trials)} of {total}; tune export --format csv has all"
    return Table(("trial", "outcome", *names), rows, note)


def roofline_figure(key: str, chapter: Chapter, ceilings: Ceilings, most: int) -> Figure:
    """Return the rates of a workload's candidates under the ceilings of its device.

    Args:
        key: What the figure's id begins with.
        chapter: The workload; its cost is known.
        ceilings: Of the device.
        most: Rows of the table.
    """
    assert (cost := chapter.cost) is not None
    timed = [("candidate", f"trial {item.number}", out) for item, out in chapter.timed]
    found = thinned(timed, 2 * most)
    if chapter.winner is not None:
        raced = contenders(chapter.winner)
        found = [
            (role, name if role == "rival" else role, out) for role, name, out in raced
        ] + found
    intensity = cost.flops / cost.bytes
    roof = ceilings.at(intensity)
    rows, cells = [], []
    for role, name, measured in found:
        reached = rate(cost, measured.median_ms)
        moved = cost.bytes / measured.median_ms * 1e3
        row = {"role": role, "name": name, "intensity": intensity, "reached": reached}
        rows.append({**row, "rate": amount_text(reached, "FLOP/s")})
        cells.append(
            (
                Cell(name),
                time_cell(measured.median_ms),
                Cell(amount_text(reached, "FLOP/s"), reached),
                Cell(amount_text(moved, "B/s"), moved),
                Cell(f"{reached / roof:.0%}", reached / roof),
            )
        )
    headings = ("what", "time", "rate", "bandwidth", "of the ceiling")
    left_out = f"of {len(timed)} candidates, some" if len(timed) > most else ""
    rows.reverse()  # what raced is drawn on top
    spec = charts_space.roofline(rows, ceilings)
    table = Table(headings, cells[:most], left_out)
    return Figure(f"{key}-roofline", "Under the roofline", _bound(chapter, ceilings), table, spec)


def _bound(chapter: Chapter, ceilings: Ceilings) -> str:
    """Return what limits a workload, in words."""
    cost = chapter.cost
    assert cost is not None
    computes = cost.flops / ceilings.flops_per_s > cost.bytes / ceilings.bytes_per_s
    return (
        f"{amount_text(cost.flops, 'FLOP')} and {amount_text(cost.bytes, 'B')}: bound by "
        f"{'arithmetic' if computes else 'memory'}. Ceilings, {ceilings.origin}: "
        f"{amount_text(ceilings.flops_per_s, 'FLOP/s')} and "
        f"{amount_text(ceilings.bytes_per_s, 'B/s')}."
    )
