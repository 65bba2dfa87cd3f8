"""What the first call in a fresh process takes: `python benchmarks/first_call.py --help`.

Each row is of one frozen kernel on a workload that it won: with its binaries stored in the package
(`tune freeze --aot`), without them, and without them where an earlier process compiled the kernel.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rows import Result, ResultsFile, Spread

from tuner.catalog import device_class, split_device
from tuner.cli.devices import workers_for
from tuner.package.prebuild import frozen_variants, prebuild
from tuner.records import Rejection
from tuner.runtime.dispatch import Manifest
from tuner.timing.statistics import median_interval

STORED, COMPILED, CACHED = "tuner", "without stored binaries", "compiled by an earlier process"

_OVERHEAD = Path(__file__).with_name("host_overhead.py")


def store_binaries(package: Path, device: str, file: Path) -> None:
    """Store the binaries of one of a package's files."""
    (variant,) = (item for item in frozen_variants(package) if item.path == file)
    with (
        tempfile.TemporaryDirectory() as scratch,
        workers_for(device, Path(scratch), os.environ) as workers,
    ):
        result = prebuild(variant, workers, Path(scratch, "built"))
    if isinstance(result, Rejection):
        raise SystemExit(f"{file}: {result.reason}")


def first_call_ms(package: Path, device: str, kernel: str, cache: Path) -> float:
    """Return what the first call takes in a process of its own."""
    child = subprocess.run(
        [
            *(sys.executable, _OVERHEAD, "--package", package, "--device", device),
            *("--output", os.devnull, "--kernel", kernel, "--first-call-of", "tuner"),
        ],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(child.stdout)


def first_calls(plain: Path, stored: Path, options: argparse.Namespace, kernel: str) -> dict:
    """Return the times by contender; every start has caches of its own."""
    times_ms: dict[str, list[float]] = {STORED: [], COMPILED: [], CACHED: []}
    order = random.Random(0)
    for _ in range(options.starts):
        with tempfile.TemporaryDirectory() as folder:
            plans = [(STORED, stored, "one"), (COMPILED, plain, "two"), (CACHED, plain, "two")]
            if order.random() < 0.5:
                plans = [*plans[1:], plans[0]]
            for contender, package, cache in plans:
                found = first_call_ms(package, options.device, kernel, Path(folder, cache))
                times_ms[contender].append(found)
    return times_ms


def measure(options: argparse.Namespace, kernel: str, output: ResultsFile) -> None:
    kind, index = split_device(options.device)
    arch = device_class(kind)(index).info().arch
    entry = Manifest(options.package / kernel / arch).entries[0]  # which the child calls
    with tempfile.TemporaryDirectory() as folder:
        packages = [Path(folder, name, options.package.name) for name in ("plain", "stored")]
        for package in packages:
            ignored = shutil.ignore_patterns("aot", "__pycache__")
            shutil.copytree(options.package, package, ignore=ignored)
        file = packages[1] / kernel / arch / entry.data["file"]
        store_binaries(packages[1], options.device, file)
        times_ms = first_calls(*packages, options, kernel)
    results = []
    for contender, samples in times_ms.items():
        found = median_interval(samples)
        spread = Spread(found.value, found.low, found.high)
        results.append(Result(contender, spread, note=f"median of {len(samples)} processes"))
        print(f"{kernel}, {contender}: {spread.median_ms:.4g} ms")
    output.replace("first call in a process", f"{kernel} {entry}", results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, default=Path("kernels_generated"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="CSV file to write or extend")
    parser.add_argument("--kernel", nargs="+", default=["matmul"])
    parser.add_argument("--starts", type=int, default=3, help="fresh processes for each figure")
    options = parser.parse_args(arguments)
    kind, index = split_device(options.device)
    output = ResultsFile(options.output, device_class(kind)(index).info().name)
    for kernel in options.kernel:
        measure(options, kernel, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
