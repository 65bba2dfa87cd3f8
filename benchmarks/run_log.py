"""What a run did, a row for each workload: its trials, how fast they came, and what won.

The trials of a workload's search come one after the other; those of the second look, later ones,
are counted, but not in the rate.

Example:
    python benchmarks/run_log.py --store .tuner --output benchmarks/results/run_h200.csv
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from entry import start
from rows import OwnRows

from tuner.records import Measurement, Trial, Winner
from tuner.store import Store, open_stores

COLUMNS = (
    *("kernel", "workload", "trials", "timed", "rejected", "search_s", "trials_per_s"),
    *("best_ms", "default_ms", "gain", "rival", "rival_ratio", "note"),
)


def rows_of(store: Store) -> Iterator[dict[str, object]]:
    """Yield a row for each workload that a store has a winner of, in the order of the searches."""
    winners = {winner.workload: winner for winner in store.winners}
    trials = sorted(store.trials, key=lambda trial: trial.number)
    searches = [list(items) for _, items in groupby(trials, key=lambda trial: trial.workload)]
    for search in searches:
        workload = search[0].workload
        if workload in winners:
            mine = [trial for trial in trials if trial.workload == workload]
            yield _row(winners.pop(workload), search, mine)


def _row(winner: Winner, search: Sequence[Trial], trials: Sequence[Trial]) -> dict[str, object]:
    timed = [trial for trial in trials if isinstance(trial.outcome, Measurement)]
    stages = Counter(
        trial.outcome.stage for trial in trials if not isinstance(trial.outcome, Measurement)
    )
    ended_s = [trial.ended_s for trial in search if trial.ended_s is not None]
    search_s = ended_s[-1] - ended_s[0] + search[0].seconds if ended_s else None
    return {
        "kernel": winner.workload.kernel,
        "workload": str(winner.workload),
        "trials": len(trials),
        "timed": len(timed),
        "rejected": ", ".join(f"{count} {stage}" for stage, count in sorted(stages.items())),
        "search_s": search_s,
        "trials_per_s": len(search) / search_s if search_s else None,
        "best_ms": winner.measurement.median_ms,
        "default_ms": winner.default_measurement.median_ms,
        "gain": winner.gain.value,
        "rival": winner.rival,
        "rival_ratio": winner.rival_ratio.value if winner.rival_ratio else None,
        "note": str(winner.candidate),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the rows of all of a store's devices; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path(".tuner"))
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    options = parser.parse_args(arguments)
    for store in open_stores(options.store):
        rows = list(rows_of(store))
        if rows:
            device = store.winners[0].device
            output = OwnRows(options.output, device.name, COLUMNS)
            versions = dict(device.versions)
            output.about |= {"date": store.winners[-1].date}
            output.about |= {name: versions.get(name, "") for name in ("torch", "triton")}
            for row in rows:
                output.add(row)
    return 0


if __name__ == "__main__":
    start(main)
