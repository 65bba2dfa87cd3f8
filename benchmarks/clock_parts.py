"""What `clock_hardware.py` does in a child of its own: variants, races, Nsight Compute."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median

import torch
from clock_hardware import COLUMNS, Begun, by_workload
from contest import reason
from hardware import Hardware, calls_us, find_ncu, run_ncu
from rows import OwnRows
from variants import Built, Place, load, rotation

from tuner.catalog import device_class
from tuner.serve.bench import Bench, Call
from tuner.timing.calibration import BelowFloor
from tuner.timing.clock import Clock
from tuner.timing.finals import pick
from tuner.timing.race import race

LONGEST_US = 8000.0
"""A sampled variant that takes longer is left out: a bad choice of parameters costs the time."""

WARM_VARIANTS = 2
"""Variants of each workload that are timed on one set of buffers, too, where several are needed
to overflow the cache."""

RACE_S = 1.0
"""The least that a final takes."""

SPIN_ROUNDS = {"cpu": (102_000, 100_000), "gpu": (4080, 4000)}
"""Multiples of 16, so that triton compiles the same code for both."""

NCU_CALLS = 3
"""Calls of each variant that Nsight Compute looks at."""

NCU_ENDS_S = 20.0
"""Time that Nsight Compute has to end after its child."""


def run_part(options: argparse.Namespace, built: Sequence[Built]) -> int:
    """Run one part until it is done or its time is spent; return the exit status."""
    output = OwnRows(options.output, options.name, COLUMNS, options.run)
    if options.part == "ncu":
        return _ncu(options, output)
    end_s = time.monotonic() + options.seconds
    place = Place(options.device, options.folder)
    if options.part == "variants":
        return _Variants(place, options.folder, output).run(built, end_s)
    if options.part == "races":
        return _races(options, built, place, output)
    return _under_ncu(place, built, output, folder=options.folder, end_s=end_s)


class _Variants:
    """Times variants by every clock."""

    def __init__(self, place: Place, folder: Path, output: OwnRows) -> None:
        self._place, self._output = place, output
        self._begun = Begun(folder / "variants.begun")
        device = place.device
        if empty := device.empty_call():  # a look at CUPTI sets it up: what it costs, it costs all
            with suppress(ValueError):
                Hardware(place, [empty]).stamps()
        place.calibrate()
        # How a card is timed that has nothing but a host's clock and a synchronisation.
        kind = "cpu" if device.kind == "cpu" else "accelerator"
        self._host_device = device_class(kind)(device.index)
        self._host = Clock(self._host_device)
        self._host.calibrate(self._host_device.empty_call())
        graph = place.clock.calibration.graph
        plain = self._host.calibration.plain
        note = f"a launch adds {plain.launch_s * 1e6:.3g} us"
        note += f"; {graph.launch_s * 1e6:.3g} us in a graph" if graph else ""
        note += "" if torch.cuda.is_available() else "; a long batch stands in for CUPTI"
        output.add({"op": "calibration", "note": note})

    def run(self, built: Sequence[Built], end_s: float) -> int:
        """Add a row for each variant and cache regime; return the exit status."""
        for (kernel, workload), items in by_workload(built).items():
            bench = None
            gc.collect()  # graphs hold the buffers of the workload before in cycles
            for item in items:
                if time.monotonic() > end_s:
                    return 0
                if not self._begun.first_time(kernel, workload, item.variant):
                    continue
                try:
                    bench = bench or self._place.bench(kernel, workload)
                    for row in self._rows(bench, item):
                        self._add(item, row)
                except Exception as error:  # one row must not end the others
                    self._add(item, {"note": reason(error)})
                    if not self._place.device.answers():
                        return 1
        return 0

    def _add(self, item: Built, row: Mapping[str, object]) -> None:
        about = {"op": item.kernel, "workload": item.workload, "variant": item.variant}
        self._output.add({**about, **row})
        shown = {name: row.get(name) for name in ("regime", "tuner_us", "cupti_us", "host_us")}
        print(item.kernel, item.workload, item.place, shown, row.get("note", ""), flush=True)

    def _rows(self, bench: Bench, item: Built) -> Iterator[dict[str, object]]:
        calls = self._place.calls(bench, item)
        yield self._row(calls)
        if len(calls) > 1 and item.place < WARM_VARIANTS:
            yield self._row(calls[:1])

    def _row(self, calls: Sequence[Call]) -> dict[str, object]:
        hardware = Hardware(self._place, calls)
        if hardware.estimate_us > LONGEST_US:
            return {"note": f"left out: about {hardware.estimate_us:.4g} us"}
        before = hardware.stamps()
        budget_s = self._place.device.measure_s
        timing = self._place.clock.measure(calls, budget_s=budget_s, give_up_ms=None)
        between = hardware.stamps()
        ours_us, true_us = timing.median_ms * 1e3, fmean([before.call_us, between.call_us])
        row: dict[str, object] = {
            "regime": timing.regime,
            "kernels": before.kernels,
            "tuner_us": ours_us,
            "low_us": timing.low_ms * 1e3,
            "high_us": timing.high_ms * 1e3,
            "cupti_us": true_us,
            "error_percent": 100 * (ours_us / true_us - 1),
            "note": timing.method,
        }
        with suppress(Exception):  # needs a GPU; it empties the cache before each call
            row["do_bench_us"] = _do_bench_us(calls) if timing.regime == "cold" else None
        try:
            host = self._host.measure(calls, budget_s=budget_s, give_up_ms=None)
        except BelowFloor as error:
            return row | {"note": f"{row['note']}; the host's clock alone: {error}"}
        true_us = fmean([between.call_us, hardware.stamps().call_us])
        host_us = host.median_ms * 1e3
        return row | {"host_us": host_us, "host_error_percent": 100 * (host_us / true_us - 1)}


def _do_bench_us(calls: Sequence[Call]) -> float:
    from triton.testing import do_bench

    return float(do_bench(rotation(calls), warmup=25, rep=100, return_mode="median")) * 1e3


def _races(
    options: argparse.Namespace, built: Sequence[Built], place: Place, output: OwnRows
) -> int:
    """Race a variant against its own copy, and two that are 2 % apart; return the exit status."""
    place.calibrate()
    end_s = time.monotonic() + options.seconds
    begun = Begun(options.folder / "races.begun")
    benches: list[Bench] = []  # hold the buffers
    equal = _equals(place, built, benches)
    planted = _planted(place, options.folder, benches)
    # Both kinds take turns, so that time that runs out costs both alike.
    turns = [("race of equals", equal, turn) for turn in range(options.races)]
    turns += [("race of two 2 % apart", planted, turn) for turn in range(options.planted)]
    for op, pairs, turn in sorted(turns, key=lambda item: item[2]):
        if not pairs or time.monotonic() > end_s or not begun.first_time(op, turn):
            continue
        workload, contenders = pairs[turn % len(pairs)]
        try:
            row = _race(place, contenders, turn, equal=pairs is equal)
        except Exception as error:
            row = {"note": reason(error), "outcome": "failed"}
        output.add({"op": op, "workload": workload, **row})
        if row["outcome"] == "failed" and not place.device.answers():
            return 1
    print("races:", len([row for row in output.rows if row["op"].startswith("race")]), flush=True)
    return 0


_Pair = tuple[str, dict[str, Sequence[Call]]]
"""A workload, and two contenders of which the first, ``"0"``, is the default."""


def _equals(place: Place, built: Sequence[Built], benches: list[Bench]) -> list[_Pair]:
    """Return a variant of each kernel beside its own copy, on a workload of middling length."""
    groups = by_workload(built)
    found: list[_Pair] = []
    for kernel in dict.fromkeys(kernel for kernel, _ in groups):
        workloads = [workload for name, workload in groups if name == kernel]
        item = groups[kernel, workloads[len(workloads) // 2]][0]
        with suppress(Exception):
            benches.append(place.bench(item.kernel, item.workload))
            contenders = {label: place.calls(benches[-1], item) for label in ("0", "1")}
            found.append((f"{item.kernel} {item.workload} {item.variant}", contenders))
    return found


def _planted(place: Place, folder: Path, benches: list[Bench]) -> list[_Pair]:
    """Return pairs of which the second, that is no default, takes 2 % less."""
    kind = "cpu" if place.device.kind == "cpu" else "gpu"
    found: list[_Pair] = []
    with suppress(Exception):
        if kind == "cpu":
            from spin import build
        else:
            from spin_triton import build
        spin = build(folder) if kind == "cpu" else build(place.device.torch_device)
        found.append(("spin", {str(n): [spin(r)] for n, r in enumerate(SPIN_ROUNDS[kind])}))
    with suppress(Exception):
        more, less = load(folder / "planted.json")
        benches += [place.bench(item.kernel, item.workload) for item in (more, less)]
        calls = [place.calls(*pair) for pair in zip(benches[-2:], (more, less), strict=True)]
        name = f"matmul {more.workload} {less.workload}"
        found.append((name, dict(zip("01", calls, strict=True))))
    return [(_with_truth(place, *pair), pair[1]) for pair in found]


def _with_truth(place: Place, workload: str, contenders: Mapping[str, Sequence[Call]]) -> str:
    """Return the pair's name with what the hardware says of it."""
    try:
        more, less = (
            median([Hardware(place, calls).stamps().call_us for _ in range(3)])
            for calls in contenders.values()
        )
    except ValueError as error:
        return f"{workload}: {reason(error)}"
    return f"{workload}: {100 * (more / less - 1):.2f} % by the hardware"


def _race(
    place: Place, contenders: Mapping[str, Sequence[Call]], seed: int, *, equal: bool
) -> dict[str, object]:
    result = race(place.clock, contenders, budget_s=RACE_S, seed=seed, reference="0")
    verdict = pick(result, lambda _: (0.0,))
    outcome = {True: ("kept", "false winner"), False: ("missed", "found")}[equal]
    return {
        "regime": result.regime,
        "outcome": outcome[verdict.winner != "0"],
        "note": f"{result.end} after {len(result.copy_ms)} blocks; the default takes "
        f"{median(dict(result.times_ms)['0']) * 1e3:.4g} us, {verdict.gain.value:.4f} of the pick",
    }


def _ncu(options: argparse.Namespace, output: OwnRows) -> int:
    """Have Nsight Compute look at the timed variants in one more child; return 0 in any case."""
    ncu = find_ncu()
    if ncu is None:
        output.add({"op": "ncu", "note": "Nsight Compute is not installed"})
        return 0
    child = [sys.executable, *sys.argv, "--part", "ncu_child"]
    child += ["--seconds", f"{max(options.seconds - NCU_ENDS_S, 5):.1f}"]
    log, keys = options.folder / "ncu.csv", options.folder / "ncu.keys"
    keys.unlink(missing_ok=True)
    environment = dict(os.environ)
    text = run_ncu(ncu, child, log, environment=environment, seconds=options.seconds + NCU_ENDS_S)
    times_us = calls_us(text)
    lines = keys.read_text().splitlines() if keys.exists() else []
    found: dict[str, list[float]] = {}
    for line, time_us in zip(lines, times_us, strict=False):
        found.setdefault(line, []).append(time_us)
    for line, values in found.items():
        output.update(json.loads(line), {"ncu_us": median(values)})
    last = " ".join(text.splitlines()[-2:])[-300:]
    output.add({"op": "ncu", "note": f"{len(times_us)} of {len(lines)} calls listed; {last}"})
    print(f"Nsight Compute: {len(found)} variants; {last}", flush=True)
    return 0


def _under_ncu(
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
                    with (folder / "ncu.keys").open("a") as keys:
                        keys.write(json.dumps(about | {"regime": regime}) + "\n")
                    marker()
                    turn()
                place.device.synchronize()
                torch.cuda.profiler.stop()
    return 0
