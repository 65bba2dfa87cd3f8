"""What a page is made of: figures, each with the table of what it shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tuner.records import Candidate, Interval, Measurement, Value, format_value

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What is read.
        number: What it is sorted by where it stands for a number.
        href: Where it links to.
        code: Whether it is code.
    """

    text: str
    number: float | None = None
    href: str | None = None
    code: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table; `note` says what was left out."""

    headings: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart and its table.

    Attributes:
        key: Its id on the page.
        title: What it shows.
        note: How to read it, in a sentence.
        table: The same as a table.
        spec: The chart as Vega-Lite JSON; None where only the table is of use.
        least_width: Pixels below which the chart scrolls instead of shrinking.
    """

    key: str
    title: str
    note: str
    table: Table
    spec: dict[str, Any] | None = field(default=None)
    least_width: int = 0


def thinned(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most so many items, evenly taken, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def time_text(time_ms: float) -> str:
    """Return a time with three digits, such as ``31.8 µs``."""
    for unit, factor in (("s", 1e-3), ("ms", 1.0), ("µs", 1e3)):
        if time_ms * factor >= 1 or unit == "µs":
            return f"{_three(time_ms * factor)} {unit}"
    raise AssertionError("the last unit takes all")


def time_unit(times_ms: Iterable[float]) -> tuple[str, float]:
    """Return the unit that suits times in a chart, and what a time in ms is multiplied by."""
    least = min(times_ms)
    if least >= 1e3:
        return "s", 1e-3
    return ("ms", 1.0) if least >= 0.1 else ("µs", 1e3)


def amount_text(amount: float, unit: str) -> str:
    """Return an amount with three digits and a prefix, such as ``1.05 TB/s``."""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= factor:
            return f"{_three(amount / factor)} {prefix}{unit}"
    return f"{_three(amount)} {unit}"


def ratio_text(interval: Interval) -> str:
    """Return a ratio with its interval."""
    return f"{interval.value:.2f}× [{interval.low:.2f}, {interval.high:.2f}]"


def measured_text(measurement: Measurement) -> str:
    """Return a median with its interval."""
    return (
        f"{time_text(measurement.median_ms)} "
        f"[{_three(measurement.low_ms)}, {_three(measurement.high_ms)} ms]"
    )


def time_cell(time_ms: float) -> Cell:
    """Return a cell for a time."""
    return Cell(time_text(time_ms), time_ms)


def ratio_cell(interval: Interval | None) -> Cell:
    """Return a cell for a ratio that may be unknown."""
    return Cell(ratio_text(interval), interval.value) if interval else Cell("–")


def value_cell(value: Value) -> Cell:
    """Return a cell for a parameter's value."""
    number = None if isinstance(value, str) else float(value)
    return Cell(format_value(value), number, code=True)


def candidate_cell(candidate: Candidate) -> Cell:
    """Return a cell for a candidate."""
    return Cell(str(candidate), code=True)


def _three(number: float) -> str:
    """Return a number with three digits, and no exponent below a million."""
    return f"{number:.0f}" if number >= 100 else f"{number:#.3g}"
