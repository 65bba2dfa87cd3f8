"""Medians, their intervals and outliers: the statistics behind every figure of the clock.

Times on a shared machine are skewed (noise only adds) and have far outliers, so everything here
is a median or a rank: no mean, no standard deviation, no assumption of normal noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from tuner.records import Interval

RESAMPLES = 4000
"""Bootstrap resamples: ten of them lie beyond each end of a 99.5 % interval."""

FAR = 3.5
"""Robust standard deviations that make an outlier (Iglewicz and Hoaglin, 1993)."""


def samples_needed(confidence: float) -> int:
    """Return how many samples a median needs to have an interval of this confidence at all.

    All n samples lie on one side of the true median with probability ``2 ** (1 - n)``.
    """
    return math.ceil(1 - math.log2(1 - confidence))


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median with the interval between two order statistics.

    The count of samples below the true median is binomial whatever their distribution, so the
    interval is exact for skewed noise and needs no resampling (Hahn and Meeker, Statistical
    Intervals, 1991). With fewer than `samples_needed` it is the range, and covers less.

    Args:
        values: Independent samples, at least one.
        confidence: Probability that the interval holds the true median.
    """
    ordered = sorted(values)
    left_out = _left_out(len(ordered), confidence)
    middle = float(np.median(ordered))
    return Interval(middle, ordered[left_out], ordered[-1 - left_out])


@cache
def _left_out(count: int, confidence: float) -> int:
    """Return how many samples at each end the interval of a median does without."""
    scale = 1 << 53
    allowed = int((1 - confidence) / 2 * scale) << count  # exact: no power of two underflows
    below, term = 0, 1
    for rank in range(count // 2):
        below += term
        if below * scale > allowed:
            return max(rank - 1, 0)
        term = term * (count - rank) // (rank + 1)
    return max(count // 2 - 1, 0)


def ratio_interval(
    over: Sequence[float], under: Sequence[float], confidence: float = 0.95
) -> Interval:
    """Return the median of the block-wise ratios with its order-statistic interval.

    Args:
        over: Times by block; the two may differ in length: the common first blocks count.
        under: Times of the other contender in the same blocks.
        confidence: Of the interval.
    """
    return median_interval(_ratios(over, under).tolist(), confidence)


def bootstrap_ratio(
    over: Sequence[float], under: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Return the median of the block-wise ratios with its percentile-bootstrap interval.

    Whole blocks are resampled, so that what the two times of a block share (drift) stays paired
    (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).

    Args:
        over: Times by block; the two may differ in length: the common first blocks count.
        under: Times of the other contender in the same blocks.
        confidence: Of the interval.
        seed: Of the resampling: the same result for the same times.
    """
    ratios = _ratios(over, under)
    draws = np.random.default_rng(seed).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(ratios)), float(low), float(high))


def outliers(values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return which of the values lie far from their median, in median absolute deviations."""
    array = np.asarray(values, dtype=float)
    distances = np.abs(array - np.median(array))
    spread = 1.4826 * np.median(distances)  # the standard deviation, were the noise normal
    # Rounding alone must not make an outlier where more than half of the values are equal.
    far: npt.NDArray[np.bool_] = distances > FAR * spread + 1e-9
    return far


def _ratios(over: Sequence[float], under: Sequence[float]) -> npt.NDArray[np.float64]:
    common = min(len(over), len(under))
    ratios: npt.NDArray[np.float64] = np.divide(over[:common], under[:common])
    return ratios
