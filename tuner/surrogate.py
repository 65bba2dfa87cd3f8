"""The model of the search: a Gaussian process over candidates, in numpy and SciPy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

from tuner.feasible import ABSENT, scaled
from tuner.records import Value

Array = NDArray[np.float64]
_Real = TypeVar("_Real", np.float32, np.float64)

Codes = NDArray[np.int16]
"""Positions of values among their feature's values, -1 where absent: [count, features]."""

_JITTER = 1e-6
_NOISE = (math.log(1e-3), math.log(1e-2), math.log(0.5))
"""Least, expected and most standard deviation of the noise in units of the values', as logs."""

_ORDER_WEIGHT, _CHOICE_WEIGHT, _ALIGNMENT_WEIGHT = 3.0, 1.0, 2.0
"""Expected weights of a feature's distances, before division by the root of the features."""

_PRIOR_SD = 0.5
"""How far the logarithm of a weight is expected to be from the prior's."""

_ITERATIONS = 15


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
        self.prior = Scales(np.array(expected), _NOISE[1])

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
        return _matern(np.maximum(hot @ np.concatenate(columns).astype(np.float32), 0))

    def distances(self, codes: Codes) -> Array:
        """Return the unweighted squared distances between rows: [distances, count * count]."""
        return np.stack(
            [
                table[np.ix_(codes[:, feature], codes[:, feature])].ravel()
                for feature, table in zip(self.features, self._tables, strict=True)
            ]
        )


class Posterior:
    """What is known of a pool of candidates after some rows; it grows row by row.

    A row without a value (it is running, or it failed) is believed to have the value that the
    others predict, so that it makes its surroundings certain but moves nothing.
    """

    def __init__(self, kernel: Kernel, scales: Scales, pool: NDArray[np.float32]) -> None:
        """Start with no row.

        Args:
            kernel: The kernel.
            scales: Its weights and the noise.
            pool: The candidates to predict, as the kernel's `one_hot`.
        """
        self._kernel, self._scales = kernel, scales
        self._noise = math.exp(2 * scales.noise) + _JITTER
        self._pool = pool
        self._rows: Codes | None = None
        self._factor = np.empty((0, 0))
        # Rows of inv(factor) @ correlation(rows, pool), in a buffer with room to grow.
        self._projected = np.empty((64, len(pool)), np.float32)
        self._explained = np.zeros(len(pool))

    def add(self, rows: Codes) -> None:
        """Take in more rows, whatever their values will be."""
        old, new = len(self._factor), len(self._factor) + len(rows)
        hot = self._kernel.one_hot(rows)
        corner = self._kernel.correlation(self._scales, hot, rows).astype(float)
        corner += self._noise * np.eye(len(rows))
        lower = np.empty((len(rows), 0))
        if self._rows is not None:
            cross = self._kernel.correlation(self._scales, hot, self._rows).astype(float)
            lower = solve_triangular(self._factor, cross.T, lower=True).T
            rows = np.concatenate([self._rows, rows])
        corner = cholesky(corner - lower @ lower.T, lower=True)
        factor = np.zeros((new, new))
        factor[:old, :old], factor[old:, :old], factor[old:, old:] = self._factor, lower, corner
        self._grow(new)
        rest = self._kernel.correlation(self._scales, self._pool, rows[old:]).T
        if old:
            rest = rest - lower.astype(np.float32) @ self._projected[:old]
        rest = solve_triangular(corner.astype(np.float32), rest, lower=True, check_finite=False)
        self._projected[old:new] = rest
        self._explained += np.einsum("ij,ij->j", rest, rest)
        self._factor, self._rows = factor, rows

    def predict(self, values: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of every candidate of the pool.

        Args:
            values: The rows' values, about 0; NaN where there is none.
        """
        known = ~np.isnan(values)
        if not known.all():
            values = self._believed(values, known)
        whitened = solve_triangular(self._factor, values, lower=True)
        variance = max(float(whitened @ whitened) / max(int(known.sum()), 1), 1e-6)
        mean = whitened.astype(np.float32) @ self._projected[: len(values)]
        spread = np.sqrt(np.maximum(variance * (1.0 - self._explained), 1e-10))
        return mean.astype(float), spread

    def _believed(self, values: Array, known: NDArray[np.bool_]) -> Array:
        """Return the values with the missing ones predicted."""
        covariance = self._factor @ self._factor.T
        weights = cho_solve(cho_factor(covariance[np.ix_(known, known)]), values[known])
        filled = values.copy()
        filled[~known] = covariance[np.ix_(~known, known)] @ weights
        return filled

    def _grow(self, rows: int) -> None:
        if rows > len(self._projected):
            more = np.empty((2 * rows, self._projected.shape[1]), np.float32)
            more[: len(self._factor)] = self._projected[: len(self._factor)]
            self._projected = more


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


def fit(kernel: Kernel, codes: Codes, values: Array, start: Scales) -> Scales:
    """Return the most probable scales given some values.

    Weights are expected near the kernel's prior within a factor of about two, so that few
    observations do not overfit them; the variance is profiled out.

    Args:
        kernel: The kernel.
        codes: The candidates: [count, features].
        values: Their values, of zero mean and unit variance: [count].
        start: Where the optimisation starts.
    """
    count = len(values)
    squares = kernel.distances(codes)
    expected = np.append(kernel.prior.weights, kernel.prior.noise)
    precision = np.append(np.full(len(kernel.prior.weights), 1 / _PRIOR_SD**2), 1.0)

    def loss(parameters: Array) -> tuple[float, Array]:
        weighted = np.exp(2 * parameters[:-1])[:, None] * squares
        distance = weighted.sum(axis=0)
        noise = math.exp(2 * parameters[-1])
        covariance = _matern(distance).reshape(count, count) + (noise + _JITTER) * np.eye(count)
        factor = cholesky(covariance, lower=True, check_finite=False)
        inverse = solve_triangular(factor, np.eye(count), lower=True, check_finite=False)
        inverse = inverse.T @ inverse
        solved = inverse @ values
        variance = max(float(values @ solved) / count, 1e-12)
        sensitivity = 0.5 * (inverse - np.outer(solved, solved) / variance)
        off = parameters - expected
        value = 0.5 * count * math.log(variance) + np.log(np.diag(factor)).sum()
        gradient = precision * off
        gradient[:-1] += 2 * weighted @ (sensitivity.ravel() * _matern_slope(distance))
        gradient[-1] += 2 * noise * np.trace(sensitivity)
        return value + 0.5 * float(off @ (precision * off)), gradient

    found = minimize(
        loss,
        np.append(start.weights, start.noise),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-6.0, 4.0)] * len(start.weights) + [(_NOISE[0], _NOISE[2])],
        options={"maxiter": _ITERATIONS},
    )
    return Scales(found.x[:-1], float(found.x[-1]))


def _matern(squared: NDArray[_Real]) -> NDArray[_Real]:
    scaled = np.sqrt(5 * squared + 1e-12)
    correlation: NDArray[_Real] = (1 + scaled + scaled * scaled / 3) * np.exp(-scaled)
    return correlation


def _matern_slope(squared: Array) -> Array:
    """Return the derivative of `_matern` by the squared distance."""
    scaled = np.sqrt(5 * squared + 1e-12)
    return -(5 / 6) * (1 + scaled) * np.exp(-scaled)
