"""Softmax over rows against `torch.softmax`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

import torch
from torch import Tensor

RIVAL = "torch.softmax"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"M": 1, "N": 1},
    {"M": 3, "N": 7},
    {"M": 5, "N": 64},
    {"M": 13, "N": 1031},
    {"M": 2, "N": 40009},
)


def inputs(
    dims: Mapping[str, int],
    flags: Mapping[str, object],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return rows whose exponentials overflow unless the maximum is subtracted, partly masked."""
    del flags
    rows, columns, device = dims["M"], dims["N"], generator.device
    x = 3 * torch.randn(rows, columns, generator=generator, device=device)
    x += 100 * torch.randn(rows, 1, generator=generator, device=device)
    x[:, 1::17] = -torch.inf
    return {"x": x.to(dtype)}


def reference(x: Tensor) -> dict[str, Tensor]:
    """Return the softmax.

    Args:
        x: [M, N] float64.
    """
    return {"y": torch.softmax(x, dim=-1)}


def rival(x: Tensor) -> Callable[[], object]:
    """Return torch's softmax of x [M, N] into memory allocated once, like ours."""
    y = torch.empty_like(x)
    return lambda: torch.softmax(x, dim=-1, out=y)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return bounds relative to each probability, however small.

    Exponential, product and quotient err by a few roundings each, and so does an argument of
    about -20 before it is raised; the sum's error grows like the square root of its length.
    """
    del flags
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    rtol = result.eps + (32 + sqrt(dims["N"])) * single.eps
    return {"rtol": rtol, "atol": max(single.tiny, result.tiny * result.eps)}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return five operations per element (compare, subtract, raise, add, scale) and its bytes."""
    del flags
    elements = dims["M"] * dims["N"]
    return 5.0 * elements, 2.0 * elements * itemsize
