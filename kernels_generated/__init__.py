"""Kernels tuned by the clock and frozen: torch operations that need no tuner.

- `attention`: O = softmax(scale * Q K^T) V, with the log-sum-exp of each row of scores.
- `attention_backward`: dQ, dK and dV of attention, with the probabilities computed anew from Q, K and lse.
- `attention_forward`: O = softmax(scale * Q K^T) V, with the log-sum-exp of each row of scores.
- `matmul`: C = activation(A B + bias).
- `rms_norm`: y = weight * x / sqrt(mean(x^2) + eps) over each row, with the factor of each row.
- `rms_norm_backward`: the gradients of x and weight in y = weight * x * rstd.
- `softmax`: y = softmax(x) over each row.
- `softmax_backward`: dx = y * (dy - sum(y * dy)) over each row.

`NAME.chosen(DIM=extent, ...)` tells which variant serves a shape and why, and
`python -m PACKAGE verify` checks every variant on this machine. Written by `tune freeze`:
changes are overwritten.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from ._runtime.operations import Package

__all__ = [
    "attention",
    "attention_backward",
    "attention_forward",
    "matmul",
    "rms_norm",
    "rms_norm_backward",
    "softmax",
    "softmax_backward",
]

_package = Package(__name__, Path(__file__).parent)
_attention_forward = _package.register("attention_forward")
_attention_backward = _package.register("attention_backward")
_matmul = _package.register("matmul")
_rms_norm = _package.register("rms_norm")
_rms_norm_backward = _package.register("rms_norm_backward")
_softmax = _package.register("softmax")
_softmax_backward = _package.register("softmax_backward")


@_package.operation("attention_forward")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    deterministic: bool = False,
    scale: float | None = None,
) -> Tensor:
    """O = softmax(scale * Q K^T) V, with the log-sum-exp of each row of scores.

    Differentiable once; the derivative of its derivative is refused.

    Args:
        q: [B, H, S, D].
        k: [B, KV, T, D].
        v: [B, KV, T, D].
        causal: False or True.
        deterministic: True asks for equal bits in every run, as torch's own setting does.
        scale: None stands for D ** -0.5.

    Returns:
        o: [B, H, S, D].
    """
    o, _lse = _attention_forward(q, k, v, causal=causal, deterministic=deterministic, scale=scale)
    return o


@_package.operation("attention_backward")
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    *,
    causal: bool = False,
    deterministic: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV of attention, with the probabilities computed anew from Q, K and lse.

    Args:
        q: [B, H, S, D].
        k: [B, KV, T, D].
        v: [B, KV, T, D].
        o: [B, H, S, D].
        lse: [B, H, S], float32.
        do: [B, H, S, D].
        causal: False or True.
        deterministic: True asks for equal bits in every run, as torch's own setting does.
        scale: None stands for D ** -0.5.

    Returns:
        dq: [B, H, S, D].
        dk: [B, KV, T, D].
        dv: [B, KV, T, D].
    """
    dq, dk, dv = _attention_backward(
        q, k, v, o, lse, do, causal=causal, deterministic=deterministic, scale=scale
    )
    return dq, dk, dv


@_package.operation("attention_forward")
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    deterministic: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """O = softmax(scale * Q K^T) V, with the log-sum-exp of each row of scores.

    Args:
        q: [B, H, S, D].
        k: [B, KV, T, D].
        v: [B, KV, T, D].
        causal: False or True.
        deterministic: True asks for equal bits in every run, as torch's own setting does.
        scale: None stands for D ** -0.5.

    Returns:
        o: [B, H, S, D].
        lse: [B, H, S], float32.
    """
    o, lse = _attention_forward(q, k, v, causal=causal, deterministic=deterministic, scale=scale)
    return o, lse


@_package.operation("matmul")
def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["none", "relu", "gelu", "silu"] = "none",
    transposed_b: bool = False,
    allow_tf32: bool = False,
) -> Tensor:
    """C = activation(A B + bias).

    Args:
        a: [M, K].
        b: [K, N], or [N, K] if transposed_b.
        bias: [N]; None leaves it out.
        activation: "none" or "relu" or "gelu" or "silu".
        transposed_b: False or True.
        allow_tf32: False or True.

    Returns:
        c: [M, N].
    """
    c: Tensor = _matmul(
        a, b, bias, activation=activation, transposed_b=transposed_b, allow_tf32=allow_tf32
    )
    return c


@_package.operation("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, *, eps: float | None = None) -> Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps) over each row, with the factor of each row.

    Differentiable once; the derivative of its derivative is refused.

    Args:
        x: [M, N].
        weight: [N].
        eps: None stands for 1e-6.

    Returns:
        y: [M, N].
    """
    y, _rstd = _rms_norm(x, weight, eps=eps)
    return y


@_package.operation("rms_norm_backward")
def rms_norm_backward(
    x: Tensor, weight: Tensor, rstd: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor]:
    """the gradients of x and weight in y = weight * x * rstd.

    Args:
        x: [M, N].
        weight: [N].
        rstd: [M], float32.
        dy: [M, N].

    Returns:
        dx: [M, N].
        dweight: [N].
    """
    dx, dweight = _rms_norm_backward(x, weight, rstd, dy)
    return dx, dweight


@_package.operation("softmax")
def softmax(x: Tensor) -> Tensor:
    """y = softmax(x) over each row.

    Differentiable once; the derivative of its derivative is refused.

    Args:
        x: [M, N].

    Returns:
        y: [M, N].
    """
    y: Tensor = _softmax(x)
    return y


@_package.operation("softmax_backward")
def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """dx = y * (dy - sum(y * dy)) over each row.

    Args:
        y: [M, N].
        dy: [M, N].

    Returns:
        dx: [M, N].
    """
    dx: Tensor = _softmax_backward(y, dy)
    return dx
