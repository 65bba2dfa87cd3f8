"""Which of Triton's and Gluon's features a device compiles, launches and gets right."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from tuner.plugins import Device
from tuner.timing.clock import Clock

Findings = dict[str, Any]
Experiment = Callable[[Device, Clock], Findings]

_MOST_CHUNKS = 1024
_GLUON = "tuner.devices._gluon_features"


def finding(value: float | bool | None, unit: str, note: str = "") -> dict[str, Any]:
    """Return a finding as `tuner.evidence.card` reads it."""
    return {"value": value, "unit": unit, "note": note}


def triton_experiments(device: Device) -> dict[str, Experiment]:
    """Return the experiments of a device that runs Triton, by name."""
    from tuner.devices import _triton_features

    found: dict[str, Experiment] = {
        name: partial(_triton, name) for name in _triton_features.FEATURES
    }
    if device.timed:  # an interpreter has neither warps nor shared memory
        found |= {"warps": _warps, "gluon": _gluon, "shared_bytes": _shared_bytes}
    return found


def most(works: Callable[[int], bool], limit: int) -> int:
    """Return the largest whole number up to a limit that works, if all below it do."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def _triton(name: str, device: Device, clock: Clock) -> Findings:
    del clock
    from tuner.devices._triton_features import try_feature

    try:
        fault = try_feature(name, device.torch_device)
    except Exception as error:  # whatever the compiler or driver says is the finding
        fault = reason(error)
    return {name: finding(fault is None, "", fault or "")}


def _warps(device: Device, clock: Clock) -> Findings:
    del clock
    from tuner.devices._triton_features import largest_warps

    return {
        "warp_size": finding(_lanes(device), "lanes", "as Triton's driver compiles for it"),
        "num_warps": finding(largest_warps(device.torch_device), "warps", "most that launch"),
    }


def _gluon(device: Device, clock: Clock) -> Findings:
    del clock
    gluon: Any = importlib.import_module(_GLUON)
    found = {}
    for name in gluon.FEATURES:
        try:
            fault = gluon.try_feature(name, device.torch_device, _lanes(device))
        except Exception as error:  # whatever the compiler or driver says is the finding
            fault = reason(error)
        found[f"gluon_{name}"] = finding(fault is None, "", fault or "")
    return found


def _shared_bytes(device: Device, clock: Clock) -> Findings:
    del clock
    gluon: Any = importlib.import_module(_GLUON)
    # The first failure with a single chunk is no limit but a missing feature: it is raised.
    gluon.try_shared_bytes(1, device.torch_device, _lanes(device))

    def works(chunks: int) -> bool:
        try:
            gluon.try_shared_bytes(chunks, device.torch_device, _lanes(device))
        except Exception:  # too much for the compiler or the driver
            return False
        return True

    largest = most(works, _MOST_CHUNKS)
    return {
        "shared_bytes": finding(largest * gluon.CHUNK, "bytes", "most that compiles and launches")
    }


def reason(error: Exception) -> str:
    """Return an error's first line with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:200]


def _lanes(device: Device) -> int:
    return dict(device.info().limits)["warp_size"]
