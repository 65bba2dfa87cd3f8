"""Rows of results from a store's final races: winner, default and rival, timed in turns.

Example:
    python benchmarks/finals.py --store .tuner --output benchmarks/results/h200.csv
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

from rows import COLUMNS, read

from tuner.catalog import Catalog
from tuner.package.files import replace
from tuner.records import Measurement, Winner
from tuner.runtime.check import load_problem
from tuner.space.template import ITEMSIZES
from tuner.store import open_stores

MEMORY_BOUND = 32.0
"""Operations per byte up to which a workload is taken to wait for memory on any device."""


def rows_of(winner: Winner, catalog: Catalog) -> Iterator[dict[str, str]]:
    """Yield a row for each side of a workload's final race."""
    workload, versions = winner.workload, dict(winner.device.versions)
    problem = load_problem(catalog.problem_path(workload.kernel))
    itemsize = ITEMSIZES[workload.dtype]
    flops, size = problem.cost(dict(workload.dims), dict(workload.flags), itemsize)
    work, unit = (size, "GB/s") if flops <= MEMORY_BOUND * size else (flops, "GFLOP/s")
    race = f"{workload}{winner.date}{winner.measurement}"
    about = {
        "run": hashlib.sha256(race.encode()).hexdigest()[:8],
        "date": winner.date,
        "device": winner.device.name,
        "torch": versions.get("torch", ""),
        "triton": versions.get("triton", ""),
        "op": workload.kernel,
        "workload": str(workload),
        "unit": unit,
    }
    sides: list[tuple[str, Measurement | None, str]] = [
        ("tuner", winner.measurement, str(winner.candidate)),
        ("default", winner.default_measurement, str(winner.default_candidate)),
        (winner.rival or "", winner.rival_measurement, ""),
    ]
    for contender, measured, note in sides:
        if measured is not None:
            yield about | {
                "contender": contender,
                "median_ms": f"{measured.median_ms:.6g}",
                "low_ms": f"{measured.low_ms:.6g}",
                "high_ms": f"{measured.high_ms:.6g}",
                "rate": f"{work / measured.median_ms * 1e-6:.6g}",
                "note": f"final race, {measured.samples} blocks, {measured.regime} caches {note}",
            }


def main() -> None:
    """Replace the rows of every workload that the store has a winner for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path(".tuner"))
    parser.add_argument("--arch", help="only winners of this architecture")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    catalog = Catalog()
    rows = read(options.output) if options.output.exists() else []
    for store in open_stores(options.store):
        if options.arch in (None, store.folder.name):
            for winner in store.winners:
                new = list(rows_of(winner, catalog))
                key = ("device", "op", "workload")
                rows = [row for row in rows if any(row[name] != new[0][name] for name in key)]
                rows += [{name: row.get(name, "") for name in COLUMNS} for row in new]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace(options.output, text.getvalue())


if __name__ == "__main__":
    main()
