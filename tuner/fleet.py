"""Several cards of one kind at a time: each takes whole workloads; cards may join and be lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol

from tuner.budget import Budget, Countdown
from tuner.children.host import HostLost
from tuner.records import Candidate, Failure, Winner, Workload
from tuner.run import Observer, for_searches, look_again, tune
from tuner.session import Session, Subject

_MOST_CARDS = 1024
_GLANCE_S = 0.5
"""Seconds between looks of an idle card at whether its run was stopped."""


class CardObserver(Observer, Protocol):
    """Is told what happens on one card."""

    def lost(self, workload: Workload, reason: str) -> None:
        """Learn that the card is gone, while it worked on a workload."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What a card takes: a workload and its part of the budget."""

    place: int
    subject: Subject
    budget: Budget


class _Queue:
    """Hands out workloads, each with its part of what is left of the budget."""

    def __init__(self, subjects: Sequence[Subject], budget: Budget) -> None:
        self._subjects = list(subjects)
        self._budget = budget
        self._total = Countdown(for_searches(budget, len(subjects)))
        self.countdown = Countdown(budget)
        self._waiting = list(range(len(subjects)))
        self._tried = [0] * len(subjects)
        self._changed = threading.Condition()
        self.unfinished = len(subjects)
        self.cards = 0

    def take(self, stop: threading.Event) -> _Share | None:
        """Return what to work on; wait while others might return theirs; None at the end."""
        with self._changed:
            while not self._waiting and self.unfinished and not stop.is_set():
                self._changed.wait(_GLANCE_S)
            if not self._waiting or stop.is_set():
                return None
            weights = [subject.weight for subject in self._subjects]
            ahead = sum(weights[place] for place in self._waiting)
            place = self._waiting.pop(0)
        if self._budget.trials is not None:
            whole = self._budget.share(weights[place] / sum(weights)).trials
            assert whole is not None
            part = Budget(trials=max(whole - self._tried[place], 0))
        else:
            left = Budget(self._total.seconds_left)
            part = left.share(min(self.cards * weights[place] / ahead, 1.0))
        return _Share(place, self._subjects[place], part)

    def finish(self) -> None:
        """Count a workload as done."""
        with self._changed:
            self.unfinished -= 1
            self._changed.notify_all()

    def put_back(self, share: _Share, tried: int, unfinished: Sequence[Candidate]) -> None:
        """Have another card take a workload, and first of all what was asked for and not told."""
        with self._changed:
            seeds = tuple(dict.fromkeys((*unfinished, *share.subject.seeds)))
            self._subjects[share.place] = replace(share.subject, seeds=seeds)
            self._tried[share.place] += tried
            self._waiting.insert(0, share.place)
            self.cards -= 1
            self._changed.notify_all()


class Fleet:
    """The cards of one kind and the workloads that they share.

    A workload is searched and raced on one card, since cards differ: one card's times are never
    compared with another's in a final. If a card is lost, another one goes on from what the
    store has of its workload.

    Args:
        subjects: What to tune for; the first come first.
        budget: For all of them together: seconds are the wall clock's, from now on.
    """

    def __init__(self, subjects: Sequence[Subject], budget: Budget) -> None:
        self._subjects = subjects
        self._queue = _Queue(subjects, budget)
        self._results: dict[int, Winner | Failure] = {}
        self._pool = ThreadPoolExecutor(_MOST_CARDS, thread_name_prefix="card")
        self._futures: list[Future[None]] = []
        self._sessions: list[Session] = []

    def join(self, session: Session, observer: CardObserver) -> None:
        """Have a card take workloads from now on."""
        self._queue.cards += 1
        self._sessions.append(session)
        self._futures.append(self._pool.submit(self._work, session, observer))

    @property
    def idle(self) -> bool:
        """Whether no card is at work, because all is done, all are lost or they were stopped."""
        return all(future.done() for future in self._futures)

    @property
    def failed(self) -> bool:
        """Whether the tuner's own code failed on a card; `results` raises with what."""
        return any(future.done() and future.exception() for future in self._futures)

    @property
    def finished(self) -> bool:
        """Whether every workload has ended and been looked at again."""
        return self._queue.unfinished == 0 and self.idle

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no card is at work, or one failed for a fault of our own, or the timeout."""
        wait(self._futures, timeout_s, return_when=FIRST_EXCEPTION)

    def stop(self) -> None:
        """End the searches; the workloads at hand still get their finals."""
        for session in self._sessions:
            session.stop.set()

    def results(self) -> list[tuple[Subject, Winner | Failure]]:
        """Stop, and return how each workload that was begun ended, in the subjects' order.

        Raises:
            TunerError: The tuner's own code failed on one of the cards.
        """
        self.stop()
        for future in self._futures:
            future.result()
        return [(self._subjects[place], self._results[place]) for place in sorted(self._results)]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._pool.shutdown()

    def _work(self, session: Session, observer: CardObserver) -> None:
        try:
            session.workers.warm_up()
            mine = []
            while (share := self._queue.take(session.stop)) is not None:
                session.store.refresh()  # what won on the other cards is tried early here
                before = len(session.store.trials)
                try:
                    ended, _ = tune(session, share.subject, share.budget, observer)
                except HostLost as lost:
                    workload = share.subject.task.workload
                    recent = session.store.trials[before:]
                    tried = sum(trial.workload == workload for trial in recent)
                    self._queue.put_back(share, tried, lost.unfinished)
                    observer.lost(workload, str(lost))
                    return
                self._results[share.place] = ended
                mine.append(share.place)
                self._queue.finish()
            self._look_again(session, mine, observer)
        finally:
            session.workers.restart()  # a child dies with the thread that started it

    def _look_again(self, session: Session, places: Sequence[int], observer: CardObserver) -> None:
        """Have a card look again at what it searched: no other may, since cards differ."""
        subjects = [self._subjects[place] for place in places]
        standing = [self._results[place] for place in places]
        results = look_again(session, subjects, standing, self._queue.countdown, observer)
        with suppress(HostLost):  # what stood stands
            for place, result in zip(places, results, strict=True):
                self._results[place] = result


def run_on(
    sessions: Sequence[Session],
    subjects: Sequence[Subject],
    budget: Budget,
    observers: Sequence[CardObserver],
) -> list[tuple[Subject, Winner | Failure]]:
    """Tune on several cards and return how each workload ended, in the subjects' order.

    An interrupt ends the searches; the workloads at hand still get their finals, and those not
    begun are left out.

    Args:
        sessions: One for each card, each with a store and children of its own.
        subjects: What to tune for; the first come first.
        budget: For all of them together: seconds are the wall clock's.
        observers: One for each session.
    """
    with Fleet(subjects, budget) as fleet:
        for session, observer in zip(sessions, observers, strict=True):
            fleet.join(session, observer)
        with suppress(KeyboardInterrupt):  # the finals of what is at hand still run
            fleet.wait()
        return fleet.results()
