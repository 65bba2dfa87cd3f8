"""Whole tuning runs of one workload that share children and nothing that they learn."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tuner.budget import Budget, Countdown
from tuner.catalog import device_class
from tuner.children.task import Compiled
from tuner.children.worker import Lethal, Workers
from tuner.records import Candidate, ChildError, Failure, Measurement, Trial, Winner, Workload
from tuner.render import Renderer
from tuner.run import tune
from tuner.session import Question, Session, Subject
from tuner.store import Store
from tuner.study import Study


@dataclass(frozen=True, slots=True)
class Choice:
    """What one run came to.

    Attributes:
        seed: Seed of the run.
        winner: What it chose, with its own evidence.
        timed_ms: What its search timed, in milliseconds.
        trials: Number of candidates that it tried.
        seconds: How long it took, the final and the check on odd shapes included.
    """

    seed: int
    winner: Winner
    timed_ms: Mapping[Candidate, float]
    trials: int
    seconds: float

    @property
    def fastest(self) -> Candidate:
        """The candidate that its search saw the least time of."""
        return min(self.timed_ms, key=lambda item: self.timed_ms[item])

    def passed_over(self, better: Candidate) -> str:
        """Return how it came that the run did not choose something better that it had timed."""
        rank = sum(time_ms <= self.timed_ms[better] for time_ms in self.timed_ms.values())
        tied = "tied" if better in self.winner.ties else "did not tie"
        return f"the best that it timed was number {rank} of its search and {tied} in its final"


class SeededRuns:
    """Runs of one workload.

    Args:
        subject: The workload.
        workers: The children, which keep what they have compiled.
        renderer: Renders the candidates.
        folder: Where each run gets a store of its own.
    """

    def __init__(
        self, subject: Subject, workers: Workers, renderer: Renderer, folder: Path
    ) -> None:
        self.subject, self.workers, self.renderer = subject, workers, renderer
        self._folder = folder
        self._right: set[Question] = set()  # what is right for one run is so for all

    def warm_up(self) -> None:
        """Start all children and prepare the one that measures: no run's time goes into that."""
        self.workers.warm_up()
        task, default = self.subject.task, self.subject.feasible.default
        source = self.subject.render(self.renderer, default)
        with suppress(Lethal, ChildError):  # the runs say so, too
            built = self.workers.compile(task, source).result()
            if isinstance(built, Compiled):
                self.workers.evaluate(task, source, built, give_up_ms=None)

    def run(self, seed: int, budget: Budget) -> Choice | Failure:
        """Search from nothing and choose.

        Raises:
            KeyboardInterrupt: The user ended it.
        """
        device, began_s = self.subject.task.device, time.monotonic()
        store = Store(self._folder / f"run{seed}", device.arch)
        store.begin(device)
        session = Session(
            device,
            device_class(device.kind).shares_host,
            store=store,
            workers=self.workers,
            renderer=self.renderer,
            jobs=self.workers.jobs,
            seed=seed,
            right=self._right,
        )
        result, interrupted = tune(session, self.subject, budget, _Quiet())
        if interrupted:
            raise KeyboardInterrupt
        if isinstance(result, Failure):
            return result
        seconds = time.monotonic() - began_s
        return Choice(seed, result, _timed_ms(store), len(store.trials), seconds)


def _timed_ms(store: Store) -> dict[Candidate, float]:
    """Return the times of what a run timed and did not reject later."""
    latest = {trial.candidate: trial.outcome for trial in store.trials}
    return {
        candidate: outcome.median_ms
        for candidate, outcome in latest.items()
        if isinstance(outcome, Measurement)
    }


class _Quiet:
    """Is told what happens in a run and keeps it to itself."""

    def begin(self, study: Study, workload: Workload, countdown: Countdown) -> None:
        """Learn that the search begins."""

    def trial(self, trial: Trial) -> None:
        """Learn of a finished trial."""

    def final(self, workload: Workload, contenders: int) -> None:
        """Learn that the best few race."""

    def end(self, result: Winner | Failure) -> None:
        """Learn how it ended."""
