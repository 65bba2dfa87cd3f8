"""Matrix multiplication, C = A B, against `torch.matmul`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

import torch
from torch import Tensor

RIVAL = "torch.matmul"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"M": 1, "K": 1, "N": 1},
    {"M": 3, "K": 0, "N": 5},
    {"M": 7, "K": 5, "N": 13},
    {"M": 97, "K": 103, "N": 101},
    {"M": 1, "K": 611, "N": 67},
    {"M": 131, "K": 17, "N": 1},
)


def reference(a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return the product.

    Args:
        a: [M, K] float64.
        b: [K, N] float64.
    """
    return {"c": a @ b}


def rival(a: Tensor, b: Tensor) -> Callable[[], object]:
    """Return torch's product of a [M, K] and b [K, N] into memory allocated once, like ours."""
    c = a.new_empty(a.shape[0], b.shape[1])
    return lambda: torch.matmul(a, b, out=c)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return bounds for standard normal inputs and sums kept in float32.

    A sum of K products has the size sqrt(K); in the worst case its error grows like K roundings
    to float32, and rounding the result to `dtype` adds one more. A product left out or taken
    twice changes a sum by about 1.
    """
    del flags
    rounding = torch.finfo(getattr(torch, dtype)).eps
    accumulation = 2 * torch.finfo(torch.float32).eps * dims["K"]
    return {"rtol": rounding, "atol": accumulation + rounding * sqrt(dims["K"]) / 4}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return 2 M N K operations and the bytes of the three matrices."""
    del flags
    m, k, n = dims["M"], dims["K"], dims["N"]
    return 2.0 * m * n * k, float(itemsize * (m * k + k * n + m * n))
