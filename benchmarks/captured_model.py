"""A small transformer, captured, tuned for, and timed with the frozen kernels put in.

    python benchmarks/captured_model.py --device cpu --budget 120s --output FILE.csv

The step is a forward and a backward pass. Both models have the same weights and take turns, step
by step, in one run; attention is what is put in, since it is differentiable.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rows import Result, ResultsFile, Spread
from torch import Tensor, nn
from torch.nn import functional

import tuner
from tuner.catalog import device_class, split_device

ROUNDS = 40
WARM_UP = 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """A layer of a transformer whose attention can be replaced."""

    def __init__(self, width: int, heads: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.project(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.mix(mixed)
        return x + self.feed(x)


def torch_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def model(attend: Attend, sizes: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(sizes.width, sizes.heads, attend) for _ in range(sizes.layers)]
    dtype = torch.float32 if sizes.device == "cpu" else torch.bfloat16
    return nn.Sequential(*blocks).to(sizes.device, dtype)


def step(network: nn.Module, x: Tensor) -> float:
    """Return the loss after a forward and a backward pass."""
    network.zero_grad()
    loss = network(x).float().square().mean()
    loss.backward()
    return float(loss)  # waits for the device


def step_ms(network: nn.Module, x: Tensor) -> float:
    started = time.perf_counter()
    step(network, x)
    if x.device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) * 1e3


def spread(times_ms: list[float]) -> Spread:
    """Return the median and its 95 % interval from the order of the times."""
    ordered = sorted(times_ms)
    half = 0.98 * len(ordered) ** 0.5
    low, high = (round(len(ordered) / 2 + sign * half) for sign in (-1, 1))
    return Spread(median(ordered), ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)])


def tuned_attention(captured: Path, sizes: argparse.Namespace, folder: Path) -> Attend:
    """Tune for what was captured and return the package's attention."""
    command = [sys.executable, "-m", "tuner", "attention_forward", "attention_backward"]
    command += ["--workloads", str(captured), "--goal", "weighted", "--device", sizes.device]
    command += ["--budget", sizes.budget, "--output", str(folder / "captured_kernels")]
    subprocess.run([*command, "--store", str(folder / "store")], check=True)
    sys.path.insert(0, str(folder))
    attention = importlib.import_module("captured_kernels").attention
    return lambda q, k, v: attention(q, k, v, causal=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--budget", default="120s")
    parser.add_argument("--output", type=Path, required=True)
    for name, value in (("batch", 2), ("length", 1024), ("width", 256), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layers", type=int, default=2)
    sizes = parser.parse_args()
    before = model(torch_attend, sizes)
    dtype = next(before.parameters()).dtype
    x = torch.randn(sizes.batch, sizes.length, sizes.width, device=sizes.device, dtype=dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tuner.capture(folder / "captured.yaml") as recorder:
            step(before, x)
        for workload, calls in recorder.workloads.items():
            print(f"{workload.kernel} {workload}: {calls.count} calls, {calls.seconds:.4g} s")
        after = model(tuned_attention(folder / "captured.yaml", sizes, folder), sizes)
        losses = [step(network, x) for network in (before, after)]
        times: dict[str, list[float]] = {"torch": [], "tuner": []}
        for round_ in range(WARM_UP + ROUNDS):
            turn = [("torch", before), ("tuner", after)][:: 1 if round_ % 2 else -1]
            for label, network in turn:
                times[label].append(step_ms(network, x))
    shape = f"B={sizes.batch},S={sizes.length},width={sizes.width},H={sizes.heads}"
    workload = f"{shape},layers={sizes.layers},dtype={str(dtype).removeprefix('torch.')}"
    note = f"a step, attention replaced; losses {losses[0]:.6g} and {losses[1]:.6g}"
    results = [
        Result(label, spread(times_ms[WARM_UP:]), note=note) for label, times_ms in times.items()
    ]
    kind, index = split_device(sizes.device)
    device = device_class(kind)(index).info().name
    ResultsFile(sizes.output, device).replace("transformer step", workload, results)
    for result in results:
        print(result.contender, result.spread, note)


if __name__ == "__main__":
    main()
