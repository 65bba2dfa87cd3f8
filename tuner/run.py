"""A whole run: the study and the final of each workload, one after the other."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import Protocol

from tuner import codec
from tuner.budget import Budget, Countdown
from tuner.children.worker import Lethal
from tuner.records import (
    Candidate,
    Failure,
    Interval,
    Measurement,
    Rejection,
    Trial,
    TunerError,
    Winner,
    Workload,
)
from tuner.session import Session, Subject
from tuner.study import DefaultRejected, Study
from tuner.timing import finals
from tuner.timing.race import RaceResult

RIVAL = "rival"
"""Label of the library operation in a race."""

_FINALISTS = 4
_FINAL_SHARE = 0.2
_CUT = "interrupted before a winner was known"
_FINAL_LEAST_S = 1.0
_FINAL_MOST_S = 10.0
_FINAL_BLOCKS = 15
_FINAL_CEILING_S = 40.0


class Observer(Protocol):
    """Is told what happens in a run."""

    def begin(self, study: Study, workload: Workload, countdown: Countdown) -> None:
        """Learn that the search of a workload begins."""

    def trial(self, trial: Trial) -> None:
        """Learn of a finished trial."""

    def final(self, workload: Workload, contenders: int) -> None:
        """Learn that the best few of a workload race."""

    def end(self, result: Winner | Failure) -> None:
        """Learn how a workload ended."""


def run(
    session: Session, subjects: Sequence[Subject], budget: Budget, observer: Observer
) -> list[Winner | Failure]:
    """Tune for each subject and return how each ended, in their order.

    An interrupt ends the search; the workload at hand still gets its final, and those not begun
    are left as the store has them. Each subject gets its weight's part of the budget.

    Args:
        session: What the studies share.
        subjects: What to tune for.
        budget: For all of them together.
        observer: Is told what happens.
    """
    results: list[Winner | Failure] = []
    total = Countdown(budget)
    for number, subject in enumerate(subjects):
        ahead = subjects if budget.trials else subjects[number:]
        part = subject.weight / sum(item.weight for item in ahead)
        left = Budget(total.seconds_left, budget.trials).share(part)
        result, interrupted = tune(session, subject, left, observer)
        results.append(result)
        if interrupted:
            break
    return results


def tune(
    session: Session, subject: Subject, budget: Budget, observer: Observer
) -> tuple[Winner | Failure, bool]:
    """Search one workload and race its best; return how it ended and whether by an interrupt.

    Raises:
        HostLost: The machine that measures is gone; the store has what it measured.
    """
    interrupted = False
    result: Winner | Failure
    try:
        tuning = _Tuning(session, subject, budget, observer)
        result = tuning.run()
        interrupted = tuning.interrupted
    except DefaultRejected as error:
        result = Failure(subject.task.workload, str(error))
    except KeyboardInterrupt:  # while the search was prepared, or in the final
        session.workers.restart()
        interrupted, result = True, Failure(subject.task.workload, _CUT)
    observer.end(result)
    return result, interrupted


class _Tuning:
    """The study and the final of one workload."""

    def __init__(
        self, session: Session, subject: Subject, budget: Budget, observer: Observer
    ) -> None:
        self._session = session
        self._subject = subject
        self._observer = observer
        self._workload = subject.task.workload
        self._study = Study(session, subject)
        self._final_s = _final_seconds(budget)
        search = budget
        if budget.seconds is not None:
            search = Budget(seconds=max(budget.seconds - self._final_s, 0.0))
        self._countdown = Countdown(search, session.stop)
        self.interrupted = False

    def run(self) -> Winner | Failure:
        self._observer.begin(self._study, self._workload, self._countdown)
        try:
            self._study.run(self._countdown, self._observer.trial)
        except KeyboardInterrupt:
            self.interrupted = True
            self._session.workers.restart()
            self._final_s = _FINAL_LEAST_S
        if self._session.stop.is_set():
            self._final_s = _FINAL_LEAST_S
        finalists = self._finalists()
        if not finalists:
            return Failure(self._workload, _CUT if self.interrupted else "no candidate is valid")
        self._final_s = max(self._final_s, _seconds_to_decide(finalists))
        self._observer.final(self._workload, len(finalists))
        winner = self._race(finalists)
        self._session.store.add_winner(winner)
        return winner

    def _finalists(self) -> dict[Candidate, Measurement]:
        """Return the default and the fastest few that are right on every odd shape too."""
        default = self._subject.feasible.default
        timed = {
            trial.candidate: trial.outcome
            for trial in self._study.trials
            if isinstance(trial.outcome, Measurement)
        }
        ranked = sorted(timed, key=lambda candidate: timed[candidate].median_ms)
        self._compile_edges([default, *ranked[:_FINALISTS]])
        chosen: dict[Candidate, Measurement] = {}
        for candidate in (default, *(item for item in ranked if item != default)):
            if candidate in timed and self._is_right(candidate):
                chosen[candidate] = timed[candidate]
            if len(chosen) > _FINALISTS:
                break
        if chosen and default not in chosen:
            raise DefaultRejected(f"{self._workload}: the default fails on odd shapes")
        return chosen

    def _compile_edges(self, candidates: Sequence[Candidate]) -> None:
        """Compile what the checks on odd shapes call, all at once; a failure shows there."""
        workers, task = self._session.workers, self._subject.task
        sources = [self._subject.render(self._session.renderer, item) for item in candidates]
        wait([workers.compile(task, source, edges=True) for source in sources])

    def _is_right(self, candidate: Candidate) -> bool:
        source = self._subject.render(self._session.renderer, candidate)
        path = self._session.workers.path_of(source)
        try:
            rejection = self._session.workers.verify(self._subject.task, path, source.language)
        except Lethal as lethal:
            rejection = lethal.rejection
            self._session.store.add_quarantine(source.sha256, rejection)
        if rejection is not None:
            self._study.reject(candidate, rejection, self._observer.trial)
        return rejection is None

    def _race(self, finalists: dict[Candidate, Measurement]) -> Winner:
        session, subject = self._session, self._subject
        default = next(iter(finalists))
        labels = {str(candidate): candidate for candidate in finalists}
        sources = {label: subject.render(session.renderer, labels[label]) for label in labels}
        reply = session.workers.race(
            subject.task, list(sources.items()), budget_s=self._final_s, seed=session.seed
        )
        if "rejection" in reply:
            rejection = codec.from_json(Rejection, reply["rejection"])
            raise TunerError(f"{self._workload}: rejected in its final: {rejection.reason}")
        result = codec.from_json(RaceResult, reply["race"])

        def simplicity(label: str) -> tuple[float, ...]:
            shared = finalists[labels[label]].resources.shared_bytes or 0
            return (shared, len(sources[label].text.splitlines()))

        pick = finals.pick(result, simplicity)
        rival = reply["rival"] if RIVAL in dict(result.times_ms) else None
        return Winner(
            workload=self._workload,
            candidate=labels[pick.winner],
            default_candidate=default,
            source=sources[pick.winner],
            default=sources[str(default)],
            measurement=_measurement(result, pick.winner, finalists[labels[pick.winner]]),
            default_measurement=_measurement(result, str(default), finalists[default]),
            gain=pick.gain,
            rival=rival,
            rival_measurement=_measurement(result, RIVAL, None) if rival else None,
            rival_ratio=_rival_ratio(result, pick.winner) if rival else None,
            ties=tuple(labels[label] for label in pick.ties if label in labels),
            device=session.device,
            protocol=f"{result.method}, {result.regime} caches, interleaved blocks",
            seed=session.seed,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )


def _final_seconds(budget: Budget) -> float:
    share = _FINAL_MOST_S if budget.seconds is None else _FINAL_SHARE * budget.seconds
    return min(max(share, _FINAL_LEAST_S), _FINAL_MOST_S)


def _seconds_to_decide(finalists: Mapping[Candidate, Measurement]) -> float:
    """Return how long a race of these takes until it can tell anything, up to a limit.

    A block has the finalists, the rival, the copy of the default and a look at the default
    again; the last three are taken to be as slow as the default, which comes first.
    """
    times_ms = [measurement.median_ms for measurement in finalists.values()]
    block_s = (sum(times_ms) + 3 * times_ms[0]) * 1e-3
    return min(_FINAL_BLOCKS * block_s, _FINAL_CEILING_S)


def _rival_ratio(result: RaceResult, winner: str) -> Interval:
    return finals.ratio(result, RIVAL, winner)


def _measurement(result: RaceResult, label: str, trial: Measurement | None) -> Measurement:
    timing = finals.timing(result, label)
    return Measurement(
        median_ms=timing.median_ms,
        low_ms=timing.low_ms,
        high_ms=timing.high_ms,
        samples=timing.samples,
        regime=timing.regime,
        compile_s=trial.compile_s if trial else 0.0,
        **({"resources": trial.resources} if trial else {}),
    )
