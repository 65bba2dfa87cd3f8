"""How soon a search on the device finds the best: the tuner's sampler beside TPE and random.

All samplers search one feasible set at the same time, in turns, with as many candidates compiled
ahead; of a set that is too large to list, TPE and random get 100,000 candidates drawn at random.
Whatever two of them propose is compiled and timed once, by the tuner's children and clock; each is
charged for it as if it had been alone: a trial costs the longer of its time on the device and its
share of the compiling cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from entry import start
from evaluated import LIMITS, Evaluator
from rows import OwnRows
from searches import Keys, Run
from winners import frozen_winners

from tuner.catalog import Catalog, device_class
from tuner.children.worker import Workers
from tuner.cli.devices import jobs_or_cores, workers_for
from tuner.plan import subject_of
from tuner.records import Candidate, DeviceInfo
from tuner.render import Renderer
from tuner.search.replay import SAMPLERS
from tuner.search.tables import Table
from tuner.space.kernel import load_space

COLUMNS = (
    *("kernel", "workload", "sampler", "seed", "trial", "median_ms", "best_ms", "trial_seconds"),
    *("seconds", "share_of_best", "trials_to_98", "seconds_to_98", "note"),
)

KERNELS = ("matmul", "attention_backward")

GOOD = 0.98
"""Share of the best time of all at which a search is done."""

FROZEN = "frozen winner"


class Race:
    """All samplers on one workload.

    Args:
        evaluator: Measures.
        options: The command line's.
        jobs: Number of children that compile.
        output: Where rows go.
    """

    def __init__(
        self, evaluator: Evaluator, options: argparse.Namespace, jobs: int, output: OwnRows
    ) -> None:
        self._evaluator, self._options, self._jobs = evaluator, options, jobs
        self._output, self._feasible = output, evaluator.subject.feasible
        self._keys = Keys(self._feasible)
        self._runs: list[Run] = []
        self._about = {
            "kernel": evaluator.subject.task.workload.kernel,
            "workload": str(evaluator.subject.task.workload),
        }

    def hold(self, known: Sequence[Candidate]) -> None:
        """Search until the time is spent; then say who came how far.

        Args:
            known: The best that was known before, which no sampler is told of.
        """
        end_s = time.monotonic() + self._options.seconds
        references = [("default", self._feasible.default), *((FROZEN, item) for item in known)]
        for _, candidate in references:
            self._evaluator.submit(candidate)
        for name, candidate in references:
            found = self._evaluator.evaluate(candidate, give_up=False)
            self._output.add(
                {**self._about, "sampler": name, "median_ms": found.median_ms, "note": candidate}
            )
        try:
            for seed in range(self._options.seeds):
                runs = [self._begin(name, seed) for name in self._options.samplers]
                self._runs += runs
                if not self._advance(runs, end_s):
                    if seed:  # who was cut short says less than who was not
                        self._runs = self._runs[: -len(runs)]
                    break
        finally:  # what was found counts, whatever came after
            self._conclude()

    def _advance(self, runs: Sequence[Run], end_s: float) -> bool:
        """Make the trials of some runs in turns; return False where the time did not suffice."""
        for _ in range(self._options.trials):
            for run in runs:
                if time.monotonic() > end_s:
                    return False
                self._step(run)
        return True

    def _begin(self, name: str, seed: int) -> Run:
        """Return a search that knows nothing yet."""
        table = Table(self._about["kernel"], self._feasible, self._keys)
        return Run(name, seed, SAMPLERS[name](table, seed))

    def _step(self, run: Run) -> None:
        """Make one trial, if anything is left to try."""
        feasible, evaluator = self._feasible, self._evaluator
        left = self._options.trials - len(run.times_ms)
        left = min(left, len(feasible) - len(run.times_ms))
        while len(run.waiting) < min(self._options.ahead, left):
            key = run.strategy.ask()
            run.waiting.append(key)
            evaluator.submit(feasible.candidate(key))
        if not run.waiting:
            return
        by_candidate = {feasible.candidate(key): key for key in run.waiting}
        ready = evaluator.compiled(list(by_candidate))
        key = run.strategy.first([by_candidate[item] for item in ready])
        run.waiting.remove(key)
        found = evaluator.evaluate(feasible.candidate(key), give_up=True)
        run.strategy.tell(key, found.median_ms)
        self._note(run, found.median_ms, max(found.measure_s, found.compile_s / self._jobs))

    def _note(self, run: Run, time_ms: float | None, seconds: float) -> None:
        run.times_ms.append(time_ms)
        run.seconds.append(seconds)
        self._output.add(
            {
                **self._about,
                **{"sampler": run.sampler, "seed": run.seed, "trial": len(run.times_ms)},
                **{"median_ms": time_ms, "best_ms": run.best_ms, "trial_seconds": seconds},
                "seconds": sum(run.seconds),
            }
        )
        if len(run.times_ms) % 10 == 0:
            print(f"  {run.sampler} {run.seed}: {len(run.times_ms)}, {run.best_ms} ms", flush=True)

    def _conclude(self) -> None:
        """Write how many trials and seconds each search took to come near the best of all."""
        best_ms = self._evaluator.best_ms
        if best_ms is None:
            return
        for run in self._runs:
            number = run.reached(best_ms / GOOD)
            seconds = None if number is None else sum(run.seconds[:number])
            row = {
                **{"sampler": run.sampler, "seed": run.seed, "best_ms": run.best_ms},
                "share_of_best": best_ms / run.best_ms if run.best_ms else None,
                **{"trials_to_98": number, "seconds_to_98": seconds, "seconds": sum(run.seconds)},
                "note": f"{len(run.times_ms)} trials, {run.times_ms.count(None)} failed; the best "
                f"of all takes {best_ms:.4g} ms; {len(self._feasible)} candidates",
            }
            self._output.add({**self._about, **row})
            print(self._about["kernel"], {k: v for k, v in row.items() if v is not None})


def _measure(
    options: argparse.Namespace, workers: Workers, info: DeviceInfo, kernel: str, output: OwnRows
) -> None:
    catalog = Catalog(options.kernels)
    spec = load_space(catalog.space_path(kernel))
    starter = device_class(info.kind).starter
    workload = (
        spec.workload(options.workload)
        if options.workload
        else spec.workloads.get(starter, spec.workloads["starter"])[0]
    )
    subject = subject_of(catalog, info, spec, workload)
    evaluator = Evaluator(subject, Renderer(catalog.template_folders), workers)
    print(f"{kernel} {workload}: {len(subject.feasible)} candidates", flush=True)
    race = Race(evaluator, options, jobs_or_cores(options.jobs), output)
    race.hold(frozen_winners(options.package, subject, info))


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    parser.add_argument("--kernel", nargs="+", default=KERNELS)
    parser.add_argument("--kernels", nargs="*", type=Path, default=[], help="your own folders")
    parser.add_argument("--workload", help="of the kernel; the device's first starter if left out")
    parser.add_argument("--package", type=Path, default=Path("kernels_generated"))
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--trials", type=int, default=80, help="of each search")
    parser.add_argument("--seeds", type=int, default=3, help="searches of each sampler")
    parser.add_argument("--ahead", type=int, default=16, help="candidates compiled ahead")
    parser.add_argument("--seconds", type=float, default=75.0, help="for each kernel")
    parser.add_argument("--jobs", type=int, help="compile children; all cores if left out")
    options = parser.parse_args(arguments)
    failures = 0
    with (
        tempfile.TemporaryDirectory(prefix="search-") as folder,
        workers_for(
            *(options.device, Path(folder), dict(os.environ)), jobs=options.jobs, limits=LIMITS
        ) as workers,
    ):
        info = workers.info()
        output = OwnRows(options.output, info.name, COLUMNS)
        for kernel in options.kernel:
            try:
                _measure(options, workers, info, kernel, output)
            except Exception:  # the other kernel's search is worth having
                traceback.print_exc()
                failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    start(main)
