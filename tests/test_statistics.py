"""Intervals that hold what they promise, and outliers."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.timing.statistics import (
    median_interval,
    outliers,
    ratio_interval,
    samples_needed,
)


def test_samples_needed_for_a_confidence():
    assert [samples_needed(confidence) for confidence in (0.5, 0.95, 0.999)] == [2, 6, 11]


def test_the_interval_of_a_median_lies_between_known_ranks():
    interval = median_interval(range(1, 101))
    assert (interval.value, interval.low, interval.high) == (50.5, 40, 61)
    six = median_interval([6, 5, 4, 3, 2, 1])
    assert (six.value, six.low, six.high) == (3.5, 1, 6)
    assert median_interval([2.0]).low == median_interval([2.0]).high == 2.0


def test_many_samples_do_not_underflow():
    interval = median_interval(range(5001))
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 5001**0.5 / 2, abs=2)


@pytest.mark.parametrize("count", [8, 25, 100])
def test_intervals_of_medians_cover_skewed_noise(count):
    random = np.random.default_rng(count)
    samples = random.exponential(size=(1000, count))
    intervals = [median_interval(row.tolist()) for row in samples]
    covered = sum(one.low <= np.log(2) <= one.high for one in intervals)
    assert covered >= 940


def test_intervals_of_ratios_cover_and_ignore_drift():
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        drift = 1 + random.random(30)
        over, under = drift * np.exp(0.02 * random.normal(size=(2, 30)))
        ratio = ratio_interval(2 * over, under)
        covered += ratio.low <= 2 <= ratio.high
        assert ratio.high - ratio.low < 0.1
    assert covered >= 182


def test_ratios_use_the_common_first_blocks():
    assert ratio_interval([2.0, 4.0], [1.0, 2.0, 100.0]).value == 2.0


@pytest.mark.parametrize(("count", "confidence"), [(6, 0.95), (12, 0.9), (31, 0.99), (100, 0.95)])
def test_a_bootstrap_interval_lies_within(count, confidence):
    random = np.random.default_rng(count)
    over, under = random.exponential(size=(2, count))
    medians = np.median((over / under)[random.integers(count, size=(20_000, count))], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    interval = ratio_interval(over, under, confidence)
    assert interval.low <= low < high <= interval.high


def test_outliers_lie_far_from_the_median():
    assert outliers([1.0, 1.1, 0.9, 1.05, 0.95, 2.0]).tolist() == [False] * 5 + [True]
    assert not outliers([1.0, 1.0, 1.0, 1.0 + 1e-12]).any()
