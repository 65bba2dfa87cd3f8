"""A whole run: the study and the final of each workload, then a second look at each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

from tuner.budget import Budget, Countdown
from tuner.final import Final
from tuner.guesses import neighbours
from tuner.records import Candidate, Failure, Measurement, Trial, Winner, Workload
from tuner.session import Session, Subject
from tuner.study import DefaultRejected, Study

_FINAL_SHARE = 0.1
_FINAL_LEAST_S = 1.0
_FINAL_MOST_S = 5.0
_AGAIN_SHARE = 0.1
_AGAIN_MOST_S = 5.0
"""Most seconds for a workload to be looked at again, and most of the budget for all of them."""

_CUT = "interrupted before a winner was known"


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
    are left as the store has them. Each subject gets its weight's part of the budget; what the one
    before took beyond its part, in its final say, is set aside, or the last would have nothing.

    Args:
        session: What the studies share.
        subjects: What to tune for.
        budget: For all of them together.
        observer: Is told what happens.
    """
    results: list[Winner | Failure] = []
    whole, total = Countdown(budget), Countdown(for_searches(budget, len(subjects)))
    overrun_s = 0.0
    for number, subject in enumerate(subjects):
        ahead = subjects if budget.trials else subjects[number:]
        part = subject.weight / sum(item.weight for item in ahead)
        left = Budget(total.seconds_left, budget.trials).share(part).less(overrun_s)
        began_s = total.seconds
        result, interrupted = tune(session, subject, left, observer)
        if left.seconds is not None:
            overrun_s = max(total.seconds - began_s - left.seconds, 0.0)
        results.append(result)
        if interrupted:
            return results
    return list(look_again(session, subjects, results, whole, observer))


def for_searches(budget: Budget, workloads: int) -> Budget:
    """Return what of a budget the searches may take, so that something is left to look again."""
    if budget.seconds is None or workloads == 1:
        return budget
    return budget.less(min(_AGAIN_SHARE * budget.seconds, _AGAIN_MOST_S * workloads))


def look_again(
    session: Session,
    subjects: Sequence[Subject],
    standing: Sequence[Winner | Failure],
    countdown: Countdown,
    observer: Observer,
) -> Iterator[Winner | Failure]:
    """Time for each workload what won for its neighbours after its own search; yield who wins now.

    Args:
        session: What measured before.
        subjects: What was tuned for.
        standing: How each ended.
        countdown: A budget; one in trials is for searches alone.
        observer: Is told what happens.
    """
    interrupted = False
    for subject, result in zip(subjects, standing, strict=True):
        store, workload = session.store, subject.task.workload
        store.refresh()  # what won on other cards
        tried = {trial.candidate for trial in store.trials if trial.workload == workload}
        untried = set(neighbours(subject, store.winners)) - tried
        over = interrupted or countdown.seconds_left in (None, 0) or session.stop.is_set()
        if over or not untried or isinstance(result, Failure):
            yield result
            continue
        budget = Budget(trials=len(untried))
        now, interrupted = tune(session, subject, budget, observer, standing=result)
        yield result if isinstance(now, Failure) else now


def tune(
    session: Session,
    subject: Subject,
    budget: Budget,
    observer: Observer,
    *,
    standing: Winner | None = None,
) -> tuple[Winner | Failure, bool]:
    """Search one workload and race its best; return how it ended and whether by an interrupt.

    Args:
        session: What the studies share.
        subject: What to tune for.
        budget: For this workload.
        observer: Is told what happens.
        standing: Who wins without a race unless something faster than it is found.

    Raises:
        HostLost: The machine that measures is gone; the store has what it measured.
    """
    interrupted = False
    result: Winner | Failure
    try:
        tuning = _Tuning(session, subject, budget, observer)
        result = tuning.run(standing)
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
        self._in_trials, search = budget.seconds is None, budget
        if budget.seconds is not None:
            self._final_s = final_seconds(budget.seconds)
            search = Budget(seconds=max(budget.seconds - self._final_s, 0.0))
        self._countdown = Countdown(search, session.stop)
        self.interrupted = False

    def run(self, standing: Winner | None) -> Winner | Failure:
        study = Study(self._session, self._subject)
        workload = self._subject.task.workload
        known = study.timed.keys()
        self._observer.begin(study, workload, self._countdown)
        try:
            study.run(self._countdown, self._observer.trial)
        except KeyboardInterrupt:
            self.interrupted = True
            self._session.workers.restart()
        if standing is not None and not _challenged(standing, study.timed, known):
            return standing
        if self.interrupted or self._session.stop.is_set():
            self._final_s = _FINAL_LEAST_S
        elif self._in_trials:  # those of earlier runs race, too
            searched_s = sum(trial.seconds for trial in study.trials)
            self._final_s = final_seconds(searched_s / (1 - _FINAL_SHARE))
        final = Final(self._session, self._subject, study, self._observer.trial)
        winner = final.hold(self._final_s, partial(self._observer.final, workload))
        if winner is None:
            return Failure(workload, _CUT if self.interrupted else "no candidate is valid")
        self._session.store.add_winner(winner)
        return winner


def _challenged(
    winner: Winner, timed: Mapping[Candidate, Measurement], known: Collection[Candidate]
) -> bool:
    """Return whether something that was not known is faster than a winner was in the search."""
    new_ms = [timed[candidate].median_ms for candidate in timed.keys() - known]
    mine = timed.get(winner.candidate)
    return bool(new_ms) and (mine is None or min(new_ms) < mine.median_ms)


def final_seconds(total_s: float) -> float:
    """Return how long a final may take of the seconds that search and final take together."""
    return min(max(_FINAL_SHARE * total_s, _FINAL_LEAST_S), _FINAL_MOST_S)
