"""Which of torch's operations a kernel replaces, and with what shapes and flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.records import Value

Given = Mapping[str, Any]
"""Arguments of an operation by the names of its schema."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """What is known of a tensor that need not exist."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A call in the terms of one of our kernels.

    Attributes:
        kernel: Its name.
        inputs: The shapes of its inputs.
        flags: Values of its flags.
    """

    kernel: str
    inputs: Mapping[str, Shaped]
    flags: Mapping[str, Value] = field(default_factory=dict)


def replaced(operation: str, given: Given) -> Replaced | None:
    """Return an operation's call as one of our kernels', None where none does the same.

    Args:
        operation: Its name, such as ``"aten::mm"``.
        given: Its arguments by name, tensors among them.
    """
    convert = _OPERATIONS.get(operation)
    return convert(given) if convert is not None else None


def _mm(given: Given) -> Replaced:
    return _product(given["self"].shape, given["mat2"].shape)


def _addmm(given: Given) -> Replaced:
    return _product(given["mat1"].shape, given["mat2"].shape)


def _linear(given: Given) -> Replaced:
    n, k = given["weight"].shape
    return _product((math.prod(given["input"].shape[:-1]), k), (k, n))


def _product(a: tuple[int, ...], b: tuple[int, ...]) -> Replaced:
    return Replaced("matmul", {"a": Shaped(tuple(a)), "b": Shaped(tuple(b))})


def _softmax(given: Given) -> Replaced | None:
    x = given["self"]
    if not _is_last(x, given["dim"]) or given["half_to_float"]:
        return None
    return Replaced("softmax", {"x": _rows(x)})


def _softmax_backward(given: Given) -> Replaced | None:
    y = given["output"]
    if not _is_last(y, given["dim"]) or given["input_dtype"] != y.dtype:
        return None
    return Replaced("softmax_backward", {"y": _rows(y), "dy": _rows(y)})


def _rms_norm(given: Given) -> Replaced | None:
    x, weight = given["input"], given["weight"]
    if weight is None or len(given["normalized_shape"]) != 1:
        return None
    return Replaced("rms_norm", {"x": _rows(x), "weight": Shaped(tuple(weight.shape))})


def _rms_norm_backward(given: Given) -> Replaced | None:
    forward = _rms_norm(given)
    if forward is None:
        return None
    x = forward.inputs["x"]
    inputs = {**forward.inputs, "rstd": Shaped(x.shape[:1]), "dy": x}
    return Replaced("rms_norm_backward", inputs)


def _attention(given: Given) -> Replaced | None:
    """Convert a forward pass; ours has no mask of its own, no dropout and one head size."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    causal = bool(given["is_causal"])
    masks = (given.get("attn_mask"), given.get("attn_bias"))
    if any(mask is not None for mask in masks) or given["dropout_p"] or k.shape != v.shape:
        return None
    if any(tensor.ndim != 4 for tensor in (q, k, v)) or q.shape[-1] != k.shape[-1]:
        return None
    if causal and q.shape[2] != k.shape[2]:  # torch aligns the mask at the other corner
        return None
    inputs = {name: Shaped(tuple(x.shape)) for name, x in (("q", q), ("k", k), ("v", v))}
    return Replaced("attention_forward", inputs, {"causal": causal})


def _attention_backward(given: Given) -> Replaced | None:
    forward = _attention(given)
    if forward is None:
        return None
    q = forward.inputs["q"]
    inputs = {**forward.inputs, "o": q, "lse": Shaped(q.shape[:3]), "do": q}
    return Replaced("attention_backward", inputs, forward.flags)


def _is_last(tensor: Any, dim: int) -> bool:
    return bool(tensor.ndim >= 1 and dim in (-1, tensor.ndim - 1))


def _rows(tensor: Any) -> Shaped:
    """Return a tensor's shape as rows of its last dim."""
    return Shaped((math.prod(tensor.shape[:-1]), tensor.shape[-1]))


_SDPA = "aten::_scaled_dot_product_"
_OPERATIONS: dict[str, Callable[[Given], Replaced | None]] = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::linear": _linear,
    "aten::_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_fused_rms_norm": _rms_norm,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    **{
        f"{_SDPA}{kind}_attention{suffix}": convert
        for kind in ("flash", "efficient", "cudnn")
        for suffix, convert in (("", _attention), ("_backward", _attention_backward))
    },
    f"{_SDPA}flash_attention_for_cpu": _attention,
    f"{_SDPA}flash_attention_for_cpu_backward": _attention_backward,
}
