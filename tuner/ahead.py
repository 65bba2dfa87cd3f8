"""Compiling candidates for a card that is not here, so that a run on the card need not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from tuner.children.task import Compiled
from tuner.children.worker import Lethal, Workers
from tuner.records import Candidate, Rejection, Source
from tuner.render import Renderer
from tuner.session import Subject
from tuner.space.feasible import FeasibleSet
from tuner.store import Store


@dataclass(frozen=True, slots=True)
class Built:
    """A candidate and what the compiler made of it."""

    candidate: Candidate
    result: Compiled | Rejection


def choose(feasible: FeasibleSet, sample: int | None, seed: int) -> list[Candidate]:
    """Return the candidates to compile: all, or the defaults, the seeds and a random sample.

    Args:
        feasible: What may be tried.
        sample: How many; None stands for all.
        seed: Seed of the sample.
    """
    if sample is None:
        return list(feasible)
    named = [*feasible.defaults, *feasible.seeds]
    keys = feasible.sample(sample, np.random.default_rng(seed))
    drawn = (feasible.candidate(int(key)) for key in keys)
    return list(dict.fromkeys([*named, *drawn]))[:sample]


def build_ahead(
    subject: Subject,
    candidates: Sequence[Candidate],
    *,
    workers: Workers,
    store: Store,
    renderer: Renderer,
) -> Iterator[Built]:
    """Compile candidates in parallel; yield each in order, its refusal kept in the store.

    Args:
        subject: The workload that they are specialised for.
        candidates: What to compile.
        workers: Whose compile children do it.
        store: Where a refusal is kept for a run on the card.
        renderer: Renders them.
    """
    submitted: list[tuple[Candidate, Source, Future[Compiled | Rejection]]] = []
    for candidate in candidates:
        source = subject.render(renderer, candidate)
        submitted.append((candidate, source, workers.compile(subject.task, source)))
    for candidate, source, future in submitted:
        try:
            result = subject.judge(candidate, future.result())
        except Lethal as lethal:
            result = lethal.rejection
        if isinstance(result, Rejection):
            store.add_refusal(subject.task.workload, source.sha256, result)
        yield Built(candidate, result)
