"""The tuner's clock against the hardware's own, on the same launches: `--help`.

Variants are drawn from the search spaces over workloads from 2 us to 5 ms. Each is timed by the
tuner's clock (captured graphs where the device has them), by the host's clock alone (how a card
without graphs is timed) and by `triton.testing.do_bench`, between looks at CUPTI's time stamps in
the same cache regime; Nsight Compute lists them afterwards in a process of its own. Then follow
races between equals, and between two that are 2 % apart. What is compared are two readings of the
same launches, so variants need not be right and are not verified.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agreement import races, summary
from entry import start
from rows import OwnRows
from variants import Built, Request, compile_ahead, load, save

from tuner.catalog import device_class, split_device

COLUMNS = (
    *("op", "workload", "variant", "regime", "kernels", "tuner_us", "low_us", "high_us"),
    *("cupti_us", "ncu_us", "host_us", "do_bench_us", "error_percent", "host_error_percent"),
    *("outcome", "note"),
)

WORKLOADS = {
    "gpu": (
        *("matmul M=256,K=256,N=256", "softmax M=256,N=1024", "rms_norm M=256,N=1024"),
        *("attention_forward B=1,H=8,S=256,D=64", "softmax_backward M=512,N=1024"),
        *("matmul M=1024,K=1024,N=1024", "softmax M=4096,N=1024", "rms_norm M=4096,N=1024"),
        *("attention_forward B=1,H=16,S=512,D=128", "softmax_backward M=4096,N=1024"),
        *("matmul M=2048,K=2048,N=2048", "softmax M=4096,N=4096", "rms_norm M=4096,N=8192"),
        *("attention_forward B=2,H=16,S=1024,D=64", "softmax_backward M=4096,N=4096"),
        *("matmul M=4096,K=4096,N=4096", "softmax M=8192,N=32768", "rms_norm M=8192,N=16384"),
        *("attention_forward B=4,H=16,S=4096,D=128", "softmax_backward M=8192,N=16384"),
        "matmul M=8192,K=8192,N=8192",
    ),
    "cpu": ("softmax M=64,N=256", "softmax_backward M=64,N=256", "matmul M=64,K=64,N=64"),
}
"""By kind of device: kernels with workloads, from short to long."""

PLANTED = {
    "gpu": ("M=2048,K=6528,N=2048", "M=2048,K=6400,N=2048"),
    "cpu": ("M=64,K=816,N=64", "M=64,K=800,N=64"),
}
"""Workloads of matmul of which the first has 2 % more to do."""

STALL_S = 60.0
"""Seconds without a new row after which a child is taken to hang; it starts within them."""

RESTARTS = 4
"""How often a child that died is started again, without what it died of."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in children and write; return the exit status."""
    options = parse(arguments)
    if options.part:
        from clock_parts import run_part  # loads torch

        return run_part(options, load(options.folder / "built.json"))
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        options.folder = options.folder or Path(folder)
        return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    kind = "cpu" if options.device == "cpu" else "gpu"
    dtype = "float32" if kind == "cpu" else "bfloat16"
    wanted = [item.split() for item in options.workloads or WORKLOADS[kind]]
    requests = [
        Request(kernel, f"{workload},dtype={dtype}", options.variants)
        for kernel, workload in wanted
    ]
    requests += [Request("matmul", f"{item},dtype={dtype}", 1) for item in PLANTED[kind]]
    info, built = compile_ahead(
        options.device,
        requests,
        options.folder,
        jobs=options.jobs,
        seconds=options.compile_seconds,
    )
    planted = [item for item in built if item.workload in {r.workload for r in requests[-2:]}]
    built = [item for item in built if item not in planted]
    save(options.folder / "built.json", built)
    save(options.folder / "planted.json", planted)
    output = OwnRows(options.output, info.name, COLUMNS)
    for part in ("variants", "races", "ncu"):
        seconds = getattr(options, f"{part}_seconds")
        if seconds:
            _in_children(part, options, output.about, seconds)
    return _conclude(output)


def _in_children(
    part: str, options: argparse.Namespace, about: dict[str, str], seconds: float
) -> None:
    """Run one part in a child, and again without what killed it, until its time is spent."""
    print(f"-- {part}, at most {seconds:g} s", flush=True)
    end_s = time.monotonic() + seconds
    cache = {"TRITON_CACHE_DIR": str((options.folder / "cache" / "triton").absolute())}
    for _ in range(RESTARTS):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return
        command = [
            *(sys.executable, __file__, "--part", part, "--folder", str(options.folder)),
            *("--device", options.device, "--output", str(options.output)),
            *("--run", about["run"], "--name", about["device"], "--seconds", f"{left_s:.1f}"),
            *("--races", str(options.races), "--planted", str(options.planted)),
        ]
        # Torn down, CUPTI cannot look at captured graphs again.
        own = dict(device_class(split_device(options.device)[0]).environment)
        environment = {
            **os.environ,
            **own,
            **cache,
            "TEARDOWN_CUPTI": "0",
            "KINETO_LOG_LEVEL": "5",
        }
        begun = options.folder / f"{part}.begun"
        # Nsight Compute ends by itself, and writes nothing while it makes its list.
        signs = [] if part == "ncu" else [options.output, begun]
        status = _watched(command, environment, signs, left_s + STALL_S)
        if status == 0:
            return
        note = f"the child of {part} ended with status {status}; last begun: {_last(begun) or '-'}"
        OwnRows(options.output, about["device"], COLUMNS, about["run"]).add({"note": note})
        print(note, flush=True)
        if not _last(begun):
            return  # it would fail again


def _watched(
    command: Sequence[str], environment: Mapping[str, str], signs: Sequence[Path], most_s: float
) -> int | None:
    """Run a child and return its status; None for one that hung: no file of it grew for long."""
    end_s = time.monotonic() + most_s
    with subprocess.Popen(command, env=dict(environment)) as child:
        started = time.time()
        while child.poll() is None:
            written = [path.stat().st_mtime for path in signs if path.exists()]
            stalled = bool(signs) and time.time() > max([started, *written]) + STALL_S
            if stalled or time.monotonic() > end_s:
                child.kill()
                return None
            time.sleep(0.2)
        return child.returncode


def _last(path: Path) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[-1] if lines else ""


def _conclude(output: OwnRows) -> int:
    """Write and print the summary; return the exit status."""
    rows = output.rows
    for title, text in [*summary(rows), *races(rows)]:
        output.add({"op": "summary", "workload": title, "note": text})
        print(f"{title}: {text}", flush=True)
    return 0 if any(row["tuner_us"] for row in rows) else 1


class Begun:
    """What a child has begun, kept in a file: what killed it is not tried again.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()  # a sign of life
        self._keys = path.read_text().splitlines()

    def first_time(self, *key: object) -> bool:
        """Return whether something was not begun before, and note that it is now."""
        text = json.dumps([str(part) for part in key])
        if text in self._keys:
            return False
        self._keys.append(text)
        with self._path.open("a") as file:
            file.write(f"{text}\n")
        return True


def by_workload(built: Sequence[Built]) -> dict[tuple[str, str], list[Built]]:
    """Return the variants of each kernel and workload, in the order of the workloads."""
    groups: dict[tuple[str, str], list[Built]] = {}
    for item in built:
        groups.setdefault((item.kernel, item.workload), []).append(item)
    return groups


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="CSV file")
    parser.add_argument("--variants", type=int, default=4, help="of each workload")
    parser.add_argument("--workloads", nargs="+", help='such as "matmul M=64,K=64,N=64"')
    parser.add_argument("--jobs", type=int, help="compile children; all cores if left out")
    parser.add_argument("--races", type=int, default=50, help="between equals")
    parser.add_argument("--planted", type=int, default=40, help="between two 2 %% apart")
    parser.add_argument("--compile-seconds", type=float, default=60.0)
    parser.add_argument("--variants-seconds", type=float, default=90.0)
    parser.add_argument("--races-seconds", type=float, default=70.0)
    parser.add_argument("--ncu-seconds", type=float, default=60.0, help="0 for no Nsight Compute")
    parser.add_argument("--folder", type=Path, help="for sources and binaries; else a new one")
    for name in ("--part", "--run", "--name"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    start(main)
