"""Derivatives of frozen operations: another frozen kernel, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from .signature import Signature

Derivative = tuple[Callable[..., Any], Callable[..., None]]
"""Backward and setup_context, as `torch.library.register_autograd` takes them."""


def no_derivative(label: str, missing: str | None = None) -> Derivative:
    """Return the derivative of an operation that has none: backward raises RuntimeError.

    Args:
        label: Name of the operation, for the message.
        missing: Kernel that would give it one.
    """
    reason = "a backward operation has none, so gradients of gradients are not available"
    if missing is not None:
        reason = f"this package lacks {missing}: `tune {missing}` adds it"

    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(
            f"{label} has no derivative: call it on tensors that need no gradient, or detach its "
            f"inputs ({reason})"
        )

    def setup_context(**_: Any) -> None:
        pass

    return refuse, setup_context


def kernel_derivative(
    forward: Signature,
    backward: Signature,
    *,
    returns: Sequence[str],
    operation: Callable[[], Callable[..., Any]],
) -> Derivative:
    """Return the derivative of an operation that another kernel computes.

    The backward kernel's inputs are named like the forward kernel's inputs, its outputs, or
    ``d`` and an output that has a gradient; its outputs are named ``d`` and a forward input.

    Args:
        forward: Signature of the forward kernel.
        backward: Signature of the backward kernel.
        returns: The forward kernel's outputs that have a gradient.
        operation: Returns the backward kernel's operation.
    """
    names, outputs = _names(forward.inputs), _names(forward.outputs)
    arguments = _names(backward.inputs)
    gradients = {f"d{name}": outputs.index(name) for name in returns}
    saved = [name for name in arguments if name not in gradients]
    constant = [index for index, name in enumerate(outputs) if name not in returns]
    options = [name for name, _ in (*backward.keywords, *backward.scalars)]

    def setup_context(
        *,
        ctx: Any,
        inputs: Sequence[Tensor],
        output: Any,
        keyword_only_inputs: Mapping[str, Any] | None = None,
    ) -> None:
        results = output if isinstance(output, tuple) else (output,)
        values = dict(zip((*names, *outputs), (*inputs, *results), strict=True))
        ctx.save_for_backward(*(values[name] for name in saved))
        ctx.options = {name: (keyword_only_inputs or {})[name] for name in options}
        ctx.mark_non_differentiable(*(results[index] for index in constant))

    def run_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values = dict(zip(saved, ctx.saved_tensors, strict=True))
        values |= {name: grads[index] for name, index in gradients.items()}
        results = operation()(*(values[name] for name in arguments), **ctx.options)
        results = results if isinstance(results, tuple) else (results,)
        named = dict(zip(_names(backward.outputs), results, strict=True))
        return tuple(named.get(f"d{name}") for name in names)

    return run_backward, setup_context


def _names(specs: Sequence[Any]) -> list[str]:
    return [spec.name for spec in specs]
