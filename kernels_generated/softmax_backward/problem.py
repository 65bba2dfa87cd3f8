"""Gradient of softmax over rows, from its output, against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

import torch
from torch import Tensor

RIVAL = "torch._softmax_backward_data"

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
    """Return rows of probabilities y and standard normal dy."""
    del flags
    shape, device = (dims["M"], dims["N"]), generator.device
    y = torch.softmax(torch.randn(shape, generator=generator, device=device), dim=-1)
    dy = torch.randn(shape, generator=generator, device=device)
    return {"y": y.to(dtype), "dy": dy.to(dtype)}


def reference(y: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return the gradient of softmax's input.

    Args:
        y: [M, N] float64, softmax's output.
        dy: [M, N] float64, its gradient.
    """
    return {"dx": y * (dy - (y * dy).sum(dim=-1, keepdim=True))}


def rival(y: Tensor, dy: Tensor) -> Callable[[], object]:
    """Return torch's operation on y and dy [M, N]; it allocates its result."""
    return lambda: torch._softmax_backward_data(dy, y, -1, y.dtype)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return bounds for a difference of two numbers of size 1 times a probability.

    The largest of N probabilities is some 100 times their mean; the error of a row's sum grows
    like the square root of its length.
    """
    del flags
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    rounding = (32 + sqrt(dims["N"])) * single.eps
    atol = 4 * rounding * min(1.0, 100 / max(1, dims["N"]))
    return {"rtol": result.eps + rounding, "atol": atol + result.tiny * result.eps}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return four operations per element and the bytes of y, dy and dx."""
    del flags
    elements = dims["M"] * dims["N"]
    return 4.0 * elements, 3.0 * elements * itemsize
