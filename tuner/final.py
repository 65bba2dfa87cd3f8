"""The final of one workload: the best few race, and the winner must be right everywhere."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait

from tuner import codec
from tuner.children.worker import Lethal
from tuner.records import Candidate, Measurement, Rejection, Source, Winner
from tuner.session import Session, Subject
from tuner.study import DefaultRejected, Report, Study
from tuner.timing import finals
from tuner.timing.race import RaceResult

RIVAL = "rival"
"""Label of the library operation in a race."""

_FINALISTS = 4
_BLOCKS = 15
_CALLS_PER_VISIT = 2
_CEILING_S = 40.0
_PAUSES_S = (0.0, 0.5, 2.0)
"""Before each race of a final, as long as its times are far from the search's."""


class Final:
    """Races what a study found.

    Args:
        session: What the studies of the run share.
        subject: What was tuned for.
        study: The finished study.
        report: Called with a trial that turns out to be rejected.
    """

    def __init__(self, session: Session, subject: Subject, study: Study, report: Report) -> None:
        self._session = session
        self._subject = subject
        self._study = study
        self._report = report
        self._default = subject.feasible.default

    def hold(self, budget_s: float, announce: Callable[[int], None]) -> Winner | None:
        """Return the winner, or None if the default was not timed.

        If all who challenge the default turn out to be wrong, the next best race.

        Args:
            budget_s: Seconds for a race; one that could not tell anything then takes longer.
            announce: Called with the number of contenders before each race.

        Raises:
            DefaultRejected: The default is wrong on an odd shape, or the race rejects it.
        """
        while finalists := self._finalists():
            announce(len(finalists))
            race_s = max(budget_s, _seconds_to_decide(finalists))
            if winner := self._race(finalists, race_s):
                return winner
        return None

    def _finalists(self) -> dict[Candidate, Measurement]:
        """Return the default, which comes first, and the fastest few."""
        timed = self._study.timed
        if self._default not in timed:
            return {}
        others = sorted(timed.keys() - {self._default}, key=lambda item: timed[item].median_ms)
        return {item: timed[item] for item in (self._default, *others[:_FINALISTS])}

    def _race(self, finalists: Mapping[Candidate, Measurement], race_s: float) -> Winner | None:
        session, subject = self._session, self._subject
        labels = {str(candidate): candidate for candidate in finalists}
        sources = {label: subject.render(session.renderer, labels[label]) for label in labels}
        searched_ms = {label: finalists[labels[label]].median_ms for label in labels}
        raced, rival, amiss = self._race_at_pace(sources, searched_ms, race_s)

        def simplicity(label: str) -> tuple[float, ...]:
            shared = finalists[labels[label]].resources.shared_bytes or 0
            return (shared, len(sources[label].text.splitlines()))

        result, pick = self._first_that_is_right(raced, labels, simplicity)
        challengers = labels.keys() & dict(result.times_ms).keys() - {result.reference}
        if len(labels) > 1 and not challengers:
            return None
        rival = rival if RIVAL in dict(result.times_ms) else None
        return Winner(
            workload=subject.task.workload,
            candidate=labels[pick.winner],
            default_candidate=self._default,
            source=sources[pick.winner],
            default=sources[result.reference],
            measurement=_measurement(result, pick.winner, finalists[labels[pick.winner]]),
            default_measurement=_measurement(result, result.reference, finalists[self._default]),
            gain=pick.gain,
            rival=rival,
            rival_measurement=_measurement(result, RIVAL, None) if rival else None,
            rival_ratio=finals.ratio(result, RIVAL, pick.winner) if rival else None,
            ties=tuple(labels[label] for label in pick.ties if label in labels),
            device=session.device,
            protocol=f"{result.method}, {result.regime} caches, interleaved blocks",
            seed=session.seed,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            searched=self._study.exhausted or len(self._study.timed) > 1,
            disturbed=amiss,
        )

    def _race_at_pace(
        self, sources: Mapping[str, Source], searched_ms: Mapping[str, float], race_s: float
    ) -> tuple[RaceResult, str | None, str | None]:
        """Return a race at the search's pace, the rival's name, and what was amiss at the end.

        Interleaved blocks share what disturbs them, so a race alone cannot see that most of its
        times are waits. The search has seen the same code by the same clock.
        """
        session, task = self._session, self._subject.task
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            reply = session.workers.race(
                task, list(sources.items()), budget_s=race_s, seed=session.seed
            )
            if "rejection" in reply:
                rejection = codec.from_json(Rejection, reply["rejection"])
                raise DefaultRejected(
                    f"{task.workload}: rejected in its final: {rejection.reason}"
                )
            raced = codec.from_json(RaceResult, reply["race"])
            slower = finals.disturbed(raced, searched_ms)
            if slower is None:
                return raced, reply["rival"], None
            amiss = (
                f"{slower} took {searched_ms[slower]:.3g} ms in the search and takes "
                f"{finals.timing(raced, slower).median_ms:.3g} ms in its final"
            )
        return raced, reply["rival"], amiss

    def _first_that_is_right(
        self, result: RaceResult, labels: Mapping[str, Candidate], simplicity: finals.Simplicity
    ) -> tuple[RaceResult, finals.Pick]:
        """Return who wins of those that are right on every odd shape, too, and their race.

        Only winners are asked: what the question has to be compiled for takes longer than a race.
        """
        pick = finals.pick(result, simplicity)
        self._compile_edges(list(dict.fromkeys((self._default, labels[pick.winner]))))
        if not self._is_right(self._default):
            raise DefaultRejected(
                f"{self._subject.task.workload}: the default fails on odd shapes"
            )
        while pick.winner != result.reference and not self._is_right(labels[pick.winner]):
            result = finals.without(result, pick.winner)
            pick = finals.pick(result, simplicity)
        return result, pick

    def _compile_edges(self, candidates: Sequence[Candidate]) -> None:
        """Compile what the checks on odd shapes call, in all children; a failure shows there."""
        session, subject = self._session, self._subject
        sources = [subject.render(session.renderer, item) for item in candidates]
        unknown = [item for item in sources if subject.question(item) not in session.right]
        parts = [session.workers.compile_edges(subject.task, item) for item in unknown]
        wait([future for futures in parts for future in futures])

    def _is_right(self, candidate: Candidate) -> bool:
        """Return whether a candidate, which the race found right, is so on odd shapes, too."""
        source = self._subject.render(self._session.renderer, candidate)
        question = self._subject.question(source)
        if question in self._session.right:
            return True
        path = self._session.workers.path_of(source)
        try:
            rejection = self._session.workers.verify(self._subject.task, path, source.language)
        except Lethal as lethal:
            rejection = lethal.rejection
            self._session.store.add_quarantine(source.sha256, rejection)
        if rejection is not None:
            self._study.reject(candidate, rejection, self._report)
            return False
        self._session.right.add(question)
        return True


def _seconds_to_decide(finalists: Mapping[Candidate, Measurement]) -> float:
    """Return how long a race of these takes until it can tell anything, up to a limit.

    A block has the finalists, the rival and the copy of the default; the last two are taken to be
    as slow as the default, which comes first.
    """
    times_ms = [measurement.median_ms for measurement in finalists.values()]
    block_s = _CALLS_PER_VISIT * (sum(times_ms) + 2 * times_ms[0]) * 1e-3
    return min(_BLOCKS * block_s, _CEILING_S)


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
