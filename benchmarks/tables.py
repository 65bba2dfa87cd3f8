"""Write the README's tables from the results: `python benchmarks/tables.py [--check]`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import findings
from rows import BUDGETS, SEARCH_COLUMNS, has_own_columns, read

from tuner.package.files import replace

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- results -->", "<!-- /results -->"
OURS = "tuner"
NONE = findings.NONE

_EQUAL = 0.002
"""Shares that differ by less are equal: runs of the same sampler differ by more."""

Row = Mapping[str, str]

_LEGEND = (
    "Medians; under a contender's name stands its time over ours: above 1, ours is faster. The "
    "scripts in `benchmarks/` measured everything that stands in one row in one run; intervals "
    "and notes are in `benchmarks/results/`."
)


def section(results: Path) -> str:
    """Return the text between the markers, from every file of results."""
    parts = [_LEGEND]
    clocks = filter(has_own_columns, sorted(results.glob("clock/*.csv")))
    for path in [*sorted(results.glob("*.csv")), *clocks]:
        rows = read(path)
        if has_own_columns(path):
            parts += findings.section(str(path.relative_to(results)), rows)
            continue
        if rows and tuple(rows[0]) == SEARCH_COLUMNS:
            parts.append(search_table(rows, path.name))
            continue
        for device in _distinct(rows, "device"):
            parts += _device(path, device, [row for row in rows if row["device"] == device])
    if len(parts) == 1:
        parts = ["No results yet: `python benchmarks/kernels.py --output FILE` measures them."]
    return "\n\n".join(parts)


def with_section(readme: str, text: str) -> str:
    """Return a README with another text between its markers.

    Raises:
        ValueError: It does not have each marker once, in order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"the README must have {BEGIN} and {END}, once each and in this order")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def search_table(rows: Sequence[Row], name: str) -> str:
    """Return the table of the searches of recorded spaces: a line per sampler, the best first."""
    lines = []
    for sampler in _distinct(rows, "sampler"):
        mine = [row for row in rows if row["sampler"] == sampler]
        shares = [fmean(float(row[f"share_{budget}"]) for row in mine) for budget in BUDGETS]
        reached = median(float(row["evaluations_to_95"] or math.inf) for row in mine)
        first = f"{sum(_is_first(row, rows) for row in mine)} of {len(mine)}"
        soon = f"{reached:g}" if math.isfinite(reached) else "over 100"
        figures = [*(f"{share:.3f}" for share in shares), soon, first]
        lines.append((shares[-1], f"| {sampler} | {' | '.join(figures)} |"))
    lines.sort(reverse=True)
    head = "| sampler | after 25 | 50 | 100 | to 95 % | first |"
    table = [head, "| --- | ---: | ---: | ---: | ---: | ---: |", *(line for _, line in lines)]
    about = (
        f"**Search** of {len(_distinct(rows, 'space'))} tuning spaces that others measured in "
        f"full ({rows[0]['seeds']} runs each; `benchmarks/results/{name}`): share of the best "
        "configuration's speed after so many evaluations, evaluations to 95 % of it (median), and "
        f"on how many spaces no other was more than {_EQUAL:g} ahead after 100."
    )
    return "\n".join([about, "", *table])


def _is_first(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether a sampler was ahead of all others on a space; its own batches are none."""
    name = row["sampler"].partition(",")[0]
    others = (
        float(other["share_100"])
        for other in rows
        if other["space"] == row["space"] and other["sampler"].partition(",")[0] != name
    )
    return float(row["share_100"]) >= max(others, default=0.0) - _EQUAL


def _device(path: Path, device: str, rows: Sequence[Row]) -> Iterator[str]:
    versions = [
        f"{name} {', '.join(found)}"
        for name in ("torch", "triton")
        if (found := [version for version in _distinct(rows, name) if version])
    ]
    about = [*versions, *_distinct(rows, "date"), f"`benchmarks/results/{path.name}`"]
    yield f"**{device}** ({'; '.join(about)})"
    for op in _distinct(rows, "op"):
        yield _table(op, [row for row in rows if row["op"] == op])


def _table(op: str, rows: Sequence[Row]) -> str:
    """Return the table of one operation: a line per workload and one of geometric means."""
    others = [name for name in _distinct(rows, "contender") if name != OURS]
    has_rate = any(row["rate"] for row in rows)
    lines = [[op, "ours", *(["rate"] if has_rate else []), *others]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for workload in _distinct(rows, "workload"):
        by_name = {row["contender"]: row for row in rows if row["workload"] == workload}
        ours = by_name.get(OURS, {})
        line = [workload, _time(ours), *([_rate(ours)] if has_rate else [])]
        for name in others:
            ratio = _ratio(by_name.get(name, {}), ours)
            line.append(NONE if ratio is None else f"{ratio:.2f}")
            ratios[name] += [] if ratio is None else [ratio]
        lines.append(line)
    if len(lines) > 3:
        means = [_geometric_mean(values) for values in ratios.values()]
        blank = [""] * (len(lines[0]) - 1 - len(others))
        lines.append(["geometric mean", *blank, *means])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ratio(theirs: Row, ours: Row) -> float | None:
    if not (theirs.get("median_ms") and ours.get("median_ms")):
        return None
    return float(theirs["median_ms"]) / float(ours["median_ms"])


def _geometric_mean(values: Sequence[float]) -> str:
    if not values:
        return NONE
    return f"{math.exp(sum(map(math.log, values)) / len(values)):.2f}"


def _time(row: Row) -> str:
    if not row.get("median_ms"):
        return NONE
    return _scaled(float(row["median_ms"]) * 1e-3, "s", ((1.0, ""), (1e-3, "m"), (1e-6, "µ")))


def _rate(row: Row) -> str:
    if not row.get("rate"):
        return NONE
    rate, unit = float(row["rate"]), row["unit"]
    if unit.startswith("G"):
        return _scaled(rate * 1e9, unit[1:], ((1e12, "T"), (1e9, "G")))
    return f"{rate:.3g} {unit}"


def _scaled(value: float, unit: str, scales: Sequence[tuple[float, str]]) -> str:
    """Return a value with three digits, in the first unit of which it has at least one."""
    scale, prefix = next((item for item in scales if value >= item[0]), scales[-1])
    digits = max(0, 2 - max(0, math.floor(math.log10(value / scale))))
    return f"{value / scale:.{digits}f} {prefix}{unit}"


def _distinct(rows: Sequence[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def main(arguments: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    """Write or check the README; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is stale")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    old = options.readme.read_text(encoding="utf-8")
    new = with_section(old, section(options.results))
    if options.check and new != old:
        say(f"{options.readme} is stale: run `python benchmarks/tables.py`")
        return 1
    replace(options.readme, new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
