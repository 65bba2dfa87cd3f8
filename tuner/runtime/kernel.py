"""A frozen kernel: checks a call's arguments, picks the variant, allocates and runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .arguments import (
    check_kinds,
    device_of_name,
    dtype_name,
    dtype_of,
    dtype_of_name,
    number_of,
    padded,
    workload_tensor,
)
from .dispatch import Choice, Dispatch
from .flags import Scalar
from .signature import Signature
from .variant import Variant, load_variant

PLANS_LIMIT = 4096
"""Calls of different shapes that are remembered; a longer list starts anew."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a call once its devices, dtypes, shapes and flags are known.

    Attributes:
        variant: The loaded variant; None where every output is empty.
        extents: Extent of every dim.
        outputs: Name, shape and element type of every output.
        options: Value of every flag and the default of every scalar.
        copied: Names of the inputs that must be contiguous.
        device: Where the call runs.
    """

    variant: Variant | None
    extents: dict[str, int]
    outputs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    options: dict[str, Scalar]
    copied: tuple[str, ...]
    device: torch.device


class Kernel:
    """A frozen kernel of a package.

    Args:
        package: Name of the package, for messages.
        folder: The kernel's folder.
        signature: Its signature.
    """

    def __init__(self, package: str, folder: Path, signature: Signature) -> None:
        self.signature, self.folder = signature, folder
        self.label = f"{package}.{signature.kernel}"
        self.dispatch = Dispatch(package, folder, signature)
        self._inputs = tuple(spec.name for spec in signature.inputs)
        self._flags = {name: choices[0] for name, choices in signature.keywords}
        self._deterministic = "deterministic" in signature.guarantees
        self._scalars = tuple(name for name, _ in signature.scalars)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._variants: dict[Path, Variant] = {}
        self._lock = threading.Lock()

    def run(self, *inputs: Tensor | None, **options: Scalar | None) -> Any:
        """Run the kernel on its inputs and return its outputs: the operation's implementation.

        Args:
            inputs: The inputs in the signature's order, None where an optional one is left out.
            options: Flags, options, guarantees and scalars; a scalar that is None takes its
                default expression.
        """
        inputs = padded(self.signature, inputs)
        if self._deterministic and torch.are_deterministic_algorithms_enabled():
            options["deterministic"] = True
        flags = tuple([options.get(name, default) for name, default in self._flags.items()])
        key = (flags, *(item is not None and _kind(item) for item in inputs))
        try:
            plan = self._plans.get(key)
        except TypeError:  # a flag that cannot be looked up is none of its choices
            plan = None
        if plan is None:
            plan = self._plan(key, inputs, dict(zip(self._flags, flags, strict=True)))
        tensors = dict(zip(self._inputs, inputs, strict=True))
        for name in plan.copied:
            tensors[name] = cast(Tensor, tensors[name]).contiguous()
        for name, shape, dtype in plan.outputs:
            tensors[name] = torch.empty(shape, dtype=dtype, device=plan.device)
        if plan.variant is not None:
            values = plan.options
            given = {
                name: number_of(self.label, name, value)
                for name in self._scalars
                if (value := options.get(name)) is not None
            }
            if given:
                values = {**values, **given}
            _call(plan.variant.bind(tensors, plan.extents, values), plan.device)
        outputs = tuple([tensors[name] for name, _, _ in plan.outputs])
        return outputs[0] if len(outputs) == 1 else outputs

    def chosen(
        self,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        **values: Scalar,
    ) -> Choice:
        """Return which variant serves a shape, and why.

        Args:
            dtype: The element type or torch's name of it; None stands for the only one that was
                tuned for this kind of device, or is served there.
            device: A device; None stands for the accelerator, where something is frozen for one
                and one is here, else the CPU.
            values: Extents of the dims and values of the flags and guarantees.

        Raises:
            ValueError: A name is unknown or missing, or a value is not allowed.
            NotImplementedError: No variant serves that.
        """
        flag_names = set(dict(self.signature.choices))
        extents = {name: value for name, value in values.items() if name not in flag_names}
        flags = {name: value for name, value in values.items() if name in flag_names}
        place = self._device(device)
        return self.dispatch.choose(
            self.signature.complete(cast("dict[str, int]", extents)),
            dtype=self.dispatch.only_dtype(place)
            if dtype is None
            else dtype_of_name(self.label, dtype),
            flags=self.signature.complete_flags(flags),
            device=place,
        )

    def variant(self, path: Path, language: str) -> Variant:
        """Return a loaded file of the package, compiled or imported at its first use."""
        with self._lock:
            if path not in self._variants:
                self._variants[path] = load_variant(
                    self.signature, language, path=path, compiler=os.environ.get("CXX")
                )
            return self._variants[path]

    def _device(self, device: str | torch.device | None) -> torch.device:
        if device is not None:
            return device_of_name(self.label, device)
        elsewhere = any(item.kind != "cpu" for item in self.dispatch.manifests)
        if elsewhere and torch.accelerator.is_available():
            return torch.device(torch.accelerator.current_accelerator() or "cpu")
        return torch.device("cpu")

    def _plan(
        self, key: tuple[Any, ...], inputs: Sequence[Tensor | None], flags: dict[str, Any]
    ) -> Plan:
        """Check a call of a new kind, find its variant and remember both."""
        signature = self.signature
        first = workload_tensor(signature, inputs)
        check_kinds(signature, inputs)
        given = {
            name: item for name, item in zip(self._inputs, inputs, strict=True) if item is not None
        }
        optional = (spec.name for spec in signature.inputs if spec.optional)
        flags = signature.complete_flags(flags | {name: name in given for name in optional})
        extents = signature.bind(given, flags)
        outputs = tuple(
            (spec.name, shape, dtype_of(spec, first.dtype))
            for spec, shape in signature.shapes(signature.outputs, extents)
        )
        variant = None
        if any(0 not in shape for _, shape, _ in outputs):
            choice = self.dispatch.choose(
                extents, dtype=dtype_name(first.dtype), flags=flags, device=first.device
            )
            path = self.folder / choice.arch / choice.file
            variant = self.variant(path, choice.language)
        strided = variant.strided if variant is not None else frozenset(self._inputs)
        plan = Plan(
            variant,
            extents,
            outputs,
            signature.arguments(flags, extents) if variant is not None else {},
            tuple(name for name in given if name not in strided),
            first.device,
        )
        if len(self._plans) >= PLANS_LIMIT:
            self._plans.clear()
        self._plans[key] = plan
        return plan


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def _call(call: Callable[[], None], device: torch.device) -> None:
    """Call a bound variant with its device as the current one, as Triton's launches need it."""
    if device.index is None or device.index == torch.accelerator.current_device_index():
        call()
        return
    with torch.accelerator.device_index(device.index):
        call()
