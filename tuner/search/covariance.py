"""How alike candidates are: the covariance of the search's Gaussian process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tuner.records import Value
from tuner.space.feasible import ABSENT, scaled

Array = NDArray[np.float64]
_Real = TypeVar("_Real", np.float32, np.float64)

Codes = NDArray[np.int16]
"""Positions of values among their feature's values, -1 where absent: [count, features]."""

NOISE = (math.log(1e-3), math.log(1e-2), math.log(0.5))
"""Least, expected and most standard deviation of the noise in units of the values', as logs."""

_ORDER_WEIGHT, _CHOICE_WEIGHT, _ALIGNMENT_WEIGHT = 3.0, 1.0, 2.0
"""Expected weights of a feature's distances, before division by the root of the features."""


@dataclass(frozen=True, slots=True)
class Scales:
    """What the kernel is fitted by.

    Attributes:
        weights: Logarithm of the weight of each distance: [distances].
        noise: Logarithm of the noise's standard deviation.
    """

    weights: Array
    noise: float


class Kernel:
    """How alike two candidates are: Matérn 5/2 over a weighted sum of squared distances.

    A feature gives up to three distances: along its order (logarithmic for numbers that span a
    factor above 4), between its values as mere choices, and between the powers of two that divide
    its values, because tiles that divide extents, warps and cache lines behave alike.

    Attributes:
        prior: The weights to expect before anything is known.
        features: The feature that each distance is of.
    """

    def __init__(self, choices: Sequence[Sequence[Value]]) -> None:
        """Prepare the distances.

        Args:
            choices: The values of each feature.
        """
        self._cards = [len(values) + 1 for values in choices]
        self._starts = np.cumsum([0, *self._cards])
        self.features: list[int] = []
        self._tables: list[Array] = []
        expected: list[float] = []
        for feature, values in enumerate(choices):
            for table, weight in _distances(values):
                self.features.append(feature)
                self._tables.append(table)
                expected.append(math.log(weight / math.sqrt(len(choices))))
        self.prior = Scales(np.array(expected), NOISE[1])

    def one_hot(self, codes: Codes) -> NDArray[np.float32]:
        """Return the codes as indicators of values: [count, all values of all features]."""
        hot = np.zeros((len(codes), int(self._starts[-1])), np.float32)
        for feature, start in enumerate(self._starts[:-1]):
            hot[np.arange(len(codes)), start + codes[:, feature] % self._cards[feature]] = 1
        return hot

    def correlation(
        self, scales: Scales, hot: NDArray[np.float32], codes: Codes
    ) -> NDArray[np.float32]:
        """Return the correlation of each row of `one_hot` with each row of codes."""
        weighted = [np.zeros((card, card)) for card in self._cards]
        for feature, table, weight in zip(
            self.features, self._tables, np.exp(2 * scales.weights), strict=True
        ):
            weighted[feature] += weight * table
        columns = [table[:, codes[:, feature]] for feature, table in enumerate(weighted)]
        return matern(np.maximum(hot @ np.concatenate(columns).astype(np.float32), 0))

    def distances(self, codes: Codes) -> Array:
        """Return the unweighted squared distances between rows: [distances, count * count]."""
        return np.stack(
            [
                table[np.ix_(codes[:, feature], codes[:, feature])].ravel()
                for feature, table in zip(self.features, self._tables, strict=True)
            ]
        )


def _distances(values: Sequence[Value]) -> Iterator[tuple[Array, float]]:
    """Yield squared distances between a feature's values and absence, with expected weights."""
    count = len(values)
    choice = 1.0 - np.eye(count + 1)
    if count < 3 or any(isinstance(value, str | bool) for value in values):
        yield choice, _ORDER_WEIGHT
        return
    yield _squared_differences(scaled(values)), _ORDER_WEIGHT
    yield choice, _CHOICE_WEIGHT
    whole = [value for value in values if isinstance(value, int) and value > 0]
    if len(whole) == count and any(value & (value - 1) for value in whole):
        # The exponent of 2 in each value; were all powers of two, it would be their order.
        exponents = [(value & -value).bit_length() - 1 for value in whole]
        yield _squared_differences(scaled(exponents)), _ALIGNMENT_WEIGHT


def _squared_differences(places: Array) -> Array:
    places = np.append(places, ABSENT)
    return (places[:, None] - places[None]) ** 2


def matern(squared: NDArray[_Real]) -> NDArray[_Real]:
    """Return the Matérn 5/2 correlation at squared distances (Rasmussen and Williams, 4.17)."""
    scaled = np.sqrt(5 * squared + 1e-12)
    correlation: NDArray[_Real] = (1 + scaled + scaled * scaled / 3) * np.exp(-scaled)
    return correlation


def matern_slope(squared: Array) -> Array:
    """Return the derivative of `matern` by the squared distance."""
    scaled = np.sqrt(5 * squared + 1e-12)
    return -(5 / 6) * (1 + scaled) * np.exp(-scaled)
