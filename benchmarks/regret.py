"""What choices lost: the true times of what several runs chose, in blocks that all share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from seeded_runs import Choice

from tuner.records import Interval
from tuner.timing.blocks import COPY
from tuner.timing.race import RaceResult
from tuner.timing.statistics import median_interval, ratio_interval

LIMIT = 1.0
"""Percent that a choice may lose."""


class TrueTimes:
    """Times in blocks of one or several surveys of the same contenders.

    Args:
        reference: Label of the default.
    """

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._parts: list[dict[str, tuple[float, ...]]] = []

    def add(self, result: RaceResult) -> None:
        """Take over a survey's blocks."""
        self._parts.append({**dict(result.times_ms), COPY: result.copy_ms})

    def known(self, label: str) -> bool:
        """Return whether a contender was timed in every survey."""
        return all(part.get(label) for part in self._parts)

    def time_ms(self, label: str) -> Interval:
        """Return a contender's own time in milliseconds; compare contenders by `ratio`."""
        return median_interval([time for part in self._parts for time in part[label]])

    def ratio(self, over: str, under: str) -> Interval:
        """Return one contender's time over another's in the same blocks."""
        times = [[time for part in self._parts for time in part[item]] for item in (over, under)]
        return ratio_interval(*times)

    def lost(self, label: str, best: str) -> Interval:
        """Return by how many percent one contender is slower than another."""
        if label == best:
            return Interval(0.0, 0.0, 0.0)
        ratio = self.ratio(label, best)
        return Interval(*(100 * (part - 1) for part in (ratio.value, ratio.low, ratio.high)))

    def best(self, labels: Sequence[str]) -> str:
        """Return the fastest of some contenders, by their times over the default's."""
        return min(labels, key=lambda label: self.ratio(label, self._reference).value)

    def noise(self) -> Interval:
        """Return by how many percent the default and its copy differ."""
        return self.lost(COPY, self._reference)


def regrets(choices: Sequence[Choice], times: TrueTimes) -> dict[int, dict[str, object]]:
    """Return what each run's choice lost, as cells of a row by seed; of those that were timed.

    What is lost has two parts: the run's search did not come to anything better (`search`), or the
    run had timed something better and chose otherwise (`choice`): of what all runs chose, and what
    their searches took to be the fastest, which alone are timed here.
    """
    timed = [item for item in choices if times.known(str(item.winner.candidate))]
    if not timed:
        return {}
    best = times.best([str(item.winner.candidate) for item in timed])
    pool = {item.winner.candidate for item in timed} | {item.fastest for item in timed}
    found: dict[int, dict[str, object]] = {}
    for item in timed:
        winner = str(item.winner.candidate)
        seen = {str(other): other for other in pool if other in item.timed_ms}
        within_reach = times.best([winner, *filter(times.known, seen)])
        mine, regret = times.time_ms(winner), times.lost(winner, best)
        notes = ["the best" if winner == best else _verdict(regret)]
        if within_reach != winner:
            notes.append(item.passed_over(seen[within_reach]))
        found[item.seed] = {
            **{"median_ms": mine.value, "low_ms": mine.low, "high_ms": mine.high},
            "regret_percent": regret.value,
            **{"regret_low": regret.low, "regret_high": regret.high},
            "search_percent": times.lost(within_reach, best).value,
            "choice_percent": times.lost(winner, within_reach).value,
            "note": "; ".join(notes),
        }
    return found


def _verdict(regret: Interval) -> str:
    """Return what an interval of a regret says."""
    if regret.low <= 0:
        return "cannot be told from the best"
    if regret.low > LIMIT:
        return f"surely beyond {LIMIT:g} %"
    if regret.high <= LIMIT:
        return f"surely within {LIMIT:g} %"
    return f"the interval does not say whether within {LIMIT:g} %"


def summary(
    choices: Sequence[Choice], found: Mapping[int, Mapping[str, object]]
) -> dict[str, object]:
    """Return the cells of the row about all runs."""
    lost = {seed: [float(str(cells[name])) for name in _PARTS] for seed, cells in found.items()}
    worst = max(lost, key=lambda seed: lost[seed][0])
    winners = {item.winner.candidate for item in choices if item.seed in found}
    sure = sum(float(str(cells["regret_high"])) <= LIMIT for cells in found.values())
    level = sum(float(str(cells["regret_low"])) <= 0 for cells in found.values())
    most = [max(column) for column in zip(*lost.values(), strict=True)]
    return {
        "runs": len(found),
        "winners": len(winners),
        "within": sum(regret <= LIMIT for regret, _, _ in lost.values()),
        "mean_percent": fmean(regret for regret, _, _ in lost.values()),
        **{name: found[worst][name] for name in ("regret_percent", "regret_low", "regret_high")},
        **{"search_percent": most[1], "choice_percent": most[2]},
        "note": f"largest of each; surely within {LIMIT:g} %: {sure}; not told from the best, or "
        f"the best: {level}",
    }


_PARTS = ("regret_percent", "search_percent", "choice_percent")
