"""What a host function does on a workload, as a digest: equal for variants that do the same."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.plugins import BuildTask

_COMMENTS = {"ptx": "//", "amdgcn": ";"}
"""What begins a comment, by the names that triton has for machine code as text."""

_DEBUG_LINES, _DEBUG_SECTION = (".loc", ".file"), ".section\t.debug"


def meta_tensors(task: BuildTask) -> dict[str, torch.Tensor]:
    """Return the inputs and outputs of a task's workload by name, without data."""
    signature, workload = task.signature, task.workload
    specs = (*signature.inputs, *signature.outputs)
    return {
        spec.name: torch.empty(
            shape, dtype=getattr(torch, spec.dtype or workload.dtype), device="meta"
        )
        for spec, shape in signature.shapes(specs, dict(workload.dims), dict(workload.flags))
    }


class Witness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every launch and every operation of torch on tensors without data.

    Args:
        tensors: The inputs and outputs by name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes: list[str] | None = []
        self._kept: list[torch.Tensor] = []  # or another one could come to lie in its place
        self._names: dict[int, str] = {}
        for name, tensor in tensors.items():
            self._name(tensor, name)

    @property
    def code(self) -> str | None:
        """A digest of all that was noted; None where a kernel has no machine code as text."""
        if self._notes is None:
            return None
        return hashlib.sha256("\n".join(self._notes).encode()).hexdigest()[:16]

    def launch(self, kernel: Any, *arguments: object, **options: object) -> None:
        """Note what is launched, with which arguments and options."""
        machine_code = _machine_code(kernel)
        self._note(machine_code and f"{machine_code} {self._describe((arguments, options))}")

    def __torch_dispatch__(
        self, function: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        result = function(*args, **(kwargs or {}))
        self._note(f"{function} {self._describe((args, kwargs or {}))}")
        return result

    def _note(self, note: str | None) -> None:
        if note is None or self._notes is None:
            self._notes = None
        else:
            self._notes.append(note)

    def _describe(self, value: object) -> str:
        if isinstance(value, torch.Tensor):
            place = value.stride(), value.storage_offset()
            return f"{self._name(value)}{value.dtype}{tuple(value.shape)}{place}"
        if isinstance(value, Mapping):
            return str({key: self._describe(item) for key, item in sorted(value.items())})
        if isinstance(value, list | tuple):
            return str([self._describe(item) for item in value])
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return f"{type(value).__name__}{self._describe(parts)}"
        return repr(value)

    def _name(self, tensor: torch.Tensor, name: str = "") -> str:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._names:
            self._names[storage] = name or str(len(self._names))
            self._kept.append(tensor)
        return self._names[storage]


def _machine_code(kernel: Any) -> str | None:
    """Return a kernel's machine code without what it says of lines of the source, if it has it."""
    language = next(iter(_COMMENTS.keys() & kernel.asm.keys()), None)
    if language is None:
        return None
    text = kernel.asm[language].split(_DEBUG_SECTION)[0]
    lines = (line.split(_COMMENTS[language])[0].strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(_DEBUG_LINES))
