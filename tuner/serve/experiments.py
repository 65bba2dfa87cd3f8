"""What a device can do, found by trying: bandwidths, rates, costs, limits and features.

Each experiment is small and runs in a child, which it may hang or kill: that is a finding, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tuner.plugins import Device
from tuner.serve.features import Experiment, Findings, finding, reason, triton_experiments
from tuner.timing.clock import Clock
from tuner.timing.meter import Call
from tuner.timing.race import survey
from tuner.timing.sanity import Ceilings, as_wide
from tuner.timing.statistics import ratio_interval

BUDGET_S = 0.3
"""Seconds for each time that is measured."""

MOST_BYTES = 512 * 1024**2
"""Largest buffer; beyond some caches it makes no difference."""

OVERFLOW = 4
"""A buffer is this many times the last-level cache, so that next to nothing of it stays there."""

NOISE_EXTENT = 256
"""Extent of the matrices whose product is timed against itself."""


def experiments(device: Device) -> dict[str, Experiment]:
    """Return the experiments that make sense on a device, by name."""
    found: dict[str, Experiment] = {}
    if device.timed:
        found |= {"clock": _clock, "noise": _noise}
        found |= {f"{name}_bandwidth": partial(_bandwidth, name) for name in _MOVES}
        found |= {f"rate_{dtype}": partial(_rate, dtype) for dtype in device.matrix_dtypes}
    if "triton" in device.languages:
        found |= triton_experiments(device)
    return found


def attempt(name: str, device: Device, clock: Clock) -> dict[str, Any]:
    """Return what an experiment found, or the reason why it could not be carried out."""
    try:
        return {"findings": experiments(device)[name](device, clock)}
    except Exception as error:  # that it fails is what was found
        return {"reason": reason(error)}


def fastest(calls: list[Call], clock: Clock) -> float:
    """Return the seconds of the fastest sample of a call: noise only adds, so this is a bound."""
    meter = clock.prepare(calls)
    until_s = clock.now() + BUDGET_S
    samples = [meter.sample() for _ in range(3)]
    while clock.now() < until_s:
        samples.append(meter.sample())
    return min(sample for sample in samples if sample > 0)


def ceilings(dtype: str, device: Device, clock: Clock) -> Ceilings:
    """Return what the device does at most right now, for kernels of an element type."""
    gbytes = max(bandwidth(name, device, clock) for name in _MOVES) * 1e-9
    rates = [rate(name, device, clock) for name in as_wide(dtype) & set(device.matrix_dtypes)]
    return Ceilings(gbytes, max(rates, default=0.0) * 1e-9 or None)


def bandwidth(name: str, device: Device, clock: Clock) -> float:
    """Return the bytes per second of copying, reading or writing memory, not the cache."""
    size = min(OVERFLOW * device.cache_bytes(), MOST_BYTES)
    x, y = (torch.zeros(size // 4, device=device.torch_device) for _ in range(2))
    move, passes = _MOVES[name]
    return passes * x.nbytes / fastest([partial(move, x, y)], clock)


def rate(dtype: str, device: Device, clock: Clock) -> float:
    """Return the operations per second of the library's matrix product.

    Args:
        dtype: Torch's name of the element type, or ``"tf32"``.
        device: The device.
        clock: Its clock.
    """
    best = 0.0
    for extent in device.matrix_extents:
        call = _product(dtype, extent, device.torch_device)
        best = max(best, 2.0 * extent**3 / fastest([call], clock))
    return best


def _bandwidth(name: str, device: Device, clock: Clock) -> Findings:
    gbytes = bandwidth(name, device, clock) * 1e-9
    return {f"{name}_bandwidth": finding(gbytes, "GB/s", "fastest, caches overflown")}


def _rate(dtype: str, device: Device, clock: Clock) -> Findings:
    gflops = rate(dtype, device, clock) * 1e-9
    return {f"rate_{dtype}": finding(gflops, "GFLOP/s", "fastest product of square matrices")}


def _clock(device: Device, clock: Clock) -> Findings:
    del device
    costs = clock.calibration
    launch = "launch" if costs.asynchronous else "call"
    found = {
        "clock_resolution": finding(costs.resolution_s * 1e6, "us", "smallest step seen"),
        "synchronization": finding(costs.synchronize_s * 1e6, "us", "with nothing to wait for"),
        f"lone_{launch}": finding(costs.call_s * 1e6, "us", "empty, with its synchronization"),
        f"next_{launch}": finding(costs.plain.launch_s * 1e6, "us", "one more in a batch"),
    }
    if costs.graph:
        found["next_captured_launch"] = finding(costs.graph.launch_s * 1e6, "us", "in a graph")
    return found


def _noise(device: Device, clock: Clock) -> Findings:
    call = _product("float32", NOISE_EXTENT, device.torch_device)
    result = survey(clock, {"": [call]}, budget_s=2 * BUDGET_S, seed=0, reference="")
    ratio = ratio_interval(dict(result.times_ms)[""], result.copy_ms)
    floor = max(ratio.high, 1 / ratio.low) - 1
    note = f"one product against itself, {len(result.copy_ms)} blocks"
    return {"noise_floor": finding(100 * floor, "%", note)}


def _copy(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x)


def _read(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.sum(x, dim=0, out=y[0])


def _write(x: torch.Tensor, y: torch.Tensor) -> None:
    del x
    y.fill_(1.0)


_MOVES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], None], int]] = {
    "copy": (_copy, 2),
    "read": (_read, 1),
    "write": (_write, 1),
}
"""How memory is moved, and how often each byte of a buffer is."""


def _product(dtype: str, extent: int, device: str) -> Callable[[], Any]:
    """Return a call of the library's product of two square matrices."""
    # Random numbers: a card that is fed zeros runs cooler and faster than it ever will in use.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(extent, extent, device=device, generator=generator) for _ in range(2))
    if dtype == "int8":
        left, right = (8 * a).to(torch.int8), (8 * b).to(torch.int8)
        return lambda: torch._int_mm(left, right)
    if dtype.startswith("float8"):
        left, right = (x.to(getattr(torch, dtype)) for x in (a, b.T.contiguous()))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.T, one, one, out_dtype=torch.bfloat16)
    if dtype in ("tf32", "float32"):
        out, precision = torch.empty_like(a), "high" if dtype == "tf32" else "highest"

        def product() -> None:
            torch.set_float32_matmul_precision(precision)
            torch.matmul(a, b, out=out)

        return product
    left, right = (x.to(getattr(torch, dtype)) for x in (a, b))
    out = torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=out)
