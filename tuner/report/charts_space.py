"""Charts of the search space and of the device: parallel coordinates and the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from tuner.records import Candidate, Value, format_value
from tuner.report.ceilings import Ceilings
from tuner.report.charts import (
    DEFAULT,
    LINE,
    QUIET,
    RIVAL,
    TEXT,
    WINNER,
    Row,
    chart_of,
    colour_of,
    finished,
    logarithmic,
    tips,
)

_GROUPS = {
    "rejected": ("var(--stage-3)", 1.0),
    "slower": ("var(--far)", 1.0),
    "fastest tenth": ("var(--near)", 1.8),
    "winner": (WINNER, 3.5),
}
"""Colour and width of the lines, from the lowest to the topmost."""

_ROLES = {"candidate": "var(--far)", "default": DEFAULT, "rival": RIVAL, "winner": WINNER}
_ON_TOP: dict[str, Any] = {
    **{"orient": "top", "labelAngle": 0, "labelPadding": 14, "labelLimit": 0},
    **{"domain": False, "ticks": False, "labelOverlap": False},
}
_BESIDE: dict[str, Any] = {"align": "left", "dx": 6, "fontSize": 11}
_LEAST_AXIS_PX = 64
_TRIAL, _GROUP, _OUTCOME, _WIDTH = "the trial", "its group", "its outcome", "its width"
"""Fields beside the parameters: with a blank, since no parameter's name has one."""


def parallel(entries: Sequence[tuple[int, Candidate, str, str]]) -> tuple[dict[str, Any], int]:
    """Draw candidates of one template across its parameters; return the least width, too.

    Args:
        entries: The number of a trial, its candidate, its group (``winner``, ``fastest tenth``,
            ``slower`` or ``rejected``) and its outcome in words.
    """
    chosen = [dict(candidate.parameters) for _, candidate, _, _ in entries]
    values = {name: _ordered(item[name] for item in chosen) for name in chosen[0]}
    names = [name for name in values if len(values[name]) > 1] or list(values)
    rows = [
        {
            _TRIAL: number,
            _GROUP: group,
            _OUTCOME: outcome,
            _WIDTH: _GROUPS[group][1],
            **{name: _place(values[name], parameters[name]) for name in names},
        }
        for (number, _, group, outcome), parameters in zip(entries, chosen, strict=True)
    ]
    ticks = [
        {"parameter": name, "place": _place(values[name], value), "label": format_value(value)}
        for name in names
        for value in values[name]
    ]
    longest = max(len(str(text)) for text in (*names, *(tick["label"] for tick in ticks)))
    axis_px = max(_LEAST_AXIS_PX, 14 + 6 * longest)
    scale = alt.Scale(padding=0.5)
    x = alt.X("parameter:N", sort=names, title=None, scale=scale, axis=alt.Axis(**_ON_TOP))
    y = alt.Y("place:Q", axis=None, scale=alt.Scale(domain=[0, 1], padding=8))
    axes = chart_of(ticks).encode(x=x, y=y)
    rules = axes.mark_line(color=LINE, strokeWidth=1.5).encode(detail="parameter:N")
    label = axes.encode(text="label:N")
    halo = label.mark_text(stroke="var(--page)", strokeWidth=4, strokeJoin="round", **_BESIDE)
    lines = _lines(rows, names).encode(x=x, y=y)
    layers = (rules, lines, halo, label.mark_text(color=TEXT, **_BESIDE))
    return finished(300, *layers), axis_px * len(names)


def _lines(rows: Sequence[Row], names: Sequence[str]) -> alt.Chart:
    """Return a line for each trial, coloured by its group; the one under the pointer is thick."""
    hover = alt.selection_point(on="pointerover", clear="pointerout", fields=[_TRIAL], empty=False)
    groups = {row[_GROUP] for row in rows}
    colours = {name: colour for name, (colour, _) in _GROUPS.items() if name in groups}
    width = alt.StrokeWidth(f"{_WIDTH}:Q", scale=None, legend=None)
    chart = chart_of(rows).transform_fold(list(names), as_=["parameter", "place"])
    lines = chart.mark_line(opacity=0.85, interpolate="monotone").encode(
        detail=f"{_TRIAL}:N",
        color=colour_of(_GROUP, colours),
        strokeWidth=alt.condition(hover, alt.value(5), width),
        tooltip=tips(_TRIAL, _OUTCOME),
    )
    found: alt.Chart = lines.add_params(hover)
    return found


def roofline(rows: Sequence[Row], ceilings: Ceilings) -> dict[str, Any]:
    """Draw rates under the two ceilings.

    Args:
        rows: ``intensity`` in operations per byte, ``reached`` in operations per second and
            ``rate`` in words, ``name``, and ``role``: ``candidate``, ``winner``, ``default`` or
            ``rival``.
        ceilings: Of the device.
    """
    ridge = ceilings.flops_per_s / ceilings.bytes_per_s
    span = [ridge, *(row["intensity"] for row in rows)]
    ends = [min(span) / 2, max(span) * 2]
    bends = (ends[0] / 1.1, ridge, ends[1] * 1.1)
    roof = [{"intensity": at, "reached": ceilings.at(at)} for at in bends]
    rates = [row["reached"] for row in (*rows, *roof)]
    x = alt.X("intensity:Q", **logarithmic(ends, "operations per byte"))
    y = alt.Y("reached:Q", **logarithmic(rates, "operations per second", "~s"))
    line = chart_of(roof).mark_line(color=QUIET, strokeWidth=2).encode(x=x, y=y)
    roles = {row["role"] for row in rows}
    shown = {role: colour for role, colour in _ROLES.items() if role in roles}
    dots = (
        chart_of(rows)
        .mark_point(filled=True, opacity=0.9)
        .encode(
            x=x,
            y=y,
            color=colour_of("role", shown),
            size=alt.condition("datum.role === 'candidate'", alt.value(30), alt.value(110)),
            tooltip=tips("name", "role", "rate"),
        )
    )
    return finished(280, line, dots)


def _ordered(values: Any) -> list[Value]:
    distinct = {(type(value).__name__, value) for value in values}
    return [value for _, value in sorted(distinct, key=lambda pair: (pair[0] == "str", pair[1]))]


def _place(values: Sequence[Value], value: Value) -> float:
    """Return where a value is on its axis: evenly spread between 0 and 1."""
    return values.index(value) / (len(values) - 1) if len(values) > 1 else 0.5
