"""Gradients of root-mean-square normalization against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt

import torch
from torch import Tensor

RIVAL = "backward of torch.nn.functional.rms_norm"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"M": 1, "N": 1},
    {"M": 3, "N": 7},
    {"M": 5, "N": 64},
    {"M": 131, "N": 67},
    {"M": 2, "N": 40009},
)


def inputs(
    dims: Mapping[str, int],
    flags: Mapping[str, object],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return x of size 1, which keeps short rows from being magnified, with its rstd."""
    del flags
    shape, device = (dims["M"], dims["N"]), generator.device
    x = torch.randn(shape, generator=generator, device=device)
    x = (x + torch.sign(x)).to(dtype)
    weight = torch.randn(dims["N"], generator=generator, device=device)
    dy = torch.randn(shape, generator=generator, device=device)
    rstd = (x.double().square().mean(dim=-1) + 1e-6).rsqrt().float()
    return {"x": x, "weight": weight.to(dtype), "rstd": rstd, "dy": dy.to(dtype)}


def reference(x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return the gradients of x and weight.

    Args:
        x: [M, N] float64.
        weight: [N] float64.
        rstd: [M] float64, the reciprocal of each row's root mean square.
        dy: [M, N] float64, the gradient of the output.
    """
    x_hat = x * rstd[:, None]
    weighted = dy * weight
    dot = (x_hat * weighted).mean(dim=-1, keepdim=True)
    return {"dx": (weighted - x_hat * dot) * rstd[:, None], "dweight": (dy * x_hat).sum(dim=0)}


def rival(x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor) -> Callable[[], object]:
    """Return torch's backward pass of x [M, N] and weight [N]; it allocates its results."""
    del rstd
    sources = (x.detach().requires_grad_(), weight.detach().requires_grad_())
    y = torch.nn.functional.rms_norm(sources[0], weight.shape, sources[1], 1e-6)
    return lambda: torch.autograd.grad(y, sources, dy, retain_graph=True)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return bounds for standard normal gradients and sums kept in float32.

    An element of dx is a difference of numbers of size 1, one of dweight a sum of M such numbers.
    """
    del flags
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    atol = (64 + sqrt(dims["N"]) + 16 * sqrt(dims["M"])) * single.eps
    return {"rtol": result.eps + 16 * single.eps, "atol": atol}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return nine operations per element and the bytes of x, dy, dx, both weights and rstd."""
    del flags
    rows, columns = dims["M"], dims["N"]
    return 9.0 * rows * columns, float((3 * rows * columns + 2 * columns) * itemsize + 4 * rows)
