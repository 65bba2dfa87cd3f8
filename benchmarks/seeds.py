"""How many evaluations seeds save: others' files about one card start the search for another.

Recorded spaces of one kernel on several cards are searched without seeds, and with those that
`--seed-from` takes from a file about another card, which the tool of its format wrote
(`seed_files.py`; `kernel_tuner` and `helion` where they are installed). Configurations of vLLM and
SGLang are left out: they name tiles of M, N and K, which none of the recorded kernels has.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median

import optuna
from entry import start
from optuna.trial import TrialState
from rows import OwnRows
from seed_files import FORMATS, Format, workload

from tuner.records import Candidate
from tuner.search.sampler import FeasibleSampler, as_params, ask
from tuner.search.tables import Table, read_tables
from tuner.seeds import Seed, fit, read_seeds

COLUMNS = (
    *("kernel", "card", "seeds_of", "format", "holds", "searches", "configurations", "taken"),
    *("first_share", "to_95", "to_98", "mean_to_95", "mean_to_98", "version"),
)

SPACES = Path(__file__).parent / "spaces"
GOOD = (0.95, 0.98)
"""Shares of the best configuration's speed that a search is to come to."""

MOST = 100
"""Evaluations after which a search ends."""

NONE = "none"
"""The format of a search without seeds."""


@dataclass(frozen=True, slots=True)
class Reached:
    """What one search came to.

    Attributes:
        needed: Evaluations to each share of `GOOD`, infinite where it did not come so far.
        first_share: The best configuration's time over the first one's.
        configurations: Number of configurations in the file.
        taken: Number of them that were tried first.
    """

    needed: tuple[float, ...]
    first_share: float
    configurations: int = 0
    taken: int = 0


def needed(table: Table, seed: int, first: Sequence[Candidate] = ()) -> Reached:
    """Search a table as a study does, what others found first, until it came close enough.

    Args:
        table: The recorded space.
        seed: Seed of the sampler.
        first: What is tried first.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=FeasibleSampler(table.feasible, seed))
    for candidate in first:
        study.enqueue_trial(as_params(candidate), skip_if_exists=True)
    shares: list[float] = []
    while len(shares) < MOST and max(shares, default=0.0) < GOOD[-1]:
        asked = ask(study, table.feasible)
        if asked is None:
            break
        trial, candidate = asked
        time_ms = table.times[table.feasible.key(candidate)]
        if time_ms is None:
            study.tell(trial, state=TrialState.PRUNED)
        else:
            study.tell(trial, time_ms)
        shares.append(0.0 if time_ms is None else table.best_ms / time_ms)
    counts = (next((i for i, x in enumerate(shares, 1) if x >= good), math.inf) for good in GOOD)
    return Reached(tuple(counts), shares[0])


def seeded(table: Table, seed: int, given: Sequence[Seed]) -> Reached:
    """Search a table, starting from what a file holds."""
    first = fit(workload(table), table.feasible, given).candidates
    found = needed(table, seed, first)
    return Reached(found.needed, found.first_share, len(given), len(first))


def row(found: Sequence[Reached]) -> dict[str, object]:
    """Return what some searches came to; those that did not come so far count as `MOST`."""
    cells: dict[str, object] = {
        "searches": len(found),
        "configurations": median(item.configurations for item in found),
        "taken": median(item.taken for item in found),
        "first_share": fmean(item.first_share for item in found),
    }
    for place, good in enumerate(GOOD):
        counts = [item.needed[place] for item in found]
        middle = median(counts)
        cells[f"to_{good:.0%}".rstrip("%")] = middle if math.isfinite(middle) else None
        cells[f"mean_to_{good:.0%}".rstrip("%")] = fmean(min(count, MOST) for count in counts)
    return cells


def families(paths: Sequence[Path]) -> Iterator[list[Table]]:
    """Yield the tables of each kernel that several cards ran."""
    tables: dict[str, list[Table]] = {}
    for path in sorted(paths):
        (table,) = read_tables(path)
        tables.setdefault(workload(table).kernel, []).append(table)
    yield from (group for group in tables.values() if len(group) > 1)


@cache
def formats() -> list[tuple[Format, str]]:
    """Return the formats that can be written here, with the version of what writes them."""
    found = []
    for item in FORMATS:
        try:
            found.append((item, f"{item.package} {importlib.metadata.version(item.package)}"))
        except importlib.metadata.PackageNotFoundError:
            print(f"{item.name} is left out: {item.package} is not installed", flush=True)
    return found


class Files:
    """The files about each table, written and read once.

    Args:
        folder: Where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[tuple[str, str, int], list[Seed]] = {}

    def seeds(self, item: Format, table: Table, seed: int) -> list[Seed]:
        """Return what a file of a format holds about a table."""
        key = (item.name, table.space, seed if item.random else 0)
        if key not in self._read:
            place = self._folder / table.space
            place.mkdir(exist_ok=True)
            self._read[key] = read_seeds(item.write(table, seed, place))
        return self._read[key]


def measure(group: Sequence[Table], searches: int, output: OwnRows, files: Files) -> None:
    """Search the tables of one kernel without seeds and with those of each other card."""
    ours = f"tuner {importlib.metadata.version('tuner')}"
    for table in group:
        kernel, _, card = table.space.partition("_")
        about: dict[str, object] = {"kernel": kernel, "card": card}
        alone = row([needed(table, seed) for seed in range(searches)])
        output.add(about | {"seeds_of": NONE, "format": NONE, "version": ours} | alone)
        print(f"{table.space}: {alone}", flush=True)
        for other in (item for item in group if item is not table):
            about["seeds_of"] = other.space.partition("_")[2]
            for item, version in formats():
                found = row(
                    [
                        seeded(table, seed, files.seeds(item, other, seed))
                        for seed in range(searches)
                    ]
                )
                named = {"format": item.name, "holds": item.holds, "version": version}
                output.add(about | named | found)
                print(f"  {about['seeds_of']}, {item.name}: {found}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Search every space with the seeds of every other card; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", type=Path, help="other tables than the repository's")
    parser.add_argument("--searches", type=int, default=10, help="of each space and file")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/seeds.csv"))
    options = parser.parse_args(arguments)
    output = OwnRows(options.output, "recorded spaces", COLUMNS)
    with tempfile.TemporaryDirectory(prefix="seeds-") as folder:
        files = Files(Path(folder))
        for group in families(options.tables or list(SPACES.glob("*.csv.gz"))):
            measure(group, options.searches, output, files)
    return 0


if __name__ == "__main__":
    start(main)
