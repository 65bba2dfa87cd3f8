"""What `clock_hardware.py` does in a child of its own: variants, races, Nsight Compute."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import clock_ncu
import torch
from clock_hardware import COLUMNS, Begun, by_workload
from clock_races import hold_races
from contest import reason
from hardware import Hardware, Stamps
from rows import OwnRows
from variants import Built, Place, rotation

from tuner.catalog import device_class
from tuner.serve.bench import Bench, Call
from tuner.timing.clock import Clock

LONGEST_US = 8000.0
"""A sampled variant that takes longer is left out: a bad choice of parameters costs the time."""

WARM_VARIANTS = 2
"""Variants of each workload that are timed on one set of buffers, too, where several are needed
to overflow the cache."""


def run_part(options: argparse.Namespace, built: Sequence[Built]) -> int:
    """Run one part until it is done or its time is spent; return the exit status."""
    output = OwnRows(options.output, options.name, COLUMNS, options.run)
    if options.part == "ncu":
        return clock_ncu.look(options, output)
    end_s = time.monotonic() + options.seconds
    place = Place(options.device, options.folder)
    if options.part == "variants":
        return _Variants(place, options.folder, output).run(built, end_s)
    if options.part == "races":
        return hold_races(options, built, place, output)
    return clock_ncu.make_calls(place, built, output, folder=options.folder, end_s=end_s)


class _Variants:
    """Times variants by every clock."""

    def __init__(self, place: Place, folder: Path, output: OwnRows) -> None:
        self._place, self._output = place, output
        self._begun = Begun(folder / "variants.begun")
        device = place.device
        if empty := device.empty_call():  # a look at CUPTI sets it up: what it costs, it costs all
            _look(Hardware(place, [empty]))
        place.calibrate()
        # How a card is timed that has nothing but a host's clock and a synchronisation.
        kind = "accelerator" if torch.accelerator.is_available() else device.kind
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
        yield self._row(calls, flushed=True)
        if len(calls) > 1 and item.place < WARM_VARIANTS:
            yield self._row(calls[:1], flushed=False)

    def _row(self, calls: Sequence[Call], *, flushed: bool) -> dict[str, object]:
        """Return what every clock says of calls, `do_bench` where caches hold nothing of use."""
        hardware = Hardware(self._place, calls)
        if hardware.estimate_us > LONGEST_US:
            return {"note": f"left out: about {hardware.estimate_us:.4g} us"}
        before = _look(hardware)
        budget_s = self._place.device.measure_s
        timing = self._place.clock.measure(calls, budget_s=budget_s, give_up_ms=None)
        between = _look(hardware)
        ours_us, true_us = timing.median_ms * 1e3, _mean_us(before, between)
        row: dict[str, object] = {
            "regime": timing.regime,
            "kernels": between.kernels if between else None,
            "tuner_us": ours_us,
            "low_us": timing.low_ms * 1e3,
            "high_us": timing.high_ms * 1e3,
            "cupti_us": true_us,
            "error_percent": _error_percent(ours_us, true_us),
            "note": timing.method,
        }
        with suppress(Exception):  # needs a GPU; it empties the cache before each call
            row["do_bench_us"] = _do_bench_us(calls) if flushed else None
        try:
            host = self._host.measure(calls, budget_s=budget_s, give_up_ms=None)
        except Exception as error:  # such as BelowFloor
            return row | {"note": f"{row['note']}; the host's clock alone: {reason(error)}"}
        host_us, true_us = host.median_ms * 1e3, _mean_us(between, _look(hardware))
        return row | {
            "host_us": host_us,
            "host_error_percent": _error_percent(host_us, true_us),
        }


def _look(hardware: Hardware) -> Stamps | None:
    """Return what the hardware says, None if it says nothing now."""
    try:
        return hardware.stamps()
    except Exception as error:  # the other clocks' figures are worth having
        print(f"  no look at the hardware: {reason(error)}", flush=True)
        return None


def _mean_us(*looks: Stamps | None) -> float | None:
    """Return the time around a measurement: a drift to one side cancels."""
    return None if None in looks else fmean(look.call_us for look in looks if look)


def _error_percent(time_us: float, true_us: float | None) -> float | None:
    return None if true_us is None else 100 * (time_us / true_us - 1)


def _do_bench_us(calls: Sequence[Call]) -> float:
    from triton.testing import do_bench

    return float(do_bench(rotation(calls), warmup=25, rep=100, return_mode="median")) * 1e3
