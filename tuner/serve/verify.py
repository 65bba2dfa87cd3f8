"""Same result as the reference: on the workload and on odd shapes, with every flag."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path

import torch

from tuner.records import Workload
from tuner.runtime.cases import edge_cases
from tuner.runtime.check import (
    Case,
    Example,
    Problem,
    difference,
    load_problem,
    make_inputs,
)
from tuner.runtime.signature import Signature
from tuner.runtime.variant import Variant

_WORKLOAD_SEED = 0
_EDGE_SEED = 1
_UNUSUAL = 1.25


class Verifier:
    """Checks variants of one workload; the references are computed once.

    Args:
        signature: Signature of the kernel.
        problem: The kernel's problem module.
        workload: What the variants are tuned for.
        device: Torch's name of the device.
    """

    def __init__(
        self, signature: Signature, problem: Problem, workload: Workload, device: str
    ) -> None:
        extents, flags = dict(workload.dims), dict(workload.flags)
        case = Case(extents, flags, workload.dtype, seed=_WORKLOAD_SEED, device=device)
        self._on_workload = [Example(signature, problem, case)]
        asked = signature.asked(flags)
        self._on_edges = edge_examples(signature, problem, workload.dtype, device, asked=asked)

    def check(self, variant: Variant) -> str | None:
        """Return what is wrong with a variant on its workload, or None."""
        return _first_fault(variant, self._on_workload)

    def check_edges(self, variant: Variant) -> str | None:
        """Return what is wrong with a variant on the odd shapes, or None."""
        return _first_fault(variant, self._on_edges)


def check_in_place(
    variant: Variant,
    signature: Signature,
    problem: Problem,
    case: Case,
    tensors: Mapping[str, torch.Tensor],
) -> str | None:
    """Return what is wrong with a variant on buffers that it was timed on, with new inputs.

    A variant that keeps what it has computed for a buffer is right on every fresh one.

    Args:
        variant: The variant.
        signature: Signature of its kernel.
        problem: The kernel's problem module.
        case: The workload with another seed than that of the inputs in the buffers.
        tensors: Inputs, which are overwritten, and outputs.
    """
    inputs = make_inputs(signature, problem, case)
    for name, tensor in inputs.items():
        tensors[name].copy_(tensor)
    outputs = [spec.name for spec in signature.outputs]
    for name in outputs:
        tensors[name].view(torch.uint8).fill_(0xFF)  # NaN in every type of float
    options = signature.arguments(case.flags, case.extents)
    variant.bind(tensors, case.extents, options)()
    doubles = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }
    expected = problem.reference(**doubles, **options)
    tolerance = problem.tolerance(case.extents, case.flags, case.dtype)
    for name in outputs:
        if reason := difference(tensors[name], expected[name], **tolerance):
            return f"on the buffers that it was timed on {name}{reason}"
    return None


def edge_examples(
    signature: Signature,
    problem: Problem,
    dtype: str,
    device: str,
    *,
    asked: Collection[str] = (),
) -> list[Example]:
    """Return the questions on small odd shapes, with every flag and unusual scalars.

    Every other one has misaligned tensors: a shape comes both ways where there are flags, and a
    variant is seen that moves aligned tensors in another way.

    Args:
        signature: Signature of the kernel.
        problem: The kernel's problem module.
        dtype: Torch's name of the element type.
        device: Torch's name of the device.
        asked: Names of the guarantees that variants must give.
    """
    cases = (
        Case(
            shape,
            flags,
            dtype,
            seed=_EDGE_SEED + number,
            device=device,
            scalars=_unusual_scalars(signature, problem, shape),
            misaligned=(number + choice) % 2 == 0,
        )
        for number, shape, choices in edge_cases(signature, problem, asked)
        for choice, flags in enumerate(choices)
    )
    return [Example(signature, problem, case) for case in cases]


@cache
def edge_checks(
    signature: str, problem: Path, dtype: str, asked: tuple[str, ...]
) -> list[Callable[[Variant], object]]:
    """Return the checks of the odd shapes on the host; `signature` is the kernel's, as JSON."""
    parsed = Signature.from_json(json.loads(signature))
    examples = edge_examples(parsed, load_problem(problem), dtype, "cpu", asked=asked)
    return [example.check for example in examples]


def _unusual_scalars(
    signature: Signature, problem: Problem, shape: Mapping[str, int]
) -> dict[str, float]:
    """Return scalars that a variant which ignores them would get wrong.

    Inputs that the problem makes itself may only fit together with the default scalars.
    """
    if hasattr(problem, "inputs"):
        return {}
    return {name: _UNUSUAL * value for name, value in signature.default_scalars(shape).items()}


def _first_fault(variant: Variant, examples: list[Example]) -> str | None:
    return next(filter(None, (example.check(variant) for example in examples)), None)
