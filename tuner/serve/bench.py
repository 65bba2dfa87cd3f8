"""One workload in a measuring child: its buffers, its verifier, and the timing of variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from tuner import codec
from tuner.plugins import Builder, BuildTask, Device
from tuner.records import Workload
from tuner.runtime.check import Case, element_type, make_inputs
from tuner.runtime.signature import Signature
from tuner.runtime.variant import Variant
from tuner.serve import experiments
from tuner.serve.problem import CheckedProblem
from tuner.serve.verify import Verifier, check_in_place
from tuner.space.template import ITEMSIZES
from tuner.timing.clock import Clock
from tuner.timing.pace import Pacer
from tuner.timing.race import race, survey
from tuner.timing.sanity import Ceilings, Work, impossible

RIVAL = "rival"
"""Label of the library operation in a race."""

_COLD_FACTOR = 2
_MOST_SETS = 64
_DOUBT_SEED = 7

Call = Callable[[], None]


class Bench:
    """Verifies and times variants of one workload.

    Args:
        signature: Signature of the kernel.
        problem: The kernel's problem module.
        workload: The workload.
        device: Where variants run.
        clock: The calibrated clock.

    Attributes:
        problem: The kernel's problem module, imported.
        verifier: Checks variants on the workload and on odd shapes.
    """

    def __init__(
        self,
        signature: Signature,
        problem: Path,
        *,
        workload: Workload,
        device: Device,
        clock: Clock,
    ) -> None:
        self._signature = signature
        self.problem: Any = CheckedProblem(problem, signature)
        self._workload = workload
        self._device = device
        self._clock = clock
        self._extents = dict(workload.dims)
        self._options = signature.arguments(dict(workload.flags), self._extents)
        self._ceilings = Ceilings(None, None)
        self._pacer: Pacer | None = None
        self.verifier = self.make_verifier()

    def make_verifier(self) -> Any:
        """Return what checks variants; a bench of its own kind may have another."""
        device = self._device.torch_device
        return Verifier(self._signature, self.problem, self._workload, device)

    def load(self, builder: Builder, task: BuildTask) -> Variant:
        """Return the variant of a source that is to be checked and timed.

        Raises:
            RejectedBuild: The compiler refuses it.
        """
        return builder.load(task)

    def follow(self, pace: Mapping[str, Any] | None, load: Callable[[], Variant]) -> None:
        """Measure from now on by the pace of a variant, or as it comes.

        Args:
            pace: The variant's ``"path"``, and the ``"median_ms"`` that it usually takes.
            load: Returns the variant.
        """
        name = pace["path"] if pace else ""
        if self._pacer is None or self._pacer.name != name:
            self._pacer = None
            if pace:
                with suppress(Exception):  # what fails here is no fault of who is timed
                    meter = self._clock.prepare(self.calls(load()))
                    usual_s = pace["median_ms"] * 1e-3
                    self._pacer = Pacer(name, meter, usual_s, self._device.measure_s)

    def measure(
        self, variant: Variant, *, give_up_ms: float | None, ceilings: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], str | None]:
        """Return the timing of a verified variant as JSON and, if it cannot be, why.

        Args:
            variant: What to time.
            give_up_ms: Stop early when it is far slower than this.
            ceilings: What the device's card says, if there is one, as JSON.
        """
        timing = self._measure(variant, give_up_ms, self._pacer)
        if ceilings is None:
            return timing, None
        return self._doubt(variant, timing, codec.from_json(Ceilings, ceilings))

    def _measure(
        self, variant: Variant, give_up_ms: float | None, pacer: Pacer | None = None
    ) -> dict[str, Any]:
        calls, budget_s = self.calls(variant), self._device.measure_s
        timing = self._clock.measure(calls, budget_s=budget_s, give_up_ms=give_up_ms, pacer=pacer)
        return _timing_json(timing)

    def race(
        self, variants: Mapping[str, Variant], *, budget_s: float, seed: int
    ) -> dict[str, Any]:
        """Return the result of a race of verified variants, and the rival's name.

        Args:
            variants: The variants by label; the first is the reference.
            budget_s: How long the race may take.
            seed: Seed of the order.
        """
        contenders: dict[str, Sequence[Call]] = {
            label: self.calls(variant) for label, variant in variants.items()
        }
        rival = self.rival_calls()
        if rival:
            contenders[RIVAL] = rival
        result = race(
            self._clock,
            contenders,
            budget_s=budget_s,
            seed=seed,
            reference=next(iter(variants)),
            rival=RIVAL if rival else None,
        )
        return {"race": codec.to_json(result), "rival": self.problem.RIVAL}

    def survey(
        self, variants: Mapping[str, Variant], *, budget_s: float, seed: int, rival: bool
    ) -> dict[str, Any]:
        """Return the times of variants that are only compared, and what a call of them is.

        Args:
            variants: The variants by label; the first is the reference.
            budget_s: How long it may take.
            seed: Seed of the order.
            rival: Whether the rival, if there is one, is timed along.
        """
        contenders = {label: self.calls(variant) for label, variant in variants.items()}
        rival_calls = self.rival_calls() if rival else []
        if rival_calls:
            contenders[RIVAL] = rival_calls
        result = survey(
            self._clock, contenders, budget_s=budget_s, seed=seed, reference=next(iter(variants))
        )
        name = self.problem.RIVAL if rival_calls else None
        return {"race": codec.to_json(result), "rival": name, "work": codec.to_json(self.work())}

    def _doubt(
        self, variant: Variant, timing: dict[str, Any], ceilings: Ceilings
    ) -> tuple[dict[str, Any], str | None]:
        """Return a timing and why it cannot be; one in doubt is taken again.

        So are the ceilings: a card that was made beside a busy neighbour must reject nobody.
        """
        work = self.work()
        if impossible(timing["median_ms"], work, ceilings) is None:
            return timing, None
        now = experiments.ceilings(self._workload.dtype, self._device, self._clock)
        self._ceilings = self._ceilings.raised(now)
        again = self._measure(variant, None)
        fault = impossible(again["median_ms"], work, ceilings.raised(self._ceilings))
        if fault is None:
            return again, None
        wrong = self.verifier.check(variant) or check_in_place(
            variant, self._signature, self.problem, self._case(_DOUBT_SEED), self.sets[0]
        )
        return again, f"{fault}; checked again, {wrong or 'its results are right'}"

    def work(self) -> Work:
        """Return what a call does at least, and what it finds in the cache."""
        cost = getattr(self.problem, "cost", lambda *_: (0.0, 0.0))
        flops, size = cost(
            self._extents, dict(self._workload.flags), ITEMSIZES[self._workload.dtype]
        )
        held = sum(tensor.nbytes for tensors in self.sets for tensor in tensors.values())
        return Work(flops, size, held, self._device.cache_bytes())

    @cached_property
    def sets(self) -> list[dict[str, torch.Tensor]]:
        """Sets of inputs and outputs that together overflow the last-level cache."""
        first = self._make_set()
        size = sum(tensor.nbytes for tensor in first.values())
        wanted = _COLD_FACTOR * self._device.cache_bytes() // max(size, 1) + 1
        copies = range(1, min(wanted, _MOST_SETS))
        return [first, *({name: first[name].clone() for name in first} for _ in copies)]

    def _make_set(self) -> dict[str, torch.Tensor]:
        case = self._case()
        outputs = {
            spec.name: torch.empty(shape, dtype=element_type(spec, case.dtype), device=case.device)
            for spec, shape in self._signature.shapes(self._signature.outputs, self._extents)
        }
        return make_inputs(self._signature, self.problem, case) | outputs

    def _case(self, seed: int = 0) -> Case:
        return Case(
            self._extents,
            dict(self._workload.flags),
            self._workload.dtype,
            seed=seed,
            device=self._device.torch_device,
        )

    def calls(self, variant: Variant) -> list[Call]:
        """Return a variant's calls, one on each set of buffers."""
        return [variant.bind(tensors, self._extents, self._options) for tensors in self.sets]

    def rival_calls(self) -> list[Call]:
        """Return the rival's calls, one on each set of buffers; none where it has none."""
        calls = [self.problem.rival(**arguments) for arguments in self.arguments()]
        return [call for call in calls if call is not None]

    def arguments(self) -> list[dict[str, Any]]:
        """Return what reference and rival take, on each set of buffers: inputs and options."""
        names = [spec.name for spec in self._signature.inputs]
        return [
            self._options | {name: tensors[name] for name in names if name in tensors}
            for tensors in self.sets
        ]


def _timing_json(timing: Any) -> dict[str, Any]:
    names = ("median_ms", "low_ms", "high_ms", "samples", "regime")
    return {name: getattr(timing, name) for name in names}
