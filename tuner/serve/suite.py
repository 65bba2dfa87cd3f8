"""The correctness suite of a kernel: its problem's cases, and what a variant makes of one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tuner.runtime.cases import edge_cases
from tuner.runtime.check import Case, Example, Problem
from tuner.runtime.expression import Expression
from tuner.runtime.signature import Signature
from tuner.runtime.variant import Variant
from tuner.serve.problem import CheckedProblem
from tuner.space.template import ITEMSIZES

Entry = dict[str, Any]
"""A case as JSON: the attributes of `Case` but its device, and `options`, keywords of the
problem's `inputs` and `tolerance`."""

_CASE = ("extents", "flags", "dtype", "seed", "scalars", "misaligned")


def suite(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cases of a kernel, and how many cost more operations than a request allows.

    They are those of the problem's ``SUITE``, if it has one, its odd shapes with every flag,
    aligned and not, and the given workloads. An entry of ``SUITE`` maps names to tuples of values
    and stands for their product; a name is a dim, a flag, a guarantee, a scalar (times its
    default), ``misaligned``, an option of the problem, or several of them with spaces between,
    whose values are tuples.

    Args:
        message: The parent's request.
    """
    signature = Signature.from_json(message["signature"])
    problem: Any = CheckedProblem(Path(message["problem"]), signature)
    dtype, most = message["workload"]["dtype"], message["most_operations"]
    grids = [_grid(signature, grid) for grid in getattr(problem, "SUITE", ())]
    given = [
        _entry(item["dims"], item["flags"], misaligned=False) for item in message["workloads"]
    ]
    entries = [*_edges(signature, problem), *itertools.chain(*grids), *given]
    for number, entry in enumerate(entries):
        entry |= {"dtype": dtype, "seed": number}
    kept = [
        entry
        for entry in entries
        if most is None
        or problem.cost(entry["extents"], entry["flags"], ITEMSIZES[dtype])[0] <= most
    ]
    return {"entries": kept, "left_out": len(entries) - len(kept)}


def _edges(signature: Signature, problem: Problem) -> Iterator[Entry]:
    for _, shape, choices in edge_cases(signature, problem):
        for flags, misaligned in itertools.product(choices, (False, True)):
            yield _entry(dict(shape), dict(flags), misaligned=misaligned)


def _grid(signature: Signature, grid: Mapping[str, Sequence[Any]]) -> Iterator[Entry]:
    """Yield the product of an entry of ``SUITE``."""
    for chosen in itertools.product(*grid.values()):
        values: dict[str, Any] = {}
        for names, value in zip(grid, chosen, strict=True):
            several = names.split()
            values |= zip(several, value if len(several) > 1 else (value,), strict=True)
        extents = _extents(signature, values)
        given = {name: values.pop(name) for name, _ in signature.choices if name in values}
        flags = signature.complete_flags(given)
        entry = _entry(extents, flags, misaligned=values.pop("misaligned", False))
        for name, default in signature.default_scalars(extents).items():
            if name in values:
                entry["scalars"][name] = values.pop(name) * default
        entry["options"] = values
        yield entry


def _extents(signature: Signature, values: dict[str, Any]) -> dict[str, int]:
    """Take the dims out of the values, and give the others their defaults."""
    given = {name: values.pop(name) for name in signature.dims if name in values}
    for name, text in signature.defaults:
        if name not in given:
            given[name] = Expression(text, f"{signature.kernel}: default of {name}").evaluate(
                given
            )
    return {name: given[name] for name in signature.dims}


def _entry(extents: dict[str, int], flags: dict[str, Any], *, misaligned: bool) -> Entry:
    shared: Entry = {"scalars": {}, "options": {}, "misaligned": misaligned}
    return {"extents": extents, "flags": flags, **shared}


class Question(Example):
    """A case of the suite with its inputs and the outputs that they must give.

    Args:
        message: The parent's request; its `entry` is the case.
        device: Torch's name of the device.
    """

    def __init__(self, message: Mapping[str, Any], device: str) -> None:
        entry = message["entry"]
        case = Case(**{name: entry[name] for name in _CASE}, device=device)
        signature = Signature.from_json(message["signature"])
        problem = _varied(CheckedProblem(Path(message["problem"]), signature), entry)
        super().__init__(signature, problem, case)

    def answer(self, variant: Variant) -> dict[str, Any]:
        """Return what is wrong with a variant, or None, and its largest error over the tolerance.

        What the variant raises passes through.
        """
        call, outputs = self.bind(variant)
        call()
        fault = self.fault(variant, outputs)
        errors = [self._error(item.tensor, self._expected[name]) for name, item in outputs.items()]
        return {"fault": fault, "error": max(errors, default=0.0)}

    def _error(self, got: Tensor, expected: Tensor) -> float:
        got, expected = got.double(), expected.to(got.device)
        allowed = self._tolerance["atol"] + self._tolerance["rtol"] * expected.abs()
        same = (got == expected) | (got.isnan() & expected.isnan())
        errors = torch.where(same, 0.0, (got - expected).abs() / allowed)
        return float(errors.nan_to_num(nan=torch.inf).max()) if errors.numel() else 0.0


def _varied(problem: Any, entry: Entry) -> Any:
    """Return a problem whose inputs and tolerance know what an entry varies."""
    options = {**entry["options"], **entry["scalars"]}
    if not options:
        return problem
    varied = SimpleNamespace(
        reference=problem.reference,
        tolerance=lambda *arguments: problem.tolerance(*arguments, **options),
    )
    if hasattr(problem, "inputs"):
        varied.inputs = lambda *arguments: problem.inputs(*arguments, **options)
    return varied
