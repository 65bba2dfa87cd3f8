"""What each choice of a winner is worth: the winner with that one parameter changed, raced.

Every other value of every parameter is compiled, verified and timed; what is right then takes
turns with the winner in one interleaved race. A row says the ratio of a changed variant's time to
the winner's, with its interval, or why there is no such variant. Where constraints refuse the one
change alone, the fewest other parameters change with it, and the row says which.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from entry import start
from evaluated import LIMITS, Evaluated, Evaluator
from rows import OwnRows
from winners import Change, changes, chosen, winners_of

from tuner import codec
from tuner.catalog import Catalog
from tuner.children.worker import Lethal, Workers
from tuner.cli.devices import workers_for
from tuner.evidence.measure import survey
from tuner.plan import subject_of
from tuner.records import Candidate, Rejection, format_value
from tuner.render import Renderer
from tuner.session import Subject
from tuner.space.kernel import load_space
from tuner.timing import finals
from tuner.timing.race import RaceResult

COLUMNS = (
    *("kernel", "workload", "template", "parameter", "winner_value", "value", "also"),
    *("ratio", "ratio_low", "ratio_high", "median_ms", "registers", "spills", "shared_bytes"),
    *("stage", "note"),
)

KERNELS = ("attention_backward", "attention_forward", "matmul")

REFERENCE = "winner"


class Ablation:
    """The changes of one winner.

    Args:
        winner: The winner's candidate.
        evaluator: Measures on its workload.
        workers: The children.
        output: Where rows go.
        seconds: How long trying the changes may take, and the race.
    """

    def __init__(
        self,
        winner: Candidate,
        evaluator: Evaluator,
        workers: Workers,
        *,
        output: OwnRows,
        seconds: tuple[float, float],
    ) -> None:
        self._winner, self._evaluator, self._workers = winner, evaluator, workers
        self._output, self._seconds = output, seconds
        parts = evaluator.subject.feasible.templates
        self._part = next(part for part in parts if part.spec.name == winner.template)

    def run(self) -> None:
        """Add a row for every change.

        Raises:
            ValueError: The winner itself fails.
        """
        self._evaluator.submit(self._winner)
        tried = changes(self._part, self._winner)
        for change in tried:
            if change.candidate is not None:
                self._evaluator.submit(change.candidate)
        outcome = self._evaluator.evaluate(self._winner, give_up=False)
        if isinstance(outcome.outcome, Rejection):
            raise ValueError(f"the winner is rejected: {outcome.outcome}")
        self._add(None, outcome, {"ratio": 1.0})
        right: dict[Change, Evaluated] = {}
        end_s = time.monotonic() + self._seconds[0]
        for change in tried:
            found, reason = self._tried(change, end_s)
            if found is not None and not reason:
                right[change] = found
            else:
                self._add(change, found, reason)
        self._race(right)

    def _tried(self, change: Change, end_s: float) -> tuple[Evaluated | None, dict[str, object]]:
        """Return what became of a change, and why it cannot race if it cannot."""
        if change.candidate is None:
            return None, {"stage": "constraints", "note": change.broken}
        source = self._evaluator.source
        if source(change.candidate).sha256 == source(self._winner).sha256:
            return None, {"note": "leaves the code as it is"}
        if time.monotonic() > end_s:
            return None, {"stage": "not tried", "note": "the time was spent"}
        found = self._evaluator.evaluate(change.candidate, give_up=False)
        if isinstance(found.outcome, Rejection):
            return found, {"stage": found.outcome.stage, "note": found.outcome.reason[:300]}
        return found, {}

    def _race(self, right: Mapping[Change, Evaluated]) -> None:
        """Race all that is right beside the winner; by parameter where that fails."""
        names = dict.fromkeys(change.parameter for change in right)
        by_parameter = [[item for item in right if item.parameter == name] for name in names]
        if self._raced(list(right), right, self._seconds[1]):
            return
        for group in by_parameter:
            seconds = self._seconds[1] * len(group) / len(right)
            if not self._raced(group, right, seconds):
                for change in group:
                    self._add(change, right[change], {"note": "cannot be raced"})

    def _raced(
        self, group: Sequence[Change], right: Mapping[Change, Evaluated], seconds: float
    ) -> bool:
        if not group:
            return True
        source = self._evaluator.source
        sources = [(REFERENCE, source(self._winner))]
        sources += [
            (change.label, source(change.candidate)) for change in group if change.candidate
        ]
        options = {"seed": 0, "rival": False, "verify": False}
        try:
            task = self._evaluator.subject.task
            reply = survey(self._workers, task, sources, budget_s=seconds, options=options)
        except Lethal as lethal:
            reply = {"rejection": str(lethal)}
        if "rejection" in reply:
            print(f"  the race is rejected: {reply['rejection']}", flush=True)
            return False
        result = codec.from_json(RaceResult, reply["race"])
        refused = dict(result.refused)
        for change in group:
            row: dict[str, object] = {"note": refused.get(change.label)}
            if change.label in dict(result.times_ms):
                ratio = finals.ratio(result, change.label, REFERENCE)
                row = {
                    **{"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high},
                    "median_ms": finals.timing(result, change.label).median_ms,
                    "note": f"{len(result.copy_ms)} blocks, {result.regime} caches",
                }
            self._add(change, right[change], row)
        return True

    def _add(
        self, change: Change | None, found: Evaluated | None, row: Mapping[str, object]
    ) -> None:
        workload = self._evaluator.subject.task.workload
        about: dict[str, object] = {
            "kernel": workload.kernel,
            "workload": workload,
            "template": self._part.spec.name,
            "parameter": change.parameter if change else REFERENCE,
            "winner_value": format_value(change.before) if change else self._winner,
            "value": format_value(change.after) if change else None,
            "also": change.also if change else None,
        }
        if found is not None:
            about |= {"median_ms": found.median_ms}
            names = ("registers", "spills", "shared_bytes")
            about |= {name: getattr(found.resources, name) for name in names}
        self._output.add(about | dict(row))
        label = change.label if change else REFERENCE
        print(f"  {label}: {row.get('ratio') or row.get('stage') or row.get('note')}", flush=True)


def _measure(
    options: argparse.Namespace,
    workers: Workers,
    subject: Subject,
    winner: Candidate,
    output: OwnRows,
) -> None:
    catalog = Catalog(options.kernels)
    evaluator = Evaluator(subject, Renderer(catalog.template_folders), workers)
    print(f"{subject.task.workload.kernel} {subject.task.workload}: {winner}", flush=True)
    seconds = (options.try_seconds, options.seconds)
    Ablation(winner, evaluator, workers, output=output, seconds=seconds).run()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    parser.add_argument("--kernel", nargs="+", default=KERNELS)
    parser.add_argument("--kernels", nargs="*", type=Path, default=[], help="your own folders")
    parser.add_argument("--workload", nargs="+", default=[], help="one of each if left out")
    parser.add_argument("--package", type=Path, default=Path("kernels_generated"))
    parser.add_argument("--store", type=Path, help="whose winners are taken instead")
    parser.add_argument("--try-seconds", type=float, default=45.0, help="to try all changes")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each race")
    parser.add_argument("--jobs", type=int, help="compile children; all cores if left out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return the exit status."""
    options = _options(arguments)
    environment, failures = dict(os.environ), 0
    with (
        tempfile.TemporaryDirectory(prefix="ablations-") as folder,
        workers_for(
            options.device, Path(folder), environment, jobs=options.jobs, limits=LIMITS
        ) as workers,
    ):
        info = workers.info()
        output = OwnRows(options.output, info.name, COLUMNS)
        catalog = Catalog(options.kernels)
        found = chosen(options, list(winners_of(options, info)))
        print(f"{len(found)} winners for {info.arch}", flush=True)
        for workload, winner in found.items():
            try:
                spec = load_space(catalog.space_path(workload.kernel))
                subject = subject_of(catalog, info, spec, workload)
                _measure(options, workers, subject, winner, output)
            except Exception:  # the other workloads' rows are worth having
                traceback.print_exc()
                failures += 1
    return 0 if found and not failures else 1


if __name__ == "__main__":
    start(main)
