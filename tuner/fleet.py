"""Several cards of one kind at a time: each takes whole workloads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress

from tuner.budget import Budget, Countdown
from tuner.records import Failure, Winner
from tuner.run import Observer, tune
from tuner.session import Session, Subject


class _Queue:
    """Hands out workloads, each with its part of what is left of the budget."""

    def __init__(self, subjects: Sequence[Subject], budget: Budget, cards: int) -> None:
        self._subjects = subjects
        self._budget = budget
        self._cards = cards
        self._total = Countdown(budget)
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> tuple[int, Budget] | None:
        """Return the position of a workload and its budget, None when all are taken."""
        with self._lock:
            place = self._next
            if place == len(self._subjects):
                return None
            self._next += 1
        weights = [subject.weight for subject in self._subjects]
        if self._budget.trials is not None:
            return place, self._budget.share(weights[place] / sum(weights))
        part = min(self._cards * weights[place] / sum(weights[place:]), 1.0)
        return place, Budget(self._total.seconds_left).share(part)


def run_on(
    sessions: Sequence[Session],
    subjects: Sequence[Subject],
    budget: Budget,
    observers: Sequence[Observer],
) -> list[tuple[Subject, Winner | Failure]]:
    """Tune on several cards and return how each workload ended, in the subjects' order.

    A workload is searched and raced on one card, since cards differ: one card's times are never
    compared with another's. An interrupt ends the searches; the workloads at hand still get
    their finals, and those not begun are left out.

    Args:
        sessions: One for each card, each with a store and children of its own.
        subjects: What to tune for; the first come first.
        budget: For all of them together: seconds are the wall clock's.
        observers: One for each session.
    """
    queue = _Queue(subjects, budget, len(sessions))
    results: dict[int, Winner | Failure] = {}

    def work(session: Session, observer: Observer) -> None:
        try:
            while not session.stop.is_set() and (taken := queue.take()) is not None:
                place, part = taken
                session.store.refresh()  # what won on the other cards is tried early here
                results[place], _ = tune(session, subjects[place], part, observer)
        finally:
            session.workers.restart()  # a child dies with the thread that started it

    with ThreadPoolExecutor(len(sessions), thread_name_prefix="card") as pool:
        futures = [pool.submit(work, *pair) for pair in zip(sessions, observers, strict=True)]
        with suppress(KeyboardInterrupt):  # the finals of what is at hand still run
            wait(futures, return_when=FIRST_EXCEPTION)
        for session in sessions:
            session.stop.set()
        for future in futures:
            future.result()
    return [(subjects[place], results[place]) for place in sorted(results)]
