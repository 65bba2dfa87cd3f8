"""Same result as the reference: on the workload and on odd shapes, with every flag."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from tuner.records import Workload
from tuner.runtime.check import Case, Example, Problem, flag_choices
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
        self._signature = signature
        self._problem = problem
        self._workload = workload
        self._device = device
        self._on_workload = self._examples([self._workload_case()])
        self._on_edges = self._examples(self._edge_cases())

    def check(self, variant: Variant) -> str | None:
        """Return what is wrong with a variant on its workload, or None."""
        return _first_fault(variant, self._on_workload)

    def check_edges(self, variant: Variant) -> str | None:
        """Return what is wrong with a variant on the odd shapes, or None."""
        return _first_fault(variant, self._on_edges)

    def _examples(self, cases: Iterable[Case]) -> list[Example]:
        return [Example(self._signature, self._problem, case) for case in cases]

    def _workload_case(self) -> Case:
        extents, flags = dict(self._workload.dims), dict(self._workload.flags)
        dtype = self._workload.dtype
        return Case(extents, flags, dtype, seed=_WORKLOAD_SEED, device=self._device)

    def _edge_cases(self) -> Iterator[Case]:
        for number, shape in enumerate(self._problem.EDGE_SHAPES):
            for flags in flag_choices(self._signature):
                yield Case(
                    shape,
                    flags,
                    self._workload.dtype,
                    seed=_EDGE_SEED + number,
                    device=self._device,
                    scalars=self._unusual_scalars(shape),
                    misaligned=True,
                )

    def _unusual_scalars(self, shape: Mapping[str, int]) -> dict[str, float]:
        """Return scalars that a variant which ignores them would get wrong.

        Inputs that the problem makes itself may only fit together with the default scalars.
        """
        if hasattr(self._problem, "inputs"):
            return {}
        defaults = self._signature.default_scalars(shape)
        return {name: _UNUSUAL * value for name, value in defaults.items()}


def _first_fault(variant: Variant, examples: list[Example]) -> str | None:
    return next(filter(None, (example.check(variant) for example in examples)), None)
