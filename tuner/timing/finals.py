"""The verdict on a race: who wins, by how much, and who cannot be told from the winner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from tuner.records import Interval
from tuner.timing.blocks import COPY, TIE, confidence, faster
from tuner.timing.meter import GROSS, Timing
from tuner.timing.race import RaceResult
from tuner.timing.statistics import ratio_interval, samples_needed

Simplicity = Callable[[str], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Pick:
    """The verdict on a race.

    Attributes:
        winner: Label of the contender to freeze.
        gain: Default's time over the winner's, with the interval that decided; 1 if they are one.
        ties: Labels of the other contenders that are not known to be slower than the winner.
        noise: Ratio of the reference to its own copy: what the race takes for a difference.
        reason: Why it was picked, in words.
    """

    winner: str
    gain: Interval
    ties: tuple[str, ...]
    noise: Interval
    reason: str


def pick(result: RaceResult, simplicity: Simplicity) -> Pick:
    """Return the winner of a race.

    Nothing beats the default unless the interval of its gain says so (see `blocks.faster`). Among
    those who beat it, tie with the fastest and were measured level with it the simplest wins, so
    that another run comes to the same verdict. All contenders share the probability of a wrong
    claim (Bonferroni).

    Args:
        result: The race; its reference is the default.
        simplicity: Sort key of a label, smallest first: bytes of shared memory, then complexity.
    """
    default, times_ms = result.reference, dict(result.times_ms)
    contenders = [label for label in times_ms if label not in (default, result.rival)]
    sure = confidence(result.error, len(contenders))
    blocks, needed = len(result.copy_ms), samples_needed(sure)
    # Whoever was dropped has fewer blocks, and cannot win.
    runners = [label for label in contenders if len(times_ms[label]) == blocks]
    gains = faster({**times_ms, COPY: result.copy_ms}, runners, default, sure)
    if gains:
        fastest = max(gains, key=lambda label: gains[label].value)
        level = [label for label in gains if _level(ratio(result, label, fastest))]
        winner = min(level, key=lambda label: (simplicity(label), label))
        reason = f"faster than the default and its copy in {blocks} blocks"
    else:
        winner = default
        reason = "nothing is faster than the default and its copy"
        if blocks < needed:
            reason = f"the budget allowed {blocks} blocks, and a claim needs {needed}"
    others = [label for label in (default, *contenders) if label != winner]
    ties = tuple(label for label in others if _tied(ratio(result, label, winner)))
    noise = ratio_interval(result.copy_ms, times_ms[default], sure)
    return Pick(winner, gains.get(winner, Interval(1.0, 1.0, 1.0)), ties, noise, reason)


def without(result: RaceResult, label: str) -> RaceResult:
    """Return the race as it was without one of its contenders."""
    return replace(result, times_ms=tuple(item for item in result.times_ms if item[0] != label))


def ratio(result: RaceResult, over: str, under: str, confidence: float = 0.95) -> Interval:
    """Return one contender's time over another's in the same blocks, with its interval."""
    times_ms = dict(result.times_ms)
    return ratio_interval(times_ms[over], times_ms[under], confidence)


def timing(result: RaceResult, label: str) -> Timing:
    """Return a contender's own time in the race; compare contenders by `ratio` instead."""
    times_ms = dict(result.times_ms)[label]
    return Timing.of(times_ms, regime=result.regime, method=result.method)


def disturbed(result: RaceResult, known_ms: Mapping[str, float]) -> str | None:
    """Return who takes grossly longer than it is known to, if that says something of the machine.

    It does if it is the default, or half of all; a single challenger may have been timed wrongly
    before.

    Args:
        result: The race.
        known_ms: Times of the contenders as measured before, by the same clock.
    """
    slowdown = {
        label: timing(result, label).median_ms / known_ms[label]
        for label, _ in result.times_ms
        if label in known_ms
    }
    if slowdown[result.reference] > GROSS:
        return result.reference
    if median_low(slowdown.values()) > GROSS:
        return max(slowdown, key=lambda label: slowdown[label])
    return None


def _level(slowdown: Interval) -> bool:
    """Return whether a contender with this ratio ties, and not for its wide interval alone."""
    return _tied(slowdown) and slowdown.value <= 1 + TIE


def _tied(slowdown: Interval) -> bool:
    """Return whether a contender with this ratio is not known to be slower by more than a tie."""
    return slowdown.low <= 1 or slowdown.high <= 1 + TIE
