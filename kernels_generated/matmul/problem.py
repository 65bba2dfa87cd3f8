"""Matrix multiplication, C = activation(A B + bias), against torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

RIVAL = "torch.matmul"

# The dims of a product stand for themselves: each comes with one choice of flags, not all 32.
EDGE_SHAPES: tuple[dict[str, Any], ...] = (
    {"M": 1, "K": 1, "N": 1, "activation": "none"},
    {"M": 3, "K": 0, "N": 5, "activation": "none"},
    {"M": 7, "K": 5, "N": 13, "activation": "none"},
    {"M": 97, "K": 103, "N": 101, "activation": "none"},
    {"M": 1, "K": 611, "N": 67, "activation": "none"},
    {"M": 131, "K": 17, "N": 1, "activation": "none"},
    {"M": 33, "K": 70, "N": 50, "bias": True, "activation": "gelu", "transposed_b": True},
    {"M": 24, "K": 64, "N": 72, "bias": True, "activation": "silu", "transposed_b": True},
    {"M": 1, "K": 131, "N": 29, "activation": "relu", "allow_tf32": True},
    # more tiles than programs that stay on any card take at a time
    {"M": 2100, "K": 72, "N": 2312, "activation": "none"},
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
_TF32_EPS = 2.0**-10


def reference(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    transposed_b: bool = False,
    allow_tf32: bool = False,
) -> dict[str, Tensor]:
    """Return the product, with what follows it.

    Args:
        a: [M, K] float64.
        b: [K, N] float64, or [N, K] if transposed_b.
        bias: [N] float64, added to every row.
        activation: What is applied to every element then; gelu is the exact one, with erf.
        transposed_b: Whether the rows of b are columns of the right factor.
        allow_tf32: Whether products of float32 may be rounded to TF32; the reference's are not.
    """
    del allow_tf32
    c = a @ (b.mT if transposed_b else b)
    return {"c": _ACTIVATIONS[activation](c if bias is None else c + bias)}


def rival(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    transposed_b: bool = False,
    allow_tf32: bool = False,
) -> Callable[[], object]:
    """Return what a user of torch would write: `addmm` for a bias, then the activation.

    The product alone goes into memory that is allocated once, like ours. TF32 is a switch of all
    of torch, which is turned on during the call.
    """
    right, apply = b.mT if transposed_b else b, _ACTIVATIONS[activation]
    c = a.new_empty(a.shape[0], right.shape[1])

    def call() -> object:
        if bias is None and activation == "none":
            return torch.matmul(a, right, out=c)
        return apply(a @ right if bias is None else torch.addmm(bias, a, right))

    def call_with_tf32() -> object:
        switches = torch.backends.cuda.matmul
        before, switches.allow_tf32 = switches.allow_tf32, True
        try:
            return call()
        finally:
            switches.allow_tf32 = before

    return call_with_tf32 if allow_tf32 else call


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return bounds for standard normal inputs and sums kept in float32.

    A sum of K products has the size sqrt(K); in the worst case its error grows like K roundings
    to float32, where the sum itself is large like sqrt(K) roundings of it, and rounding the result
    to `dtype` adds one more. A product left out or taken
    twice changes a sum by about 1. Factors rounded to TF32 add errors of either sign, which grow
    like sqrt(K). No activation is steeper than 1.13; an exponential or erf is off by a few
    roundings, and so is 1 + erf(x) where that is nearly 0.
    """
    single = torch.finfo(torch.float32).eps
    rounding = torch.finfo(getattr(torch, dtype)).eps
    atol = 2 * single * dims["K"] + rounding * sqrt(dims["K"]) / 4
    if flags.get("allow_tf32") and dtype == "float32":
        atol += 4 * _TF32_EPS * sqrt(dims["K"])
    rtol = rounding + single * sqrt(dims["K"]) / 2
    if flags.get("activation", "none") == "none":
        return {"rtol": rtol, "atol": atol}
    return {"rtol": rtol + 4 * single, "atol": 1.13 * atol + 12 * single}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return 2 M N K operations and the bytes of the three matrices and the bias."""
    m, k, n = dims["M"], dims["K"], dims["N"]
    size = m * k + k * n + m * n + (n if flags.get("bias") else 0)
    return 2.0 * m * n * k, float(itemsize * size)
