"""What a run's choice loses: the winners of runs with different seeds, timed for long together.

Each run has a store and a seed of its own and begins from nothing; they share child processes, and
what one compiled another need not compile again. Then all that won, what each search took to be
the fastest, and the default take turns: nobody is dropped. A run's regret is how much longer its
winner takes than the best of all runs' winners.

Example:
    python benchmarks/selection.py --device cpu --budget 90s --jobs 1 \
        --output benchmarks/results/clock/selection_cpu.csv
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from entry import start
from evaluated import LIMITS
from regret import TrueTimes, regrets, summary
from rows import OwnRows
from seeded_runs import Choice, SeededRuns

from tuner import codec
from tuner.budget import Budget
from tuner.catalog import Catalog
from tuner.children.worker import Lethal, Workers
from tuner.cli.devices import workers_for
from tuner.plan import Request, check_request, plan
from tuner.records import Candidate, DeviceInfo, Failure
from tuner.render import Renderer
from tuner.timing.race import RaceResult

COLUMNS = (
    *("op", "kernel", "workload", "seed", "template", "parameters", "trials", "seconds"),
    *("gain", "gain_low", "gain_high", "median_ms", "low_ms", "high_ms"),
    *("regret_percent", "regret_low", "regret_high", "search_percent", "choice_percent"),
    *("runs", "winners", "within", "mean_percent", "note"),
)

PATIENCE = 2.0
"""How many times their budgets all runs together may take before no other is begun."""

PARTS = 4
"""Surveys that the time for measuring is split into: each prepares everybody anew."""

LOADING_S = 60.0
"""Seconds that everybody may take to be loaded and prepared."""


class Selection:
    """What runs of one workload choose.

    Args:
        runs: Makes the runs.
        output: Where rows go.
    """

    def __init__(self, runs: SeededRuns, output: OwnRows) -> None:
        self._runs, self._output = runs, output
        self._choices: list[Choice] = []
        self._default = runs.subject.feasible.default
        workload = runs.subject.task.workload
        self._about = {"kernel": workload.kernel, "workload": str(workload)}

    def search(self, runs: int, budget: Budget) -> bool:
        """Make the runs, a row each; return whether all of them chose something."""
        self._runs.warm_up()
        end_s = time.monotonic() + PATIENCE * runs * (budget.seconds or math.inf)
        try:
            for seed in range(runs):
                if time.monotonic() > end_s:
                    print(f"  {runs - seed} runs are left out: the time was spent", flush=True)
                    break
                self._run(seed, budget)
        except KeyboardInterrupt:
            print("  interrupted: those that have ended are timed", flush=True)
        return len(self._choices) == runs

    def _run(self, seed: int, budget: Budget) -> None:
        row: dict[str, object] = {"seed": seed}
        try:
            found = self._runs.run(seed, budget)
        except Exception as error:  # the other runs are worth having
            traceback.print_exc()
            found = Failure(self._runs.subject.task.workload, str(error))
        if isinstance(found, Failure):
            row["note"] = found.reason
        else:
            self._choices.append(found)
            gain = found.winner.gain
            row |= {"trials": found.trials, "seconds": found.seconds, "gain": gain.value}
            row |= {"gain_low": gain.low, "gain_high": gain.high}
            row |= {**_cells(found.winner.candidate), "note": found.winner.disturbed}
        self._add("run", row)
        print("  ", {name: value for name, value in row.items() if value is not None}, flush=True)

    def measure(self, seconds: float) -> bool:
        """Time what was chosen, and write what each choice lost; return whether that is known."""
        if not self._choices:
            return False
        default, end_s = self._default, time.monotonic() + seconds
        chosen = [item.winner.candidate for item in self._choices]
        contenders = [default, *chosen, *(item.fastest for item in self._choices)]
        times = TrueTimes(str(default))
        self._add("default", _cells(default))
        self._add("summary", {})
        surveys = 0
        part_s = seconds / PARTS
        while (left_s := end_s - time.monotonic()) > part_s / 2:  # less is hardly worth preparing
            budget_s = min(left_s, part_s)
            result = self._survey(list(dict.fromkeys(contenders)), budget_s, seed=surveys)
            if result is not None:
                surveys += 1
                times.add(result)
                self._conclude(times, result, f"{surveys} surveys, {result.regime} caches")
            elif contenders[1:] == chosen:
                break
            else:  # the searches' fastest are not known to be right everywhere
                contenders = [default, *chosen]
        return surveys > 0

    def _survey(
        self, contenders: Sequence[Candidate], budget_s: float, *, seed: int
    ) -> RaceResult | None:
        """Return the times of all contenders in turns, or None where one of them fails."""
        subject, runs = self._runs.subject, self._runs
        sources = {str(item): subject.render(runs.renderer, item) for item in contenders}
        described = [
            {"label": label, **runs.workers.describe(sources[label])} for label in sources
        ]
        options = {"budget_s": budget_s, "seed": seed, "rival": False, "verify": False}
        limit_s = LOADING_S + 2 * budget_s
        try:
            reply = runs.workers.ask(
                "survey", timeout_s=limit_s, task=subject.task, contenders=described, **options
            )
        except Lethal as lethal:
            reply = {"rejection": str(lethal)}
        if "rejection" in reply:
            print(f"  a survey is rejected: {reply['rejection']}", flush=True)
            return None
        return codec.from_json(RaceResult, reply["race"])

    def _conclude(self, times: TrueTimes, last: RaceResult, how: str) -> None:
        """Write what is known by now in the place of what was known before."""
        default = str(self._default)
        own, noise = times.time_ms(default), times.noise()
        cells: dict[str, object] = {"median_ms": own.value, "low_ms": own.low, "high_ms": own.high}
        note = f"its copy takes {noise.value:+.2f} % [{noise.low:+.2f}, {noise.high:+.2f}]; {how}"
        self._update("default", "", cells | {"note": note})
        found, refused = regrets(self._choices, times), dict(last.refused)
        for item in self._choices:
            mine: dict[str, object] = {"note": refused.get(str(item.winner.candidate))}
            mine |= found.get(item.seed, {})
            notes = (mine["note"], item.winner.disturbed)
            mine["note"] = "; ".join(str(part) for part in notes if part)
            self._update("run", str(item.seed), mine)
        whole: dict[str, object] = {"note": "nothing could be timed"}
        if found:
            whole = summary(self._choices, found)
        self._update("summary", "", whole)
        print(f"  {self._about['kernel']}: {whole}", flush=True)

    def _add(self, op: str, row: dict[str, object]) -> None:
        self._output.add({"op": op, **self._about, **row})

    def _update(self, op: str, seed: str, cells: dict[str, object]) -> None:
        self._output.update({"op": op, "seed": seed, **self._about}, cells)


def _cells(candidate: Candidate) -> dict[str, object]:
    parameters = str(candidate).removeprefix(candidate.template)[1:-1]
    return {"template": candidate.template, "parameters": parameters}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    parser.add_argument("--kernel", nargs="+", default=["matmul"])
    parser.add_argument("--kernels", nargs="*", type=Path, default=[], help="your own folders")
    parser.add_argument("--workload", help="of the kernel; the device's first starter if left out")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--budget", default="10s", help="of each run: 10s, 1m or 50trials")
    parser.add_argument("--seconds", type=float, default=40.0, help="to time the winners")
    parser.add_argument("--jobs", type=int, help="compile children; all cores if left out")
    return parser.parse_args(arguments)


def _request(options: argparse.Namespace, kernel: str) -> Request:
    return Request((kernel,), (options.workload,) if options.workload else ())


def _select(
    options: argparse.Namespace, workers: Workers, info: DeviceInfo, kernel: str, output: OwnRows
) -> bool:
    """Make a kernel's runs and time what they chose; return whether all of that went well."""
    catalog = Catalog(options.kernels)
    subject = plan(catalog, info, _request(options, kernel))[0]
    print(f"{kernel} {subject.task.workload}: {len(subject.feasible)} candidates", flush=True)
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        runs = SeededRuns(subject, workers, Renderer(catalog.template_folders), Path(folder))
        selection = Selection(runs, output)
        chose = selection.search(options.runs, Budget.parse(options.budget))
        return selection.measure(options.seconds) and chose


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, measure and write; return the exit status."""
    options = _options(arguments)
    Budget.parse(options.budget)  # what is wrong is said before children start
    for kernel in options.kernel:
        check_request(Catalog(options.kernels), _request(options, kernel))
    failures = 0
    with (
        tempfile.TemporaryDirectory(prefix="selection-") as folder,
        workers_for(
            *(options.device, Path(folder), dict(os.environ)), jobs=options.jobs, limits=LIMITS
        ) as workers,
    ):
        info = workers.info()
        output = OwnRows(options.output, info.name, COLUMNS)
        for kernel in options.kernel:
            try:
                failures += not _select(options, workers, info, kernel, output)
            except Exception:  # the other kernels' rows are worth having
                traceback.print_exc()
                failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    start(main)
