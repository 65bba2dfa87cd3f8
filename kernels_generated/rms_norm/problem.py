"""Root-mean-square normalization of rows against `torch.nn.functional.rms_norm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

import torch
from torch import Tensor

RIVAL = "torch.nn.functional.rms_norm"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"M": 1, "N": 1},
    {"M": 3, "N": 7},
    {"M": 5, "N": 64},
    {"M": 13, "N": 1031},
    {"M": 2, "N": 40009},
)


def reference(x: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
    """Return the normalized rows and the reciprocal of each row's root mean square.

    Args:
        x: [M, N] float64.
        weight: [N] float64.
        eps: Added to the mean square.
    """
    rstd = (x.square().mean(dim=-1) + eps).rsqrt()
    return {"y": x * rstd[:, None] * weight, "rstd": rstd}


def rival(x: Tensor, weight: Tensor, eps: float) -> Callable[[], object]:
    """Return torch's operation on x [M, N] and weight [N]; it allocates its result."""
    return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return bounds relative to each element: there are no differences that could cancel."""
    del flags
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    rtol = result.eps + (16 + sqrt(dims["N"])) * single.eps
    return {"rtol": rtol, "atol": max(single.tiny, result.tiny * result.eps)}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return four operations per element and the bytes of x, weight, y and rstd."""
    del flags
    rows, columns = dims["M"], dims["N"]
    return 4.0 * rows * columns, float((2 * rows * columns + columns) * itemsize + 4 * rows)
