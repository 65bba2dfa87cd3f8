"""What the sampler proposes for a workload, compiled ahead of its evaluation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

import optuna

from tuner.budget import Countdown
from tuner.children.task import Compiled
from tuner.guesses import guesses
from tuner.records import Candidate, Measurement, Outcome, Rejection, Source, Trial
from tuner.search import sampler
from tuner.session import Session, Subject

_AHEAD_PER_JOB = 2


@dataclass(slots=True)
class Proposal:
    """A candidate that the sampler asks about.

    Attributes:
        asked: Optuna's trial.
        candidate: What to evaluate.
        source: The candidate, rendered.
        future: Its compilation; None where it is known not to be worth one.
        started: When it was proposed, by the monotonic clock.
    """

    asked: optuna.trial.Trial
    candidate: Candidate
    source: Source
    future: Future[Compiled | Rejection] | None
    started: float


class Proposals:
    """Candidates whose sources are new, the workload's first guesses before all others.

    Args:
        session: What the studies of the run share.
        subject: What to tune for.
        known: Outcomes by the source's hash; who evaluates adds to them.

    Attributes:
        pending: What was proposed and not yet taken.
    """

    def __init__(self, session: Session, subject: Subject, known: Mapping[str, Outcome]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._session, self._subject, self._known = session, subject, known
        self._sampler = sampler.FeasibleSampler(subject.feasible, seed=session.seed)
        self._study = optuna.create_study(sampler=self._sampler)
        self.pending: list[Proposal] = []

    def learn(self, trial: Trial) -> None:
        """Take in a trial of an earlier run."""
        self._study.add_trial(sampler.frozen_trial(self._subject.feasible, trial))

    def guess(self) -> None:
        """Line up what is likely to be good; the default comes first."""
        for candidate in guesses(self._subject, self._session.store.winners):
            self._study.enqueue_trial(sampler.as_params(candidate), skip_if_exists=True)

    def refill(self, countdown: Countdown) -> None:
        """Propose and compile as far ahead as there are children for it and budget left."""
        ahead = _AHEAD_PER_JOB * self._session.jobs
        while len(self.pending) < ahead and not countdown.spent:
            left = countdown.trials_left
            if left is not None and len(self.pending) >= left:
                return
            proposed = self.propose()
            if proposed is None:
                return
            self.pending.append(proposed)

    def propose(self) -> Proposal | None:
        """Ask for a candidate whose source is new and start its compilation; None at the end."""
        while (asked := sampler.ask(self._study, self._subject.feasible)) is not None:
            trial, candidate = asked
            source = self._subject.render(self._session.renderer, candidate)
            known = self._known.get(source.sha256)
            if known is not None:
                self._tell(trial, known)
                continue
            future = None
            if self.condemned(source) is None:
                future = self._session.workers.compile(self._subject.task, source)
            return Proposal(trial, candidate, source, future, time.monotonic())
        return None

    def take(self) -> Proposal:
        """Remove and return the most promising of those whose compilation ended.

        Where compiling disturbs a measurement, all compilations end before.
        """
        futures = [item.future for item in self.pending if item.future is not None]
        waits_for = ALL_COMPLETED if self._session.shares_host else FIRST_COMPLETED
        wait(futures, return_when=waits_for)
        ready = [item for item in self.pending if item.future is None or item.future.done()]
        first = self._sampler.most_promising(self._study, [item.asked for item in ready])
        taken = next(item for item in ready if item.asked is first)
        self.pending.remove(taken)
        return taken

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """Let the sampler learn how a candidate fared."""
        self._tell(proposal.asked, outcome)

    def condemned(self, source: Source) -> Rejection | None:
        """Return what is known against a source before it is tried."""
        store = self._session.store
        refused = store.refused(self._subject.task.workload, source.sha256)
        return store.quarantined(source.sha256) or refused

    def cancel(self) -> None:
        """Drop what is pending and compile no more of it."""
        for item in self.pending:
            if item.future is not None:
                item.future.cancel()
        self.pending.clear()

    def _tell(self, asked: optuna.trial.Trial, outcome: Outcome) -> None:
        if isinstance(outcome, Measurement):
            self._study.tell(asked, outcome.median_ms)
        else:  # PRUNED, since Optuna's samplers learn nothing from a trial that is told as FAIL
            asked.set_user_attr("stage", outcome.stage)
            asked.set_user_attr("reason", outcome.reason)
            self._study.tell(asked, state=optuna.trial.TrialState.PRUNED)
