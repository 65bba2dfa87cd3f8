"""The charts: Altair's specifications, whose colours are the page's own variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

Row = Mapping[str, Any]

WINNER, DEFAULT, RIVAL = "var(--winner)", "var(--default)", "var(--rival)"
TEXT, QUIET, LINE = "var(--text)", "var(--quiet)", "var(--line)"

_FONT = "system-ui, sans-serif"
_ROLES = {"winner": WINNER, "default": DEFAULT, "rival": RIVAL}
_STAGES = {
    "compile": "var(--stage-1)",
    "runtime": "var(--stage-2)",
    "correctness": "var(--stage-3)",
    "timeout": "var(--stage-4)",
    "constraints": "var(--stage-5)",
}


def config() -> dict[str, Any]:
    """Return what all charts share; the page passes it to each."""
    axis = alt.AxisConfig(
        labelColor=QUIET,
        titleColor=QUIET,
        labelFontSize=12,
        titleFontSize=12,
        titleFontWeight="normal",
        gridColor=LINE,
        domainColor=LINE,
        tickColor=LINE,
        labelOverlap=True,
        labelLimit=200,
    )
    legend = alt.LegendConfig(
        labelColor=QUIET, labelFontSize=12, symbolSize=70, symbolStrokeWidth=3
    )
    shared = alt.Config(
        background="transparent",
        font=_FONT,
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        axis=axis,
        legend=legend,
        view=alt.ViewConfig(stroke=None),
        text=alt.MarkConfig(color=TEXT, fontSize=12),
        aria=False,
    )
    return dict(shared.to_dict())


def chart_of(rows: Sequence[Row]) -> alt.Chart:
    """Return an empty chart of rows that travel with it."""
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def logarithmic(values: Sequence[float], title: str, spelled: str = "") -> dict[str, Any]:
    """Return title, scale and axis of a logarithmic y: few ticks, and room above and below.

    Args:
        values: What is drawn, above zero.
        title: Of the axis.
        spelled: D3 format of the ticks.
    """
    low, high = min(values) / 1.15, max(values) * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps: tuple[float, ...] = (1, 2, 5) if high / low < 200 else (1,)
    if high / low < 8:
        steps = (1, 1.5, 2, 3, 4, 5, 6, 8)
    if high / low < 2:
        steps = tuple(tenth / 10 for tenth in range(10, 100))
    ticks = [at for at in (step * 10.0**e for e in decades for step in steps) if low <= at <= high]
    scale = alt.Scale(type="log", domain=[low, high], nice=False)
    return {"title": title, "scale": scale, "axis": alt.Axis(values=ticks, format=spelled or "~g")}


def finished(height: int, *layers: alt.Chart) -> dict[str, Any]:
    """Return layers as one chart's JSON, as wide as its place on the page."""
    return dict(
        alt.LayerChart(layer=layers).properties(width="container", height=height).to_dict()
    )


def race(rows: Sequence[Row], unit: str) -> dict[str, Any]:
    """Draw the times of a final.

    Args:
        rows: ``contender``, ``role``, ``time``, ``low`` and ``high``, ``median`` and
            ``interval`` in words, from top to bottom.
        unit: Of the times.
    """
    base = chart_of(rows).encode(y=_names("role"), color=colour_of("role", _ROLES, legend=False))
    most = 1.3 * max(row["high"] for row in rows)
    axis = alt.Axis(tickCount=4)
    x = alt.X("low:Q", title=unit, scale=alt.Scale(domain=[0, most], nice=False), axis=axis)
    bar = base.mark_bar(height=10, opacity=0.25, cornerRadius=2).encode(x="time:Q")
    span = base.mark_rule(strokeWidth=3).encode(x=x, x2="high:Q")
    dot = base.mark_point(filled=True, size=90, opacity=1).encode(
        x="time:Q", tooltip=tips("contender", "interval")
    )
    label = (
        chart_of(rows)
        .mark_text(align="left", dx=10)
        .encode(y=_names("role"), x="high:Q", text="median:N")
    )
    return finished(40 * len(rows), bar, span, dot, label)


def gains(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw every workload's ratios to default and rival, its name above them.

    Args:
        rows: ``name``, ``against``, ``value``, ``low``, ``high`` and ``ratio`` in words.
    """
    names = list(dict.fromkeys(row["name"] for row in rows))
    y = alt.Y("name:N", sort=names, axis=None)
    shift = alt.YOffset("against:N", sort=["default", "rival"], scale=alt.Scale(range=[30, 42]))
    colour = colour_of("against", {"default": DEFAULT, "rival": RIVAL})
    ends = [min(1.0, *(row["low"] for row in rows)), max(1.0, *(row["high"] for row in rows))]
    scaled = logarithmic(ends, "times as fast")
    base = chart_of(rows).encode(y=y, yOffset=shift, color=colour)
    span = base.mark_rule(strokeWidth=2.5).encode(x=alt.X("low:Q", **scaled), x2="high:Q")
    dot = base.mark_point(filled=True, size=70, opacity=1).encode(
        x="value:Q", tooltip=tips("name", "against", "ratio")
    )
    even = chart_of([{"one": 1}]).mark_rule(color=QUIET, strokeDash=[3, 3]).encode(x="one:Q")
    name = chart_of([{"name": name} for name in names]).encode(y=y, x=alt.value(0), text="name:N")
    place: dict[str, Any] = {"align": "left", "baseline": "middle", "dy": -9}
    halo = name.mark_text(stroke="var(--page)", strokeWidth=5, strokeJoin="round", **place)
    return finished(54 * len(names), even, span, dot, halo, name.mark_text(**place))


def best_so_far(
    rows: Sequence[Row], lines: Sequence[Row], *, unit: str, x: str, title: str
) -> dict[str, Any]:
    """Draw the times of trials and the least so far.

    Args:
        rows: ``count``, ``elapsed``, ``time``, ``best``, ``trial``, ``took`` in words, and
            ``source``: ``"here"`` or ``"against"``.
        lines: ``label`` and ``time`` of what to compare with.
        unit: Of the times.
        x: ``"count"`` or ``"elapsed"``.
        title: What x is.
    """
    sources = list(dict.fromkeys(row["source"] for row in rows))
    colours = dict(zip(sources, (WINNER, RIVAL), strict=False))
    axis = alt.Axis(grid=False, tickCount=6, tickMinStep=1)
    base = chart_of(rows).encode(
        x=alt.X(f"{x}:Q", title=title, axis=axis),
        color=colour_of("source", colours, legend=len(sources) > 1),
    )
    y = alt.Y("time:Q", **logarithmic([row["time"] for row in (*rows, *lines)], unit))
    dots = base.mark_point(filled=True, size=28, opacity=0.4).encode(
        y=y, tooltip=tips("trial", "took")
    )
    best = base.mark_line(interpolate="step-after", strokeWidth=2.5).encode(
        y=alt.Y("best:Q", title=unit)
    )
    rule = chart_of(lines).encode(y=alt.Y("time:Q", title=unit))
    level = rule.mark_rule(color=QUIET, strokeDash=[4, 4])
    label = rule.mark_text(align="right", dy=-7, color=QUIET, fontSize=11).encode(
        x=alt.value("width"), text="label:N"
    )
    return finished(240, *([level, label] if lines else []), dots, best)


def shares(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw the importances of parameters: ``name``, ``share`` and ``importance`` in words."""
    axis = alt.Axis(format="%", tickCount=5)
    bar = (
        chart_of(rows)
        .mark_bar(color=WINNER, height=14, cornerRadiusEnd=2)
        .encode(
            x=alt.X("share:Q", title="share of importance", axis=axis),
            y=_names("name"),
            tooltip=tips("name", "importance"),
        )
    )
    return finished(26 * len(rows), bar)


def rejections(rows: Sequence[Row]) -> dict[str, Any]:
    """Draw how many trials with a value were rejected.

    Args:
        rows: ``name`` of the value, ``stage``, ``share`` and ``rejected`` in words.
    """
    seen = {row["stage"] for row in rows}
    stages = {name: colour for name, colour in _STAGES.items() if name in seen}
    axis = alt.Axis(format="%", tickCount=5)
    title = "share of the trials with this value"
    bar = (
        chart_of(rows)
        .mark_bar(height=14)
        .encode(
            x=alt.X("share:Q", title=title, scale=alt.Scale(domain=[0, 1]), axis=axis),
            y=_names("name"),
            color=colour_of("stage", stages),
            tooltip=tips("name", "stage", "rejected"),
        )
    )
    return finished(26 * len({row["name"] for row in rows}), bar)


def _names(field: str) -> alt.Y:
    """Return a y of names in the order of the rows."""
    axis = alt.Axis(domain=False, ticks=False, grid=False, labelPadding=8)
    return alt.Y(f"{field}:N", sort=None, title=None, axis=axis)


def colour_of(name: str, colours: Mapping[str, str], *, legend: bool = True) -> alt.Color:
    """Return the encoding of a field by the colours of its values."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    shown = alt.Legend(orient="top", title=None) if legend else None
    return alt.Color(f"{name}:N", scale=scale, legend=shown)


def tips(*names: str) -> list[alt.Tooltip]:
    """Return what is shown of a mark: its fields as they are spelled."""
    return [alt.Tooltip(f"{name}:N", title=name) for name in names]
