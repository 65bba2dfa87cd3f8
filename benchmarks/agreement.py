"""How far two clocks agree, from rows that hold the figures of both."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

Row = Mapping[str, str]

BANDS = (("2-5 us", 2.0, 5.0), ("5-20 us", 5.0, 20.0), ("20 us and more", 20.0, math.inf))
"""By the hardware's figure."""

PAIRS = 200

APART = 1.03
"""Ratio from which the order of two variants must be right."""

FIGURES = {
    "tuner_us": "tuner",
    "host_us": "host's clock alone",
    "do_bench_us": "triton.testing.do_bench",
}
HARDWARE = {"cupti_us": "CUPTI", "ncu_us": "Nsight Compute"}


def summary(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield what was found in words, each with a title."""
    timed = [row for row in rows if row["tuner_us"]]
    variants = {(row["op"], row["workload"], row["variant"]) for row in timed}
    kernels = {row["op"] for row in timed}
    yield "variants", f"{len(variants)} variants of {len(kernels)} kernels in {len(timed)} rows"
    for hardware, name in HARDWARE.items():
        if not any(row[hardware] for row in timed):
            continue
        for band, low, high in BANDS:
            title = f"median absolute error against {name}, {band}"
            inside = [row for row in timed if low <= _number(row, hardware) < high]
            yield title, "; ".join(_error(inside, hardware, figure) for figure in FIGURES)
        for figure, label in FIGURES.items():
            title = f"{PAIRS} pairs of variants of a kernel against {name}, {label}"
            yield title, _agreement(pairs(timed, hardware, figure), hardware, figure)


def _error(rows: Sequence[Row], hardware: str, figure: str) -> str:
    errors = [
        abs(_number(row, figure) / _number(row, hardware) - 1) for row in rows if row[figure]
    ]
    found = f"{100 * median(errors):.2f} %" if errors else "-"
    return f"{FIGURES[figure]} {found} of {len(errors)}"


def pairs(rows: Sequence[Row], hardware: str, figure: str) -> list[tuple[Row, Row]]:
    """Return random pairs of variants of a kernel that both clocks timed in one cache regime.

    Pairs on one workload come first, since these are what tuning compares.
    """
    usable = [row for row in rows if row[figure] and row[hardware]]
    same_kernel = [
        (one, other)
        for one, other in itertools.combinations(usable, 2)
        if (one["op"], one["regime"]) == (other["op"], other["regime"])
    ]
    random.Random(0).shuffle(same_kernel)
    same_kernel.sort(key=lambda pair: pair[0]["workload"] != pair[1]["workload"])
    return same_kernel[:PAIRS]


def _agreement(chosen: Sequence[tuple[Row, Row]], hardware: str, figure: str) -> str:
    if not chosen:
        return "no pairs"
    differences, right = [], []
    for one, other in chosen:
        true = _number(one, hardware) / _number(other, hardware)
        seen = _number(one, figure) / _number(other, figure)
        differences.append(abs(seen / true - 1))
        if max(true, 1 / true) > APART:
            right.append((seen > 1) == (true > 1))
    workloads = sum(one["workload"] == other["workload"] for one, other in chosen)
    return (
        f"ratios differ by {100 * median(differences):.2f} % (median of {len(chosen)}, "
        f"{workloads} on one workload); order right in {sum(right)} of {len(right)} that differ "
        f"by more than 3 %"
    )


def races(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield how often races ended right, by kind of race."""
    kinds = dict.fromkeys(row["op"] for row in rows if row["op"].startswith("race"))
    for kind in kinds:
        outcomes = [row["outcome"] for row in rows if row["op"] == kind]
        counts = {name: outcomes.count(name) for name in dict.fromkeys(outcomes)}
        yield kind, ", ".join(f"{count} {name}" for name, count in counts.items())


def _number(row: Row, name: str) -> float:
    return float(row[name] or "nan")
