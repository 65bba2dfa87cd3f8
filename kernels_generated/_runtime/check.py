"""Is a variant right? Its outputs against a float64 reference, and nothing else touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .cases import InputError
from .flags import Scalar
from .guard import GuardedTensor
from .signature import Signature
from .tensor_spec import TensorSpec
from .triton_module import import_file
from .variant import Variant


class Problem(Protocol):
    """What a kernel computes: the module ``problems/KERNEL.py``.

    An edge shape that also names flags is checked with those alone, any other with all of them.
    It may also have ``inputs(dims, flags, dtype, generator)``, which returns the inputs by name
    on the generator's device; without it they are drawn from the normal distribution.
    """

    RIVAL: str
    EDGE_SHAPES: tuple[Mapping[str, Any], ...]

    def reference(self, **arguments: Any) -> dict[str, Tensor]:
        """Return the outputs in float64 for inputs in float64, flags and scalars."""
        ...

    def tolerance(
        self, dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
    ) -> dict[str, float]:
        """Return rtol and atol: an element may be off by atol + rtol * abs(reference)."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One question that a variant must answer.

    Attributes:
        extents: Extent of every dim.
        flags: Value of every flag.
        dtype: Torch's name of the workload's element type.
        seed: Seed of the inputs.
        device: Torch's name of the device.
        scalars: Values that replace the defaults of the signature's scalars.
        misaligned: Whether the tensors begin one element off any vector's alignment, as slices
            of tensors do.
    """

    extents: Mapping[str, int]
    flags: Mapping[str, Scalar]
    dtype: str
    seed: int = 0
    device: str = "cpu"
    scalars: Mapping[str, float] = field(default_factory=dict)
    misaligned: bool = False

    def __str__(self) -> str:
        """Return the command line's form of the workload, with what else matters."""
        values = {**self.extents, **self.flags, **self.scalars}
        parts = [f"{name}={str(value).lower()}" for name, value in values.items()]
        parts += ["misaligned"] if self.misaligned else []
        return ",".join([*parts, f"dtype={self.dtype}", f"seed={self.seed}"])


class Example:
    """The inputs of a case and the outputs that they must give, for any number of variants.

    Args:
        signature: Signature of the kernel.
        problem: What it computes.
        case: The question.
    """

    def __init__(self, signature: Signature, problem: Problem, case: Case) -> None:
        self.signature, self.case = signature, case
        self.options = {**signature.arguments(case.flags, case.extents), **case.scalars}
        self._inputs = _guarded_inputs(signature, problem, case)
        self._pristine = {name: item.buffer.clone() for name, item in self._inputs.items()}
        self._tolerance = problem.tolerance(case.extents, case.flags, case.dtype)
        doubles = {name: _double(item.tensor) for name, item in self._inputs.items()}
        self._expected = problem.reference(**doubles, **self.options)

    def bind(self, variant: Variant) -> tuple[Callable[[], None], Mapping[str, GuardedTensor]]:
        """Return the call of a variant on outputs of its own, and those outputs, full of NaN."""
        outputs = {
            spec.name: _guarded(shape, element_type(spec, self.case.dtype), self.case)
            for spec, shape in self.signature.shapes(self.signature.outputs, self.case.extents)
        }
        inputs = {name: item.tensor for name, item in self._inputs.items()}
        if self.case.misaligned:  # the unusual case: strides are unusual in it, too
            strided = variant.strided & inputs.keys()
            inputs |= {name: _restrided(inputs[name]) for name in strided}
        tensors = inputs | {name: item.tensor for name, item in outputs.items()}
        return variant.bind(tensors, self.case.extents, self.options), outputs

    def check(self, variant: Variant) -> str | None:
        """Return what is wrong with a variant, or None.

        What the variant raises passes through.
        """
        call, outputs = self.bind(variant)
        call()
        reason = self.fault(variant, outputs)
        return f"{reason} ({self.case})" if reason else None

    def fault(self, variant: Variant, outputs: Mapping[str, GuardedTensor]) -> str | None:
        """Return what is wrong with a variant that has run, or None."""
        reason = self._changed_input() or self._wrong_output(outputs)
        if reason or not self.case.flags.get("deterministic"):
            return reason
        call, again = self.bind(variant)
        call()
        return next(filter(None, (_changed_bits(name, outputs, again) for name in outputs)), None)

    def _changed_input(self) -> str | None:
        for name, item in self._inputs.items():
            pristine = self._pristine[name]
            if torch.equal(item.buffer, pristine):
                continue
            stray = item.stray_write()
            item.buffer.copy_(pristine)  # the next variant finds the inputs as they were
            return f"wrote out of bounds of {name}: {stray}" if stray else f"changed {name}"
        return None

    def _wrong_output(self, outputs: Mapping[str, GuardedTensor]) -> str | None:
        for name, item in outputs.items():
            if stray := item.stray_write():
                return f"wrote out of bounds of {name}: {stray}"
        for name, item in outputs.items():
            if reason := difference(item.tensor, self._expected[name], **self._tolerance):
                return f"{name}{reason}"
        return None


def check(variant: Variant, signature: Signature, problem: Problem, case: Case) -> str | None:
    """Return what is wrong with a variant in one case, or None; what it raises passes through."""
    return Example(signature, problem, case).check(variant)


def difference(got: Tensor, expected: Tensor, *, rtol: float, atol: float) -> str | None:
    """Return where and how much two tensors differ, or None.

    Infinities equal themselves, and NaN is right where the expected tensor has it.

    Args:
        got: What was computed.
        expected: float64, of the same shape.
        rtol: Relative tolerance of an element.
        atol: Absolute tolerance of an element.
    """
    if got.shape != expected.shape:
        return f" has the shape {list(got.shape)}, the reference {list(expected.shape)}"
    got, expected = got.double(), expected.to(got.device)
    same = (got == expected) | (got.isnan() & expected.isnan())
    near = ((got - expected).abs() <= atol + rtol * expected.abs()) & expected.isfinite()
    wrong = (~(same | near)).nonzero()
    if not len(wrong):
        return None
    index = tuple(wrong[0].tolist())
    return (
        f"{list(index)} is {got[index].item():.9g} but must be {expected[index].item():.9g} "
        f"(rtol={rtol:.3g}, atol={atol:.3g}); {len(wrong)} of {got.numel()} elements are wrong"
    )


def _changed_bits(
    name: str, before: Mapping[str, GuardedTensor], after: Mapping[str, GuardedTensor]
) -> str | None:
    """Return how an output of two equal runs differs, or None."""
    changed = int((before[name].buffer != after[name].buffer).sum())
    return f"{name} differs in {changed} bytes from run to run" if changed else None


def element_type(spec: TensorSpec, dtype: str) -> torch.dtype:
    """Return the element type of a tensor in a workload of some dtype."""
    return cast(torch.dtype, getattr(torch, spec.dtype or dtype))


def load_problem(path: Path) -> Problem:
    """Import a problem's file, which need not lie in a package."""
    return cast(Problem, import_file(path, f"{__name__}.problem_{path.parent.name}_{path.stem}"))


def make_inputs(signature: Signature, problem: Problem, case: Case) -> dict[str, Tensor]:
    """Return the inputs of a case, the same for the same seed.

    Raises:
        InputError: They cannot be made.
    """
    generator = torch.Generator(case.device).manual_seed(case.seed)
    if inputs := getattr(problem, "inputs", None):
        dtype = getattr(torch, case.dtype)
        return cast(dict[str, Tensor], inputs(case.extents, case.flags, dtype, generator))
    tensors = {}
    for spec, shape in signature.shapes(signature.inputs, case.extents, case.flags):
        dtype = element_type(spec, case.dtype)
        kind: dict[str, Any] = {"dtype": dtype, "device": case.device, "generator": generator}
        try:
            tensors[spec.name] = torch.randn(shape, **kind)
        except (MemoryError, RuntimeError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"{signature.kernel}: the input {spec.name} of {list(shape)}, {dtype}, cannot be "
                f"made: {reason}; other inputs come from the problem's inputs()"
            ) from error
    return tensors


def _guarded_inputs(
    signature: Signature, problem: Problem, case: Case
) -> dict[str, GuardedTensor]:
    guarded = {}
    for name, tensor in make_inputs(signature, problem, case).items():
        guarded[name] = _guarded(tuple(tensor.shape), tensor.dtype, case)
        guarded[name].tensor.copy_(tensor)
    return guarded


def _guarded(shape: tuple[int, ...], dtype: torch.dtype, case: Case) -> GuardedTensor:
    return GuardedTensor(shape, dtype, device=case.device, misaligned=case.misaligned)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor.clone()


def _restrided(tensor: Tensor) -> Tensor:
    """Return a copy whose last two dims lie in memory the other way round."""
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
