"""Candidates that the tuner's children compile ahead, verify and time, each source once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from statistics import median

from tuner.catalog import device_class
from tuner.children.task import Compiled, Limits
from tuner.children.worker import Lethal, Workers
from tuner.records import Candidate, Measurement, Outcome, Rejection, Resources, Source
from tuner.render import Renderer
from tuner.session import Subject

LIMITS = Limits(compile_s=40.0, run_s=20.0)
"""How long one candidate may take where the time of the device is short."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What became of a candidate, and what that took.

    Attributes:
        outcome: Its time or its rejection.
        compile_s: Seconds that a core compiled.
        measure_s: Seconds that the device was in use: verification and timing.
        resources: What the compiler said.
    """

    outcome: Outcome
    compile_s: float
    measure_s: float
    resources: Resources = Resources()

    @property
    def median_ms(self) -> float | None:
        """Its time; None if it failed."""
        return self.outcome.median_ms if isinstance(self.outcome, Measurement) else None


class Evaluator:
    """Evaluates candidates of one workload.

    Args:
        subject: The workload.
        renderer: Renders the candidates.
        workers: The children.
    """

    def __init__(self, subject: Subject, renderer: Renderer, workers: Workers) -> None:
        self.subject, self._renderer, self._workers = subject, renderer, workers
        self._futures: dict[str, Future[Compiled | Rejection]] = {}
        self._known: dict[str, Evaluated] = {}
        self._compile_s: list[float] = []
        self._paced = not device_class(subject.task.device.kind).shares_host
        self._fastest: tuple[float, Source] | None = None

    @property
    def best_ms(self) -> float | None:
        """The least time so far."""
        return self._fastest and self._fastest[0]

    def source(self, candidate: Candidate) -> Source:
        """Return a candidate's source."""
        return self.subject.render(self._renderer, candidate)

    def submit(self, candidate: Candidate) -> None:
        """Start a candidate's compilation, unless its source was seen before."""
        source = self.source(candidate)
        if source.sha256 not in self._futures:
            task = self.subject.task
            self._futures[source.sha256] = self._workers.compile(task, source)

    def compiled(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return those submitted candidates whose compilation ended, once there is one."""
        futures = {item: self._futures[self.source(item).sha256] for item in candidates}
        wait(futures.values(), return_when=FIRST_COMPLETED)
        return [item for item, future in futures.items() if future.done()]

    def evaluate(self, candidate: Candidate, *, give_up: bool) -> Evaluated:
        """Return a submitted candidate's outcome, evaluated now if its source never was.

        Args:
            candidate: The candidate.
            give_up: Whether to stop early where it is far slower than the best so far.
        """
        source = self.source(candidate)
        if source.sha256 not in self._known:
            found = self._evaluate(candidate, source, give_up)
            self._known[source.sha256] = found
            time_ms = found.median_ms
            if time_ms is not None and time_ms < (self.best_ms or math.inf):
                self._fastest = time_ms, source
        return self._known[source.sha256]

    def _evaluate(self, candidate: Candidate, source: Source, give_up: bool) -> Evaluated:
        subject = self.subject
        start_s = time.monotonic()
        try:
            built = self._futures[source.sha256].result()
        except Lethal as lethal:
            return Evaluated(lethal.rejection, time.monotonic() - start_s, 0.0)
        if isinstance(built, Rejection):
            # What a compiler takes to refuse is not told: about what it takes to accept.
            usual_s = median(self._compile_s) if self._compile_s else 0.0
            return Evaluated(built, usual_s, 0.0)
        self._compile_s.append(built.compile_s)
        fit = subject.judge(candidate, built)
        if isinstance(fit, Rejection):
            return Evaluated(fit, built.compile_s, 0.0, built.resources)
        start_s = time.monotonic()
        outcome: Outcome
        try:
            best_ms, best = self._fastest if give_up and self._fastest else (None, None)
            outcome = self._workers.evaluate(
                *(subject.task, source, built),
                give_up_ms=best_ms,
                pacer=best if self._paced else None,
            )
        except Lethal as lethal:
            outcome = lethal.rejection
        return Evaluated(outcome, built.compile_s, time.monotonic() - start_s, built.resources)
