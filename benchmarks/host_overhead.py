"""What a frozen kernel costs the host: `python benchmarks/host_overhead.py --help`.

Two figures, each beside the same file called by hand: the host's time for one call, and the first
call in a fresh process, with Triton's cache empty and filled.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contest import reason
from rows import Result, ResultsFile, Spread

from tuner.catalog import device_class, split_device
from tuner.plugins import Device
from tuner.runtime.check import Case, element_type, load_problem, make_inputs
from tuner.runtime.dispatch import MANIFEST, Manifest
from tuner.runtime.signature import Signature
from tuner.runtime.triton_module import TritonVariant
from tuner.runtime.variant import load_variant
from tuner.timing.statistics import median_interval

BATCH = 200
"""Calls between two synchronisations: fewer than a GPU's queue holds, so that none has to wait."""

BY_HAND = "by hand"


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel of a package on one workload.

    Attributes:
        folder: The kernel's folder.
        signature: Its signature.
        case: The workload.
        function: The package's function.
    """

    folder: Path
    signature: Signature
    case: Case
    function: Any

    @classmethod
    def of(cls, package: Path, kernel: str, device: Device, extent: int | None) -> Subject:
        """Return a kernel on a workload that it was tuned for.

        Args:
            package: Folder of the package.
            kernel: Name of the kernel.
            device: Where it runs.
            extent: Extent of all dims instead of the workload's.
        """
        sys.path.insert(0, str(package.absolute().parent))
        folder = package / kernel
        data = json.loads((folder / "kernel.json").read_text(encoding="utf-8"))
        signature = Signature.from_json(data["signature"])
        entry = Manifest(folder / device.info().arch).entries[0]
        extents = dict.fromkeys(signature.dims, extent) if extent else entry.dims
        case = Case(extents, entry.flags, entry.dtype, device=device.torch_device)
        module = importlib.import_module(package.name)
        return cls(folder, signature, case, getattr(module, kernel))

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the workload's inputs, in the order in which they are passed."""
        problem = load_problem(self.folder / "problem.py")
        made = make_inputs(self.signature, problem, self.case)
        return {spec.name: made[spec.name] for spec in self.signature.inputs if spec.name in made}

    def calls(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
        """Return the ways to call the kernel by contender; each allocates its outputs."""
        arguments, flags = tuple(inputs.values()), dict(self.case.flags)
        problem: Any = load_problem(self.folder / "problem.py")
        rival = problem.rival(**inputs, **self.signature.arguments(flags, self.case.extents))
        calls = {
            "tuner": lambda: self.function(*arguments, **flags),
            BY_HAND: self.by_hand(inputs),
            "torch.ops": lambda: self.function.op(*arguments, **flags),
        }
        return calls | ({"torch": rival} if rival else {})

    def by_hand(self, inputs: Mapping[str, torch.Tensor]) -> Callable[[], object]:
        """Return what one would write around the file that serves the workload."""
        extents, case = dict(self.case.extents), self.case
        choice = self.function.chosen(
            dtype=case.dtype, device=case.device, **extents, **case.flags
        )
        path = self.folder / choice.arch / choice.file
        variant = load_variant(self.signature, choice.language, path=path)
        options = self.signature.arguments(case.flags, extents)
        shapes = [
            (spec.name, shape, element_type(spec, case.dtype))
            for spec, shape in self.signature.shapes(self.signature.outputs, extents)
        ]
        device = torch.device(case.device)

        def call() -> object:
            outputs = [
                torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in shapes
            ]
            if isinstance(variant, TritonVariant):
                variant.entry(*inputs.values(), *outputs, **options)
            else:
                named = zip([name for name, _, _ in shapes], outputs, strict=True)
                variant.bind({**inputs, **dict(named)}, extents, options)()
            return outputs

        return call


def host_times(
    calls: Mapping[str, Callable[[], object]], device: Device, *, rounds: int
) -> dict[str, Spread]:
    """Return the host's time of one call of each, in turn, the device never waited for."""
    times_ms: dict[str, list[float]] = {label: [] for label in calls}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    for _ in range(rounds + 1):
        for label in order.sample(list(calls), len(calls)):
            device.synchronize()
            start_s = time.perf_counter()
            for _ in range(BATCH):
                calls[label]()
            times_ms[label].append((time.perf_counter() - start_s) / BATCH * 1e3)
    gc.enable()
    device.synchronize()
    found = {label: median_interval(times[1:]) for label, times in times_ms.items()}
    return {label: Spread(item.value, item.low, item.high) for label, item in found.items()}


def first_call_ms(subject: Subject, device: Device, contender: str) -> float:
    """Return what the first call takes in this process, loading the file included."""
    inputs = subject.inputs()
    device.synchronize()
    start_s = time.perf_counter()
    if contender == BY_HAND:
        subject.by_hand(inputs)()
    else:
        subject.function(*inputs.values(), **subject.case.flags)
    device.synchronize()
    return (time.perf_counter() - start_s) * 1e3


def first_calls(options: argparse.Namespace, kernel: str) -> dict[str, dict[str, list[float]]]:
    """Return the times of first calls by state of Triton's cache and contender."""
    times_ms: dict[str, dict[str, list[float]]] = {"empty": {}, "filled": {}}
    for _ in range(options.starts):
        for contender in ("tuner", BY_HAND):
            with tempfile.TemporaryDirectory() as cache:
                for state in ("empty", "filled"):
                    child = subprocess.run(
                        [
                            *(sys.executable, __file__, "--package", str(options.package)),
                            *("--device", options.device, "--output", os.devnull),
                            *("--kernel", kernel, "--first-call-of", contender),
                        ],
                        env={**os.environ, "TRITON_CACHE_DIR": cache, "XDG_CACHE_HOME": cache},
                        stdout=subprocess.PIPE,
                        text=True,
                        check=True,
                    )
                    times_ms[state].setdefault(contender, []).append(float(child.stdout))
    return times_ms


def _measure(
    options: argparse.Namespace, device: Device, kernel: str, output: ResultsFile
) -> None:
    subject = Subject.of(options.package, kernel, device, options.extent)
    calls, results = subject.calls(subject.inputs()), []
    for label, call in list(calls.items()):
        try:
            call()
        except Exception as error:  # a contender that fails is a row that says why
            results.append(Result(label, None, note=reason(error)))
            del calls[label]
    times = host_times(calls, device, rounds=options.rounds)
    note = f"median of {options.rounds} batches of {BATCH} calls"
    results += [Result(label, spread, note=note) for label, spread in times.items()]
    _write(output, f"{kernel}: host time of a call", subject.case, results)


def _measure_first(
    options: argparse.Namespace, device: Device, kernel: str, output: ResultsFile
) -> None:
    subject = Subject.of(options.package, kernel, device, None)
    for state, by_contender in first_calls(options, kernel).items():
        results = []
        for label, times_ms in by_contender.items():
            found = median_interval(times_ms)
            spread = Spread(found.value, found.low, found.high)
            results.append(Result(label, spread, note=f"median of {len(times_ms)} processes"))
        op = f"{kernel}: first call in a process, {state} cache"
        _write(output, op, subject.case, results)


def _write(output: ResultsFile, op: str, case: Case, results: Sequence[Result]) -> None:
    workload = str(case).removesuffix(f",seed={case.seed}")
    output.replace(op, workload, results)
    print(f"{op}, {workload}")
    for result in results:
        time_ms = f"{result.spread.median_ms:.4g} ms" if result.spread else "failed"
        print(f"  {result.contender}: {time_ms} ({result.note})", flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, default=Path("kernels_generated"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="CSV file to write or extend")
    parser.add_argument("--kernel", nargs="+", help="kernels to call; all if left out")
    parser.add_argument(
        "--extent", type=int, default=16, help="of all dims: small, to see the host"
    )
    parser.add_argument("--rounds", type=int, default=31, help="batches of calls")
    parser.add_argument("--first-call", nargs="*", default=["matmul"], help="in a fresh process")
    parser.add_argument("--starts", type=int, default=3, help="fresh processes for each figure")
    parser.add_argument("--first-call-of", choices=("tuner", BY_HAND), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return the exit status."""
    options = _options(arguments)
    kind, index = split_device(options.device)
    device = device_class(kind)(index)
    info = device.info()
    if options.first_call_of:
        subject = Subject.of(options.package, options.kernel[0], device, None)
        print(first_call_ms(subject, device, options.first_call_of))
        return 0
    output = ResultsFile(options.output, info.name)
    kernels = sorted(
        path.parent.parent.name for path in options.package.glob(f"*/{info.arch}/{MANIFEST}")
    )
    failures = 0
    parts = [(_measure, kernel) for kernel in options.kernel or kernels]
    parts += [(_measure_first, kernel) for kernel in options.first_call]
    for measure, kernel in parts:
        try:
            measure(options, device, kernel, output)
        except Exception:  # the other kernels' figures are worth having
            traceback.print_exc()
            failures += 1
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
