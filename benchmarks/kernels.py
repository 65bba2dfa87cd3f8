"""Time the kernels of a frozen package beside their peers: `python benchmarks/kernels.py --help`.

All contenders of a workload are timed in one process, interleaved, after every variant of ours has
been verified. The rows of a workload replace those that the output has of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from contest import Contest, reason, summary
from peers import COPY, peers
from rows import Result, ResultsFile

from tuner.catalog import Catalog, device_class, split_device
from tuner.plugins import Device
from tuner.records import DeviceInfo, Workload
from tuner.runtime.dispatch import MANIFEST, Choice, Manifest
from tuner.runtime.signature import Signature
from tuner.runtime.variant import load_variant
from tuner.serve.bench import Bench, Call
from tuner.space.kernel import load_space
from tuner.space.template import ITEMSIZES
from tuner.timing.clock import Clock
from tuner.timing.meter import Timing

MEMORY_BOUND = 32.0
"""Operations per byte up to which a workload is taken to wait for memory on any device."""

SETTLE_S = 0.01


@dataclass(frozen=True, slots=True)
class Subject:
    """One workload of a frozen kernel.

    Attributes:
        folder: The kernel's folder in the package.
        workload: The workload.
        manifest: What the package has for this architecture.
    """

    folder: Path
    workload: Workload
    manifest: Manifest

    @property
    def signature(self) -> Signature:
        """The kernel's signature."""
        data = json.loads((self.folder / "kernel.json").read_text(encoding="utf-8"))
        return Signature.from_json(data["signature"])

    @property
    def chosen(self) -> Choice:
        """The variant that the package serves the workload with."""
        extents, flags = dict(self.workload.dims), dict(self.workload.flags)
        choice = self.manifest.choose(extents, self.workload.dtype, flags)
        assert choice is not None
        return choice

    @property
    def default(self) -> Choice:
        """The default candidate's variant."""
        choice = self.manifest.default(self.workload.dtype, dict(self.workload.flags))
        assert choice is not None
        return choice


class Benchmark:
    """Measures one workload after the other on one device.

    Args:
        device: The device.
        info: What is known of it.
        options: The command line's.
    """

    def __init__(self, device: Device, info: DeviceInfo, options: argparse.Namespace) -> None:
        self._device, self._info, self._options = device, info, options
        clock = Clock(device)
        clock.calibrate(device.empty_call())
        settle_s = SETTLE_S if device.shares_host else 0.0
        self._contest = Contest(clock, options.seconds, options.repeats, settle_s)

    def results(self, subject: Subject) -> list[Result]:
        """Return the rows of all contenders on a workload."""
        workload = subject.workload
        bench = Bench(
            subject.signature,
            subject.folder / "problem.py",
            workload=workload,
            device=self._device,
            clock=self._contest.clock,
        )
        itemsize = ITEMSIZES[workload.dtype]
        flops, size = bench.problem.cost(dict(workload.dims), dict(workload.flags), itemsize)
        bound = flops <= MEMORY_BOUND * size
        outcomes = self._outcomes(bench, subject, copied_bytes=size if bound else 0)
        work, unit = (size, "GB/s") if bound else (flops, "GFLOP/s")
        notes = {
            "tuner": f"{subject.chosen.reason} {subject.chosen.file}",
            "default": subject.default.file,
            "torch.compile": f"mode {self._options.compile_mode}",
            COPY: "torch copy_ of the same bytes",
        }
        return [
            self._result(label, outcome, work, unit=unit, note=notes.get(label, ""))
            for label, outcome in outcomes.items()
        ]

    def _outcomes(
        self, bench: Bench, subject: Subject, *, copied_bytes: float
    ) -> dict[str, list[Timing] | str]:
        """Return everybody's timings or failure, ours first."""
        makers = {
            "tuner": lambda: self._verified(bench, subject, subject.chosen),
            "default": lambda: self._verified(bench, subject, subject.default),
            **peers(
                bench,
                subject.workload.kernel,
                torch.device(self._device.torch_device).type,
                copied_bytes=copied_bytes,
                compile_mode=self._options.compile_mode,
            ),
        }
        outcomes: dict[str, list[Timing] | str] = {}
        contenders: dict[str, list[Call]] = {}
        for label, maker in makers.items():
            if label in self._options.skip:
                continue
            try:
                contenders[label] = maker()
            except Exception as error:  # a contender that fails is a row that says why
                outcomes[label] = reason(error)
        outcomes |= self._contest.hold({label: item for label, item in contenders.items() if item})
        return {label: outcomes[label] for label in makers if label in outcomes}

    def _verified(self, bench: Bench, subject: Subject, choice: Choice) -> list[Call]:
        """Return a frozen file's calls; it must be right first."""
        path = subject.folder / choice.arch / choice.file
        compiler = os.environ.get("CXX")
        variant = load_variant(subject.signature, choice.language, path=path, compiler=compiler)
        if fault := bench.verifier.check(variant):
            raise ValueError(fault)
        return bench.calls(variant)

    def _result(
        self, label: str, outcome: list[Timing] | str, work: float, *, unit: str, note: str
    ) -> Result:
        if isinstance(outcome, str):
            return Result(label, None, note=outcome)
        spread = summary(outcome)
        about = [f"n={len(outcome)}", f"{outcome[0].regime} caches", outcome[0].method]
        if self._info.kind == "cpu":
            about.append(f"{torch.get_num_threads()} threads")
        about += [note] if note else []
        return Result(label, spread, work / spread.median_ms * 1e-6, unit, "; ".join(about))


def subjects(options: argparse.Namespace, arch: str) -> Iterator[Subject]:
    """Yield the workloads of the sets whose dtype the package serves on this architecture."""
    catalog = Catalog(options.kernels)
    for path in sorted(options.package.glob(f"*/{arch}/{MANIFEST}")):
        manifest = Manifest(path.parent)
        folder = path.parent.parent
        if options.kernel and folder.name not in options.kernel:
            continue
        spec = load_space(catalog.space_path(folder.name))
        for name in options.set:
            for workload in spec.workloads.get(name, ()):
                if workload.dtype in manifest.data["defaults"]:
                    yield Subject(folder, workload, manifest)


def _print(subject: Subject, results: Sequence[Result]) -> None:
    print(f"{subject.workload.kernel} {subject.workload}")
    for result in results:
        if result.spread is None:
            print(f"  {result.contender}: {result.note}")
        else:
            print(
                f"  {result.contender}: {result.spread.median_ms:.4g} ms, {result.rate:.4g} "
                f"{result.unit} ({result.note})"
            )
    sys.stdout.flush()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options that scripts have which time a frozen package's kernels."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--package", type=Path, default=Path("kernels_generated"))
    result.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, hip, ...")
    result.add_argument("--output", type=Path, required=True, help="CSV file to write or extend")
    result.add_argument("--kernel", nargs="+", help="only these kernels")
    result.add_argument("--kernels", nargs="*", type=Path, default=[], help="your own folders")
    result.add_argument("--repeats", type=int, default=3)
    result.add_argument("--seconds", type=float, default=0.5, help="per contender and repeat")
    result.add_argument("--skip", nargs="+", default=[], help="contenders to leave out")
    result.add_argument("--compile-mode", default="default", help="mode of torch.compile")
    return result


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    own = parser(__doc__)
    own.add_argument("--set", nargs="+", default=["benchmark"], help="workload sets")
    own.add_argument("--threads", type=int, help="of the CPU; torch's number if left out")
    return own.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return the exit status."""
    options = _options(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    # The variants' own OpenMP reads it when the first of them is loaded.
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    return measure(options, subjects)


def measure(
    options: argparse.Namespace,
    subjects: Callable[[argparse.Namespace, str], Iterable[Subject]],
) -> int:
    """Measure and write what is given for the device's architecture; return the exit status."""
    kind, index = split_device(options.device)
    device = device_class(kind)(index)
    info = device.info()
    benchmark = Benchmark(device, info, options)
    output = ResultsFile(options.output, info.name)
    failures = measured = 0
    for subject in subjects(options, info.arch):
        try:
            results = benchmark.results(subject)
        except Exception:  # the other workloads' results are worth having
            traceback.print_exc()
            failures += 1
            continue
        output.replace(subject.workload.kernel, str(subject.workload), results)
        _print(subject, results)
        failures += results[0].spread is None
        measured += 1
        gc.collect()  # graphs and autograd's closures hold the workload's buffers in cycles
    print(f"{measured} workloads on {info.name} ({info.arch}) in {options.output}")
    return 1 if failures or not measured else 0


if __name__ == "__main__":
    sys.exit(main())
