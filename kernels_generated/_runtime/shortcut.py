"""Past torch's dispatcher where nothing but the kernel would see the call.

The dispatcher and its autograd layer cost several times what a frozen kernel's own checks do, and
a small kernel's call is bound by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)
_C: Any = torch._C
_unpack_dual: Any = forward_ad.unpack_dual


def with_shortcut(
    operation: Callable[..., Any], implementation: Callable[..., Any], *, label: str
) -> Callable[..., Any]:
    """Return a function that calls the operation, or its implementation where that is the same.

    Where torch does not let us tell, it is the operation itself.

    Args:
        operation: The registered operation.
        implementation: What the dispatcher would call in the end; it takes the same arguments.
        label: The operation's name, for messages.
    """
    try:
        _is_observed()
    except AttributeError:  # another torch, whose inner names differ
        return operation

    def call(*inputs: Tensor | None, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return operation(*inputs, **options)
        if _is_observed():
            _require_reverse_mode(inputs, label)
            return operation(*inputs, **options)
        if not all(map(_is_plain, inputs)):
            return operation(*inputs, **options)
        return implementation(*inputs, **options)

    return call


def _require_reverse_mode(inputs: Sequence[Tensor | None], label: str) -> None:
    """Raise where torch would take a forward-mode derivative of an operation for zero.

    Raises:
        NotImplementedError: An input has a tangent, or `torch.func.grad` wants a derivative.
    """
    interpreter = _C._functorch.peek_interpreter_stack()
    wanted = interpreter is not None and interpreter.key().name == "Grad"
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            continue
        tangent = None
        if forward_ad._current_level >= 0:
            tangent = _unpack_dual(tensor).tangent
        if tangent is not None or (wanted and tensor.requires_grad):
            raise NotImplementedError(
                f"{label}: has no derivative in forward mode (jvp) or for torch.func.grad: use "
                "torch.autograd.grad or backward()"
            )


def _is_observed() -> bool:
    """Whether a mode, a function transform, a tracer or a profiler wants to see operations."""
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _C._get_tracing_state() is not None
        or _C._autograd._profiler_enabled()
    )


def _is_plain(tensor: Tensor | None) -> bool:
    """Whether a tensor has its values in memory as they are, and needs no gradient."""
    return tensor is None or (
        type(tensor) in _PLAIN
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and not (tensor.is_meta or tensor.is_neg() or tensor.is_conj())
    )
