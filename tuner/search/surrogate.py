"""The model of the search: a Gaussian process over candidates, in numpy and SciPy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

from tuner.search.covariance import NOISE, Array, Codes, Kernel, Scales, matern, matern_slope

_JITTER = 1e-6

_PRIOR_SD = 1.0
"""How far the logarithm of a scale is expected to be from the prior's."""

_ITERATIONS = 15


class Posterior:
    """What is known of a pool of candidates after some rows; it grows row by row.

    A row without a value (it is in flight) is believed to have the value that the others predict,
    so that it makes its surroundings certain but moves nothing.
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
        added = solve_triangular(corner.astype(np.float32), rest, lower=True, check_finite=False)
        self._projected[old:new] = added
        self._explained += np.einsum("ij,ij->j", added, added)
        self._factor, self._rows = factor, rows

    def keep(self, count: int) -> None:
        """Forget all rows but the first ones."""
        gone = self._projected[count : len(self._factor)]
        self._explained -= np.einsum("ij,ij->j", gone, gone)
        self._factor = self._factor[:count, :count]
        self._rows = None if self._rows is None else self._rows[:count]

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


def fit(kernel: Kernel, codes: Codes, values: Array, start: Scales) -> Scales:
    """Return the most probable scales given some values.

    The variance is profiled out; the prior keeps few values from being overfitted.

    Args:
        kernel: The kernel.
        codes: The candidates: [count, features].
        values: Their values, of zero mean and unit variance: [count].
        start: Where the optimisation starts.
    """
    count = len(values)
    squares = kernel.distances(codes)
    expected = np.append(kernel.prior.weights, kernel.prior.noise)

    def loss(parameters: Array) -> tuple[float, Array]:
        weighted = np.exp(2 * parameters[:-1])[:, None] * squares
        distance = weighted.sum(axis=0)
        noise = math.exp(2 * parameters[-1])
        covariance = matern(distance).reshape(count, count) + (noise + _JITTER) * np.eye(count)
        factor = cholesky(covariance, lower=True, check_finite=False)
        inverse = solve_triangular(factor, np.eye(count), lower=True, check_finite=False)
        inverse = inverse.T @ inverse
        solved = inverse @ values
        variance = max(float(values @ solved) / count, 1e-12)
        sensitivity = 0.5 * (inverse - np.outer(solved, solved) / variance)
        off = parameters - expected
        value = 0.5 * count * math.log(variance) + np.log(np.diag(factor)).sum()
        gradient = off / _PRIOR_SD**2
        gradient[:-1] += 2 * weighted @ (sensitivity.ravel() * matern_slope(distance))
        gradient[-1] += 2 * noise * np.trace(sensitivity)
        return value + 0.5 * float(off @ off) / _PRIOR_SD**2, gradient

    found = minimize(
        loss,
        np.append(start.weights, start.noise),
        jac=True,
        method="L-BFGS-B",
        bounds=[(-6.0, 4.0)] * len(start.weights) + [(NOISE[0], NOISE[2])],
        options={"maxiter": _ITERATIONS},
    )
    return Scales(found.x[:-1], float(found.x[-1]))
