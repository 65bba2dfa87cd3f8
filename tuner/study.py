"""The search of one workload: ask, compile ahead, evaluate, tell, until the budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor

from tuner.budget import Countdown
from tuner.children.host import HostLost
from tuner.children.worker import Lethal
from tuner.proposals import Proposal, Proposals
from tuner.records import (
    Candidate,
    Measurement,
    Outcome,
    Rejection,
    Source,
    Trial,
    TunerError,
)
from tuner.session import Session, Subject

Report = Callable[[Trial], None]


class DefaultRejected(TunerError):
    """The default candidate is not eligible, so there is nothing to compare with."""


class Study:
    """Searches one workload, from where the store's trials leave off.

    Args:
        session: What the studies of the run share.
        subject: What to tune for.

    Attributes:
        exhausted: Whether `run` ended because nothing was left to try.
    """

    def __init__(self, session: Session, subject: Subject) -> None:
        self._session = session
        self._subject = subject
        self.feasible = subject.feasible
        self._known: dict[str, Outcome] = {}
        self._trials: list[Trial] = []
        self.exhausted = False
        self._proposals = Proposals(session, subject, self._known)
        self._absorb()
        self._proposals.guess()

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
        proposals = self._proposals
        item: Proposal | None = None
        try:
            self._evaluate_default(countdown, report)
            proposals.refill(countdown)
            while proposals.pending and countdown.seconds_left != 0:
                item = proposals.take()
                if (twin := self._twin_of(item)) is not None:
                    self._learn(item, twin)
                else:
                    countdown.count_trial()
                    self._settle(item, self._outcome_beside(item, countdown), report)
                item = None
                if not proposals.pending:
                    proposals.refill(countdown)
            self.exhausted = not (proposals.pending or countdown.spent)
        except HostLost as lost:
            unfinished = [*filter(None, [item]), *proposals.pending]
            lost.unfinished = tuple(one.candidate for one in unfinished)
            raise
        finally:
            proposals.cancel()

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

    def _evaluate_default(self, countdown: Countdown, report: Report) -> None:
        default = self._subject.feasible.default
        source = self._subject.render(self._session.renderer, default)
        if source.sha256 not in self._known:
            countdown.count_trial()
            item = self._proposals.propose()
            assert item is not None
            self._settle(item, self._outcome_beside(item, countdown), report)
        outcome = self._known.get(source.sha256)
        if isinstance(outcome, Rejection):
            raise DefaultRejected(
                f"{self._subject.task.workload}: the default candidate {default} was rejected at "
                f"stage {outcome.stage}: {outcome.reason}"
            )

    def _outcome_beside(self, item: Proposal, countdown: Countdown) -> Outcome:
        """Return a candidate's outcome; the device measures while the next ones are proposed.

        Where compiling disturbs a measurement, nothing is proposed meanwhile.
        """
        if self._session.shares_host:
            return self._outcome_of(item)
        with ThreadPoolExecutor(1, thread_name_prefix="propose") as beside:
            proposed = beside.submit(self._proposals.refill, countdown)
            outcome = self._outcome_of(item)
        proposed.result()
        return outcome

    def _settle(self, item: Proposal, outcome: Outcome, report: Report) -> None:
        trial = self._session.store.add_trial(
            self._subject.task.workload,
            item.candidate,
            item.source.sha256,
            outcome,
            seconds=time.monotonic() - item.started,
        )
        self._learn(item, outcome)
        self._trials.append(trial)
        report(trial)

    def _learn(self, item: Proposal, outcome: Outcome) -> None:
        self._proposals.tell(item, outcome)
        self._known[item.source.sha256] = outcome

    def _twin_of(self, item: Proposal) -> Measurement | None:
        """Return the measurement of a variant that does the same, launch for launch."""
        if item.future is None or item.future.cancelled() or item.future.exception() is not None:
            return None
        compiled = item.future.result()
        code = None if isinstance(compiled, Rejection) else compiled.resources.code
        same = (timed for timed in self.timed.values() if timed.resources.code == code)
        return None if code is None else next(same, None)

    def _outcome_of(self, item: Proposal) -> Outcome:
        condemned = self._proposals.condemned(item.source)
        if condemned is not None or item.future is None:
            assert condemned is not None
            return condemned
        try:
            compiled = self._subject.judge(item.candidate, item.future.result())
            if isinstance(compiled, Rejection):
                return compiled
            return self._session.workers.evaluate(
                *(self._subject.task, item.source, compiled),
                give_up_ms=self.best_ms,
                pacer=self._pacer(),
            )
        except Lethal as lethal:
            self._session.store.add_quarantine(item.source.sha256, lethal.rejection)
            return lethal.rejection
        except CancelledError:
            raise KeyboardInterrupt from None

    def _pacer(self) -> Source | None:
        """Return the fastest so far, but on a shared host, whose pace changes within a visit."""
        timed = self.timed
        if self._session.shares_host or not timed:
            return None
        fastest = min(timed, key=lambda candidate: timed[candidate].median_ms)
        return self._subject.render(self._session.renderer, fastest)

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
                self._proposals.learn(trial)
