"""The timed variants once more, under Nsight Compute, in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from clock_hardware import by_workload
from hardware import calls_us, find_ncu, run_ncu
from rows import OwnRows
from variants import Built, Place, rotation

NCU_CALLS = 3
"""Calls of each variant that Nsight Compute looks at."""

NCU_ENDS_S = 20.0
"""Time that Nsight Compute has to end after its child."""


def look(options: argparse.Namespace, output: OwnRows) -> int:
    """Have Nsight Compute look at the timed variants in one more child; return 0 in any case."""
    ncu = find_ncu()
    if ncu is None:
        output.add({"op": "ncu", "note": "Nsight Compute is not installed"})
        return 0
    child = [sys.executable, *sys.argv, "--part", "ncu_child"]
    child += ["--seconds", f"{max(options.seconds - NCU_ENDS_S, 5):.1f}"]
    log, keys = options.folder / "ncu.csv", options.folder / "ncu.begun"
    keys.unlink(missing_ok=True)
    environment = dict(os.environ)
    text = run_ncu(ncu, child, log, environment=environment, seconds=options.seconds + NCU_ENDS_S)
    options.output.with_suffix(".ncu.txt").write_text(text)  # what took long is kept as it is
    try:
        times_us = calls_us(text)
    except (KeyError, ValueError) as error:
        output.add({"op": "ncu", "note": f"Nsight Compute's list is not understood: {error!r}"})
        return 0
    lines = keys.read_text().splitlines() if keys.exists() else []
    found: dict[str, list[float]] = {}
    for line, time_us in zip(lines, times_us, strict=False):
        found.setdefault(line, []).append(time_us)
    for line, values in found.items():
        output.update(json.loads(line), {"ncu_us": median(values)})
    note = f"{len(times_us)} of {len(lines)} calls listed"
    if len(times_us) < len(lines) or not lines:
        note += "; it ends: " + " ".join(text.splitlines()[-2:])[-300:]
    output.add({"op": "ncu", "note": note})
    print(f"Nsight Compute: {len(found)} variants; {note}", flush=True)
    return 0


def make_calls(
    place: Place, built: Sequence[Built], output: OwnRows, *, folder: Path, end_s: float
) -> int:
    """Make the calls that Nsight Compute is to list, each after a marker; return 0."""
    names = ("op", "workload", "variant", "regime")
    timed = [{name: row[name] for name in names} for row in output.rows if row["tuner_us"]]
    marker = place.device.empty_call()
    assert marker is not None
    marker()
    for (kernel, workload), items in by_workload(built).items():
        bench = None
        for item in items:
            about = {"op": kernel, "workload": workload, "variant": item.variant}
            for regime in ("cold", "warm"):
                if about | {"regime": regime} not in timed or time.monotonic() > end_s:
                    continue
                bench = bench or place.bench(kernel, workload)
                calls = place.calls(bench, item)
                turn = rotation(calls if regime == "cold" else calls[:1])
                for _ in calls:  # whatever the regime is, it is reached before the look
                    turn()
                place.device.synchronize()
                torch.cuda.profiler.start()
                for _ in range(NCU_CALLS):
                    with (folder / "ncu.begun").open("a") as keys:
                        keys.write(json.dumps(about | {"regime": regime}) + "\n")
                    marker()
                    turn()
                place.device.synchronize()
                torch.cuda.profiler.stop()
    return 0
