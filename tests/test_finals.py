"""The verdict on recorded races."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tuner.timing import finals
from tuner.timing.race import RaceResult

SIMPLICITY = {"default": 1.0, "simple": 2.0, "plain": 2.0, "complex": 3.0}


def recorded(*, blocks=60, noise=0.005, copy=1.0, rival=None, **medians_ms):
    random = np.random.default_rng(0)
    drift = 1 + 0.2 * random.random(blocks)

    def times_ms(median_ms):
        return tuple((median_ms * drift * np.exp(noise * random.normal(size=blocks))).tolist())

    return RaceResult(
        reference="default",
        rival=rival,
        times_ms=tuple((label, times_ms(value)) for label, value in medians_ms.items()),
        copy_ms=times_ms(copy * medians_ms["default"]),
        refused=(),
        discarded=0,
        end="separated",
        regime="cold",
        method="calls x 1",
        seed=0,
    )


def pick(result):
    return finals.pick(result, lambda label: (0.0, SIMPLICITY[label]))


def test_the_faster_contender_wins_with_its_gain():
    verdict = pick(recorded(default=1.0, simple=0.9, complex=0.8))
    assert verdict.winner == "complex"
    assert verdict.gain.low < 1.25 < verdict.gain.high
    assert verdict.ties == ()
    assert verdict.noise.low < 1 < verdict.noise.high


def test_the_default_wins_a_tie():
    verdict = pick(recorded(default=1.0, simple=0.999, complex=1.001))
    assert verdict.winner == "default"
    assert (verdict.gain.value, verdict.gain.low, verdict.gain.high) == (1.0, 1.0, 1.0)
    assert set(verdict.ties) == {"simple", "complex"}
    assert verdict.reason.startswith("nothing is faster than the default and its copy")


def test_the_simplest_wins_among_the_fastest():
    verdict = pick(recorded(default=1.0, complex=0.799, simple=0.8))
    assert verdict.winner == "simple"
    assert verdict.ties == ("complex",)


def test_equally_simple_ones_are_picked_by_name():
    assert pick(recorded(default=1.0, simple=0.8, plain=0.8)).winner == "plain"


def test_simplicity_does_not_excuse_a_slower_one():
    verdict = pick(recorded(default=1.0, complex=0.8, simple=0.84))
    assert (verdict.winner, verdict.ties) == ("complex", ())


def test_simplicity_does_not_decide_where_noise_hides_who_is_faster():
    verdict = pick(recorded(default=1.0, complex=0.8, simple=0.82, blocks=15, noise=0.05))
    assert (verdict.winner, verdict.ties) == ("complex", ("simple",))


def test_a_gain_within_the_noise_of_the_copy_is_none():
    assert pick(recorded(default=1.0, simple=0.97)).winner == "simple"
    assert pick(recorded(default=1.0, simple=0.97, copy=0.95)).winner == "default"
    assert pick(recorded(default=1.0, simple=0.97, copy=1.05)).winner == "default"


def test_a_claim_needs_enough_blocks():
    verdict = pick(recorded(blocks=5, default=1.0, simple=0.5))
    assert verdict.winner == "default"
    assert verdict.reason == "the budget allowed 5 blocks, and a claim needs 6"


def test_the_dropped_and_the_rival_do_not_win():
    result = recorded(rival="rival", default=1.0, simple=0.9, complex=0.8, rival_=1.0)
    times_ms = {**dict(result.times_ms), "rival": (0.5,) * 60}
    times_ms.pop("rival_")
    times_ms["complex"] = times_ms["complex"][:12]
    result = dataclasses.replace(result, times_ms=tuple(times_ms.items()))
    assert pick(result).winner == "simple"


def test_a_final_of_the_default_alone_has_a_verdict():
    assert pick(recorded(default=1.0)).winner == "default"


def test_ratios_and_timings_are_those_of_the_race():
    result = recorded(default=1.0, simple=0.5)
    ratio = finals.ratio(result, "default", "simple")
    assert ratio.low < 2.0 < ratio.high
    timing = finals.timing(result, "simple")
    assert timing.low_ms <= timing.median_ms <= timing.high_ms
    assert timing.median_ms == pytest.approx(0.55, rel=0.05)
    assert (timing.samples, timing.regime, timing.method) == (60, "cold", "calls x 1")


def test_a_race_at_another_pace_than_the_search_is_disturbed():
    known_ms = {"default": 1.0, "simple": 0.9, "plain": 0.9, "complex": 0.8}
    assert finals.disturbed(recorded(**known_ms), known_ms) is None
    slower = {label: 1.4 * time_ms for label, time_ms in known_ms.items()}  # a card that is hot
    assert finals.disturbed(recorded(**slower), known_ms) is None
    waits = {label: 8.0 for label in known_ms}
    assert finals.disturbed(recorded(**waits), known_ms) == "default"
    assert finals.disturbed(recorded(**{**known_ms, "default": 8.0}), known_ms) == "default"
    assert finals.disturbed(recorded(**{**waits, "default": 1.0}), known_ms) == "complex"
    # one alone may have been timed wrongly in the search, and must not forbid all finals
    assert finals.disturbed(recorded(**{**known_ms, "simple": 8.0}), known_ms) is None
    assert finals.disturbed(recorded(rival="rival", rival_=9.0, **known_ms), known_ms) is None
