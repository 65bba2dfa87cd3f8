"""Medians, their intervals and outliers: the statistics behind every figure of the clock.

Times on a shared machine are skewed (noise only adds) and have far outliers, so everything here
is a rank: no mean, no standard deviation, no assumption of normal noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from tuner.records import Interval

FAR = 3.5
"""Robust standard deviations that make an outlier (Iglewicz and Hoaglin, 1993)."""


def undisturbed(values: Sequence[float]) -> float:
    """Return the lower quartile: a time that up to three quarters disturbed samples leave alone.

    Noise of a shared machine only adds, and a busy neighbour can disturb most samples; between
    half and three quarters the median jumps, this does not.
    """
    return sorted(values)[(len(values) - 1) // 4]


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
    """Return the median of the block-wise ratios with the interval of `median_interval`.

    What the two times of a block share (drift) cancels. Resampling whole blocks would come to the
    same or the next ranks, since the bootstrap of a median converges to an interval between two
    order statistics (Efron, Bootstrap Methods: Another Look at the Jackknife, 1979); where the
    two differ the bootstrap covers too little (0.93 for 0.95 with 11 blocks), so it is not used.

    Args:
        over: Times by block; the two may differ in length: the common first blocks count.
        under: Times of the other contender in the same blocks.
        confidence: Of the interval.
    """
    return median_interval(_ratios(over, under).tolist(), confidence)


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
