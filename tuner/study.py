"""The search of one workload: ask, compile ahead, evaluate, tell, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass

import optuna

from tuner.budget import Countdown
from tuner.children.host import HostLost
from tuner.children.task import Compiled
from tuner.children.worker import Lethal
from tuner.guesses import guesses
from tuner.records import Candidate, Measurement, Outcome, Rejection, Source, Trial, TunerError
from tuner.search import sampler
from tuner.session import Session, Subject

_AHEAD_PER_JOB = 2

Report = Callable[[Trial], None]


class DefaultRejected(TunerError):
    """The default candidate is not eligible, so there is nothing to compare with."""


@dataclass(slots=True)
class _Pending:
    asked: optuna.trial.Trial
    candidate: Candidate
    source: Source
    future: Future[Compiled | Rejection] | None
    started: float


class Study:
    """Searches one workload, from where the store's trials leave off.

    Args:
        session: What the studies of the run share.
        subject: What to tune for.

    Attributes:
        exhausted: Whether `run` ended because nothing was left to try.
    """

    def __init__(self, session: Session, subject: Subject) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._session = session
        self._subject = subject
        self.feasible = subject.feasible
        self._known: dict[str, Outcome] = {}
        self._trials: list[Trial] = []
        self.exhausted = False
        self._sampler = sampler.FeasibleSampler(subject.feasible, seed=session.seed)
        self._study = optuna.create_study(sampler=self._sampler)
        self._absorb()
        for candidate in guesses(subject, session.store.winners):  # the default comes first
            self._study.enqueue_trial(sampler.as_params(candidate), skip_if_exists=True)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Finished trials whose source is the one that its candidate has now."""
        return tuple(self._trials)

    @property
    def timed(self) -> dict[Candidate, Measurement]:
        """The variants that were timed."""
        return {
            trial.candidate: trial.outcome
            for trial in self._trials
            if isinstance(trial.outcome, Measurement)
        }

    @property
    def best_ms(self) -> float | None:
        """Median time of the fastest variant so far."""
        return min((item.median_ms for item in self.timed.values()), default=None)

    @property
    def default_ms(self) -> float | None:
        """Median time of the default candidate, once it is timed."""
        timed = self.timed.get(self.feasible.default)
        return timed.median_ms if timed else None

    def run(self, countdown: Countdown, report: Report) -> None:
        """Evaluate candidates until the budget is spent or nothing is left to try.

        Args:
            countdown: The budget.
            report: Called with every finished trial, after it is on disk.

        Raises:
            DefaultRejected: The default candidate is not eligible.
            HostLost: The machine that measures is gone, or one that compiles.
        """
        pending: list[_Pending] = []
        try:
            self._evaluate_default(pending, countdown, report)
            self._refill(pending, countdown)
            while pending and countdown.seconds_left != 0:
                item = self._next(pending)
                countdown.count_trial()
                outcome = self._outcome_of(item)
                self._settle(item, outcome, report)
                pending.remove(item)
                if not pending or not self._session.shares_host:
                    self._refill(pending, countdown)
            self.exhausted = not (pending or countdown.spent)
        except HostLost as lost:
            lost.unfinished = tuple(item.candidate for item in pending)
            raise
        finally:
            for item in pending:
                if item.future is not None:
                    item.future.cancel()

    def _next(self, pending: list[_Pending]) -> _Pending:
        """Return the most promising of the candidates whose compilation ended.

        Where compiling disturbs a measurement, all compilations end before.
        """
        futures = [item.future for item in pending if item.future is not None]
        waits_for = ALL_COMPLETED if self._session.shares_host else FIRST_COMPLETED
        wait(futures, return_when=waits_for)
        ready = [item for item in pending if item.future is None or item.future.done()]
        first = self._sampler.most_promising(self._study, [item.asked for item in ready])
        return next(item for item in ready if item.asked is first)

    def reject(self, candidate: Candidate, rejection: Rejection, report: Report) -> None:
        """Take back that a candidate is eligible: it failed a check that came later."""
        self._trials = [trial for trial in self._trials if trial.candidate != candidate]
        source = self._subject.render(self._session.renderer, candidate)
        self._known[source.sha256] = rejection
        workload = self._subject.task.workload
        trial = self._session.store.add_trial(
            workload, candidate, source.sha256, rejection, seconds=0.0
        )
        self._trials.append(trial)
        report(trial)

    def _evaluate_default(
        self, pending: list[_Pending], countdown: Countdown, report: Report
    ) -> None:
        default = self._subject.feasible.default
        source = self._subject.render(self._session.renderer, default)
        if source.sha256 not in self._known:
            countdown.count_trial()
            item = self._propose()
            assert item is not None
            if not self._session.shares_host:  # compiling disturbs no measurement
                self._refill(pending, countdown)
            self._settle(item, self._outcome_of(item), report)
        outcome = self._known.get(source.sha256)
        if isinstance(outcome, Rejection):
            raise DefaultRejected(
                f"{self._subject.task.workload}: the default candidate {default} was rejected at "
                f"stage {outcome.stage}: {outcome.reason}"
            )

    def _refill(self, pending: list[_Pending], countdown: Countdown) -> None:
        ahead = _AHEAD_PER_JOB * self._session.jobs
        while len(pending) < ahead and not countdown.spent:
            left = countdown.trials_left
            if left is not None and len(pending) >= left:
                return
            proposed = self._propose()
            if proposed is None:
                return
            pending.append(proposed)

    def _propose(self) -> _Pending | None:
        """Ask for a candidate whose source is new and start its compilation; None at the end."""
        while (asked := sampler.ask(self._study, self._subject.feasible)) is not None:
            trial, candidate = asked
            source = self._subject.render(self._session.renderer, candidate)
            known = self._known.get(source.sha256)
            if known is not None:
                self._tell(trial, known)
                continue
            future = None
            if self._condemned(source) is None:
                future = self._session.workers.compile(self._subject.task, source)
            return _Pending(trial, candidate, source, future, time.monotonic())
        return None

    def _settle(self, item: _Pending, outcome: Outcome, report: Report) -> None:
        trial = self._session.store.add_trial(
            self._subject.task.workload,
            item.candidate,
            item.source.sha256,
            outcome,
            seconds=time.monotonic() - item.started,
        )
        self._tell(item.asked, outcome)
        self._known[item.source.sha256] = outcome
        self._trials.append(trial)
        report(trial)

    def _outcome_of(self, item: _Pending) -> Outcome:
        condemned = self._condemned(item.source)
        if condemned is not None or item.future is None:
            assert condemned is not None
            return condemned
        try:
            compiled = self._subject.judge(item.candidate, item.future.result())
            if isinstance(compiled, Rejection):
                return compiled
            return self._session.workers.evaluate(
                self._subject.task, item.source, compiled, give_up_ms=self.best_ms
            )
        except Lethal as lethal:
            self._session.store.add_quarantine(item.source.sha256, lethal.rejection)
            return lethal.rejection
        except CancelledError:
            raise KeyboardInterrupt from None

    def _condemned(self, source: Source) -> Rejection | None:
        """Return what is known against a source before it is tried."""
        store = self._session.store
        refused = store.refused(self._subject.task.workload, source.sha256)
        return store.quarantined(source.sha256) or refused

    def _tell(self, asked: optuna.trial.Trial, outcome: Outcome) -> None:
        if isinstance(outcome, Measurement):
            self._study.tell(asked, outcome.median_ms)
        else:  # PRUNED, since Optuna's samplers learn nothing from a trial that is told as FAIL
            asked.set_user_attr("stage", outcome.stage)
            asked.set_user_attr("reason", outcome.reason)
            self._study.tell(asked, state=optuna.trial.TrialState.PRUNED)

    def _absorb(self) -> None:
        """Take over the store's trials of this workload, as far as their sources still stand."""
        workload, feasible = self._subject.task.workload, self._subject.feasible
        latest = {
            trial.candidate: trial
            for trial in self._session.store.trials
            if trial.workload == workload and trial.candidate in feasible
        }
        for candidate, trial in latest.items():
            source = self._subject.render(self._session.renderer, candidate)
            if source.sha256 == trial.source_sha256:
                self._known[trial.source_sha256] = trial.outcome
                self._trials.append(trial)
                self._study.add_trial(sampler.frozen_trial(feasible, trial))
