"""The verdict on a race: who wins, by how much, and who cannot be told from the winner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tuner.records import Interval
from tuner.timing.blocks import ERROR, TIE
from tuner.timing.meter import Timing
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

    Nothing beats the default unless the interval of its gain says so (see `_faster`). Among those
    who beat it and tie with the fastest the simplest wins, so that another run comes to the same
    verdict. All contenders share the probability `race.ERROR` of a wrong claim (Bonferroni).

    Args:
        result: The race; its reference is the default.
        simplicity: Sort key of a label, smallest first: bytes of shared memory, then complexity.
    """
    default, times_ms = result.reference, dict(result.times_ms)
    contenders = [label for label in times_ms if label not in (default, result.rival)]
    confidence = 1 - ERROR / max(len(contenders), 1)
    compare = partial(ratio, result, confidence=confidence)
    blocks, needed = len(result.copy_ms), samples_needed(confidence)
    # Whoever was dropped has fewer blocks, and has lost.
    runners = [label for label in contenders if len(times_ms[label]) == blocks]
    gains = {label: compare(default, label) for label in (default, *runners)}
    faster = _faster(result, gains, confidence) if blocks >= needed else []
    if faster:
        fastest = max(faster, key=lambda label: gains[label].value)
        level = [label for label in faster if _tied(compare(label, fastest))]
        winner = min(level, key=lambda label: (simplicity(label), label))
        reason = f"faster than the default and its copy in {blocks} blocks"
    else:
        winner = default
        reason = "nothing is faster than the default and its copy"
        if blocks < needed:
            reason = f"the budget allowed {blocks} blocks, and a claim needs {needed}"
    others = [label for label in gains if label != winner]
    ties = tuple(label for label in others if _tied(compare(label, winner)))
    noise = ratio_interval(result.copy_ms, times_ms[default], confidence)
    return Pick(winner, gains[winner], ties, noise, reason)


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


def _faster(result: RaceResult, gains: Mapping[str, Interval], confidence: float) -> list[str]:
    """Return who is faster than the default and its copy, by more than a tie and their difference.

    The copy is the same kernel, so what distinguishes it from the default is noise.
    """
    times_ms = dict(result.times_ms)
    noise = ratio_interval(result.copy_ms, times_ms[result.reference]).value
    floor = max(noise, 1 / noise, 1 + TIE)
    over_copy = {
        label: ratio_interval(result.copy_ms, times_ms[label], confidence) for label in gains
    }
    return [
        label
        for label, gain in gains.items()
        if min(gain.low, over_copy[label].low) > 1 and gain.value > floor
    ]


def _tied(slowdown: Interval) -> bool:
    """Return whether a contender with this ratio is not known to be slower by more than a tie."""
    return slowdown.low <= 1 or slowdown.high <= 1 + TIE
