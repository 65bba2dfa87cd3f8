"""How many evaluations a search needs: samplers replayed on recorded tuning spaces.

Kernel Tuner's strategies run beside ours when the package `kernel_tuner` is installed. The spaces
in `benchmarks/spaces/` are brute-forced measurements by others (`index.csv` names the sources and
their licence); further tables can be given as arguments.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rows import BUDGETS, SEARCH_COLUMNS, read
from tables import search_table

from tuner.package.files import replace
from tuner.search.replay import SAMPLERS, Run, Summary, search, summarise
from tuner.search.tables import Table, read_tables

SPACES = Path(__file__).parent / "spaces"
Searcher = Callable[[Table, int, int], Run]
"""Searches a table with a seed for a number of evaluations."""


def searchers() -> dict[str, tuple[Searcher, str]]:
    """Return every contender by name, with the package and version that it is of."""
    optuna, tuner = version("optuna"), version("tuner")
    contenders = {
        "tuner": (partial(_replayed, "tuner", 1), tuner),
        "tuner, 8 in flight": (partial(_replayed, "tuner", 8), tuner),
        "optuna TPE": (partial(_replayed, "tpe", 1), optuna),
        "random": (partial(_replayed, "random", 1), tuner),
    }
    try:
        import kernel_tuner_search
    except ModuleNotFoundError as missing:
        print(f"Kernel Tuner's strategies are left out: {missing}")
        return contenders
    for name in kernel_tuner_search.STRATEGIES:
        contenders[f"kernel_tuner {name}"] = (
            partial(_foreign, kernel_tuner_search.run, name),
            version("kernel_tuner"),
        )
    return contenders


def _replayed(sampler: str, batch: int, table: Table, seed: int, evaluations: int) -> Run:
    return search(table, SAMPLERS[sampler](table, seed), evaluations, batch)


def _foreign(
    run: Callable[[Table, str, int, int], Run],
    name: str,
    table: Table,
    seed: int,
    evaluations: int,
) -> Run:
    return run(table, name, seed, evaluations)


def version(package: str) -> str:
    """Return a package's name and version."""
    return f"{package} {importlib.metadata.version(package)}"


def row(summary: Summary, made_by: str) -> dict[str, str]:
    """Return a summary as a row of the results."""
    reached = summary.evaluations_to_95
    proposal_ms = "" if math.isnan(summary.proposal_ms) else summary.proposal_ms
    values = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "space": summary.space,
        "sampler": summary.sampler,
        "seeds": summary.seeds,
        **{f"share_{budget}": summary.share[budget] for budget in BUDGETS},
        "evaluations_to_95": "" if reached is None else reached,
        "proposal_ms": proposal_ms,
        "version": made_by,
    }
    return {name: str(value) for name, value in values.items()}


def save(path: Path, rows: Mapping[tuple[str, str], Mapping[str, str]]) -> None:
    """Write the rows, sorted by space and sampler."""
    text = io.StringIO()
    writer = csv.DictWriter(text, SEARCH_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[key] for key in sorted(rows))
    replace(path, text.getvalue().encode())


def known(path: Path) -> dict[tuple[str, str], Mapping[str, str]]:
    """Return the rows of a file by space and sampler; none if there is no file."""
    rows = read(path) if path.exists() else []
    return {(line["space"], line["sampler"]): line for line in rows}


def main() -> None:
    """Replay every space with every contender; a pair that the file has is not run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", type=Path, help="further tables")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--evaluations", type=int, default=100)
    parser.add_argument("--only", help="run the contenders whose name contains this")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/search.csv"))
    arguments = parser.parse_args()
    rows = known(arguments.output)
    contenders = searchers()
    for path in [*sorted(SPACES.glob("*.csv.gz")), *arguments.tables]:
        [table] = read_tables(path)
        for name, (searcher, made_by) in contenders.items():
            if (table.space, name) in rows or (arguments.only or "") not in name:
                continue
            runs = [
                searcher(table, seed, arguments.evaluations) for seed in range(arguments.seeds)
            ]
            summary = summarise(table.space, name, runs)
            print(summary, flush=True)
            rows[table.space, name] = row(summary, made_by)
            save(arguments.output, rows)
    print(search_table(list(rows.values()), arguments.output.name))


if __name__ == "__main__":
    main()
