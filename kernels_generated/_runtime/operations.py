"""Frozen kernels as torch operations: schema, fake implementation, registration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from .arguments import check_kinds, dtype_of, padded, workload_tensor
from .derivative import Derivative, kernel_derivative, no_derivative
from .dispatch import Choice
from .flags import Scalar
from .kernel import Kernel
from .shortcut import with_shortcut
from .signature import Signature

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
TorchOperation = Callable[..., Any]

_Library: Any = torch.library.Library  # torch leaves it without annotations
_libraries: dict[str, Any] = {}


class Operation(Protocol[P, R]):
    """A frozen kernel's function.

    Attributes:
        chosen: Tells which variant serves a shape: ``matmul.chosen(M=64, N=64, K=64)``.
        op: The torch operation that the function calls, for `torch.library.opcheck`.
    """

    chosen: Callable[..., Choice]
    op: TorchOperation

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernel."""
        ...


class Package:
    """The kernels of a frozen package, registered under its own namespace of operations.

    Registering reads signatures: no device is asked and nothing is compiled before a call.

    Args:
        name: Name that the package was imported by.
        folder: Its folder.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.namespace = name.replace(".", "_")
        self.kernels: dict[str, Kernel] = {}
        # A package that is reloaded registers anew: torch drops what a dead library registered.
        _libraries.pop(self.namespace, None)
        _libraries[self.namespace] = _Library(self.namespace, "FRAGMENT")

    def register(self, name: str) -> TorchOperation:
        """Register a kernel as an operation and return the function that calls it.

        By `torch.library.Library` rather than `custom_op`: the same checks pass, and a call
        costs less host time.

        Args:
            name: Name of the kernel.
        """
        data = self._read(name)
        signature = Signature.from_json(data["signature"])
        kernel = self.kernels[name] = Kernel(self.name, self.folder / name, signature)
        library, qualified = _libraries[self.namespace], f"{self.namespace}::{name}"
        library.define(name + schema(signature), tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, kernel.run, "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, fake(signature), lib=library)
        backward, setup_context = self._derivative(signature, data["autograd"])
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=library
        )
        return with_shortcut(self._operation(name), kernel.run, label=kernel.label)

    def operation(self, kernel: str) -> Callable[[Callable[P, R]], Operation[P, R]]:
        """Return the decorator that gives a kernel's function its attributes.

        Args:
            kernel: Name of a registered kernel.
        """

        def decorate(function: Callable[P, R]) -> Operation[P, R]:
            operation = cast("Operation[P, R]", function)
            operation.chosen = self.kernels[kernel].chosen
            operation.op = self._operation(kernel)
            return operation

        return decorate

    def _operation(self, kernel: str) -> TorchOperation:
        packet = getattr(getattr(torch.ops, self.namespace), kernel)
        return cast(TorchOperation, packet.default)

    def _derivative(self, signature: Signature, autograd: Mapping[str, Any] | None) -> Derivative:
        """Return the derivative by the autograd section, if its backward kernel is frozen, too."""
        label = f"{self.name}.{signature.kernel}"
        if autograd is None:
            return no_derivative(label)
        backward = autograd["backward"]
        if not (self.folder / backward).exists():
            return no_derivative(label, missing=backward)
        return kernel_derivative(
            signature,
            Signature.from_json(self._read(backward)["signature"]),
            returns=autograd["returns"],
            operation=lambda: self._operation(backward),
        )

    def _read(self, kernel: str) -> dict[str, Any]:
        text = (self.folder / kernel / "kernel.json").read_text(encoding="utf-8")
        return cast("dict[str, Any]", json.loads(text))


def schema(signature: Signature) -> str:
    """Return the operation's schema without its name.

    Tensors are positional; flags, options, guarantees and scalars are keywords with their
    defaults, where None stands for a scalar's default expression or an input that is left out.
    """
    arguments = [
        f"Tensor? {spec.name}=None" if spec.optional else f"Tensor {spec.name}"
        for spec in signature.inputs
    ]
    keywords = [_flag(name, choices[0]) for name, choices in signature.keywords]
    keywords += [f"float? {name}=None" for name, _ in signature.scalars]
    arguments += ["*", *keywords] if keywords else []
    outputs = ", ".join("Tensor" for _ in signature.outputs)
    returns = outputs if len(signature.outputs) == 1 else f"({outputs})"
    return f"({', '.join(arguments)}) -> {returns}"


def fake(signature: Signature) -> Callable[..., Any]:
    """Return the function that torch traces with: empty outputs of the right shapes."""
    require: Any = torch._check  # torch leaves it without annotations

    def empty_outputs(*inputs: Tensor | None, **flags: Any) -> Any:
        inputs = padded(signature, inputs)
        check_kinds(signature, inputs)
        extents: dict[str, int] = {}
        for spec, tensor in zip(signature.inputs, inputs, strict=True):
            if tensor is None:
                continue
            if tensor.ndim != len(spec.shape):
                raise ValueError(signature.rank_message(spec, tuple(tensor.shape), flags))
            for dim, extent in zip(spec.dims(flags), tensor.shape, strict=True):
                # an extent may be symbolic: the check becomes a guard of the traced graph
                require(extents.setdefault(dim, extent) == extent)
        first = workload_tensor(signature, inputs)
        outputs = tuple(
            first.new_empty(shape, dtype=dtype_of(spec, first.dtype))
            for spec, shape in signature.shapes(signature.outputs, extents)
        )
        return outputs[0] if len(outputs) == 1 else outputs

    return empty_outputs


def _flag(name: str, default: Scalar) -> str:
    kind = {bool: "bool", int: "int", float: "float", str: "str"}[type(default)]
    literal = f'"{default}"' if isinstance(default, str) else str(default)
    return f"{kind} {name}={literal}"
