"""What the hardware itself says a kernel takes: CUPTI's time stamps and Nsight Compute's."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from variants import Place, rotation

from tuner.serve.bench import Call

SECTION_S = 0.06
"""How long the calls last that CUPTI looks at; the first half lets the clocks settle."""

MOST_CALLS = 1000
"""Calls that CUPTI looks at."""

METRIC = "gpu__time_duration.sum"

MARKER = "empty_kernel"
"""Name of the kernel that `Device.empty_call` launches: it divides what Nsight Compute lists."""

_UNITS_US = {
    **{"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0},
    **{"msecond": 1e3, "ms": 1e3, "second": 1e6, "s": 1e6},
}


@dataclass(frozen=True, slots=True)
class Stamps:
    """What the time stamps of one call's kernels come to.

    Attributes:
        call_us: Sum of the kernels' durations, median over the calls.
        kernels: Number of kernels of a call.
    """

    call_us: float
    kernels: int


class Hardware:
    """CUPTI's view of one variant, in the cache regime that its calls make.

    On a device without CUPTI (the CPU) a long batch of calls stands in for it.

    Args:
        place: The device.
        calls: The variant on each set of buffers.
    """

    def __init__(self, place: Place, calls: Sequence[Call]) -> None:
        self._place, self._call = place, rotation(calls)
        once_s = max(self._seconds(len(calls)) / len(calls), 1e-9)
        passes = min(SECTION_S / once_s, MOST_CALLS) / len(calls)
        self.estimate_us = once_s * 1e6
        self._count = max(round(passes), 1) * len(calls)
        self._replay = place.device.capture(self._call, self._count)

    def stamps(self) -> Stamps:
        """Return what the hardware says now.

        Raises:
            ValueError: The profiler lost events.
        """
        if not torch.cuda.is_available():
            return Stamps(self._seconds(self._count) / self._count * 1e6, 1)
        runs = [self._plain] if self._replay is None else [self._replay, self._plain]
        for run in runs:
            times_us = _device_times_us(run, self._place)
            if times_us and len(times_us) % self._count == 0:
                return _stamps(times_us, self._count)
        raise ValueError(f"CUPTI lists {len(times_us)} kernels for {self._count} calls")

    def _plain(self) -> None:
        for _ in range(self._count):
            self._call()

    def _seconds(self, count: int) -> float:
        now, device = self._place.clock.now, self._place.device
        device.synchronize()
        start_s = now()
        for _ in range(count):
            self._call()
        device.synchronize()
        return now() - start_s


def _device_times_us(run: Call, place: Place) -> list[float]:
    """Return the durations of everything that ran on the device, in the order of starts."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        place.device.synchronize()
    results = recorded.profiler.kineto_results
    found = [
        (event.start_ns(), event.duration_ns())
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    return [duration * 1e-3 for _, duration in sorted(found)]


def _stamps(times_us: Sequence[float], count: int) -> Stamps:
    kernels = len(times_us) // count
    sums = [sum(times_us[at : at + kernels]) for at in range(0, len(times_us), kernels)]
    return Stamps(statistics.median(sums[count // 2 :]), kernels)


def find_ncu() -> str | None:
    """Return Nsight Compute's command, if it is installed."""
    known = [*Path("/opt/nvidia/nsight-compute").glob("*/ncu"), Path("/usr/local/cuda/bin/ncu")]
    return shutil.which("ncu") or next((str(path) for path in known if path.exists()), None)


def run_ncu(
    ncu: str, child: Sequence[str], log: Path, *, environment: Mapping[str, str], seconds: float
) -> str:
    """Run a child under Nsight Compute and return what it wrote, messages included.

    Clocks and caches are left alone; only what the child puts between `torch.cuda.profiler`'s
    start and stop is looked at.

    Args:
        ncu: Its command.
        child: The child's command.
        log: File for what it writes.
        environment: Of both.
        seconds: When both are ended; the child should end by itself before.
    """
    command = [
        *(ncu, "--clock-control", "none", "--cache-control", "none", "--metrics", METRIC),
        *("--csv", "--print-units", "base", "--profile-from-start", "off"),
        *("--target-processes", "all", "--log-file", str(log), "-f", *child),
    ]
    with subprocess.Popen(command, env=dict(environment), start_new_session=True) as process:
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""


def calls_us(text: str) -> list[float]:
    """Return the summed durations of the kernels after each marker, in microseconds.

    Args:
        text: What `run_ncu` returned: a row for each kernel and metric.
    """
    groups: list[list[float]] = []
    for name, time_us in kernel_times_us(text):
        if name.startswith(MARKER):
            groups.append([])
        elif groups:
            groups[-1].append(time_us)
    return [sum(group) for group in groups]


def kernel_times_us(text: str) -> Iterator[tuple[str, float]]:
    """Yield name and duration of every kernel that Nsight Compute lists, in their order.

    It writes a row for each metric (`--page details`), or a column for it, whose units are in the
    first row (`--page raw`); messages stand between.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    unit = ""
    for row in csv.DictReader(lines):
        if METRIC in row:
            if not row["ID"]:
                unit = row[METRIC]
                continue
            value = row[METRIC]
        elif row.get("Metric Name") == METRIC:
            unit, value = row["Metric Unit"], row["Metric Value"]
        else:
            continue
        yield row["Kernel Name"], float(value.replace(",", "")) * _UNITS_US[unit]
