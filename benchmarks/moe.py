"""Dispatch and combine beside what is used instead, on several ranks.

``torchrun --nproc-per-node 2 benchmarks/moe.py --output benchmarks/results/moe_2xh200.csv``

Every sample is the slowest rank's. Contenders take turns, block by block, and the order of the
turns changes. A sample is one call by itself, after the caches were flushed and all ranks have met
behind a kernel that sleeps, or a tenth of a CUDA graph of ten calls or pairs of calls. Ours are
the kernels that `--package` was frozen with for these GPUs, else the defaults. After `--seconds`
no other workload is begun; the most telling come first. `--nvshmem` times torch's NVSHMEM
operations instead of ours: they need another backend of symmetric memory, so they get a run of
their own, beside the same collectives.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from moe_contenders import AllGather, AllToAll, AllToAllV, Contender, Load, Ours
from moe_timing import CALLS, Bench, Phase, capture, nothing
from moe_variants import variant
from rows import Result, ResultsFile, Spread

from tuner.runtime.moe import Kernels, LowLatencyBuffer

CALL = "one call, slowest rank, 5th to 95th percentile"
GRAPH = f"graph of {CALLS} calls, slowest rank, 5th to 95th percentile"
TIMEOUTS = {"timeout_s": 10.0, "first_timeout_s": 60.0}


def results_of(times: dict[str, list[float]], logical_bytes: float, note: str) -> list[Result]:
    """Return a row per contender: median, and 5th and 95th percentile as the interval."""
    results = []
    for label, samples in times.items():
        ordered = sorted(samples)
        median = statistics.median(ordered)
        last = len(ordered) - 1
        low, high = ordered[math.floor(0.05 * last)], ordered[math.ceil(0.95 * last)]
        rate = logical_bytes / median * 1e-6
        results.append(Result(label, Spread(median, low, high), rate, "GB/s", note))
    return results


class Shape:
    """A workload, as the command line spells it, and this rank's share of it."""

    def __init__(self, tokens: int, hidden: int, arguments: argparse.Namespace) -> None:
        self.tokens, self.hidden = tokens, hidden
        self._arguments = arguments

    def workload(self, routing: str, fp8: bool) -> str:
        """Return its name in the results."""
        given = self._arguments
        values = {"RANKS": dist.get_world_size(), "TOKENS": self.tokens, "HIDDEN": self.hidden}
        values |= {"TOPK": given.topk, "EXPERTS": given.experts, "routing": routing}
        text = ",".join(f"{name}={value}" for name, value in values.items())
        return f"{text},dtype={'float8_e4m3fn' if fp8 else 'bfloat16'}"

    def load(self, routing: str, fp8: bool, device: torch.device) -> Load:
        """Return this rank's tokens; skewed ones prefer experts of a low number."""
        given = self._arguments
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        shape = (self.tokens, given.experts)
        scores = torch.rand(shape, generator=generator, device=device).log().neg()
        if routing == "skewed":
            scores *= torch.arange(1, given.experts + 1, device=device)
        choices = scores.argsort(dim=1)[:, : given.topk].contiguous()
        x = torch.randn((self.tokens, self.hidden), generator=generator, device=device)
        weights = torch.rand(choices.shape, generator=generator, device=device)
        return Load(x.bfloat16(), choices, weights, given.experts, fp8)

    def bytes_of(self, fp8: bool) -> tuple[float, float]:
        """Return the bytes of all rows that a rank dispatches and combines, its own included."""
        rows = self.tokens * self._arguments.topk
        row = self.hidden + self.hidden // 32 + 16 if fp8 else 2 * self.hidden
        return float(rows * row), 2.0 * rows * self.hidden


def buffers_of(
    arguments: argparse.Namespace, hidden: int, folder: Path
) -> Iterator[tuple[str, LowLatencyBuffer, bool]]:
    """Yield our contenders: label, buffer, whether the combine copies nothing."""
    settings = json.loads(arguments.settings) if arguments.settings else {}
    moe = importlib.import_module(f"{arguments.package}._runtime.moe")

    def buffer(kernels: Kernels | None) -> LowLatencyBuffer:
        shape = (max(arguments.tokens), hidden, arguments.experts)
        options = {"topk": arguments.topk, "kernels": kernels, **TIMEOUTS}
        made: LowLatencyBuffer = moe.LowLatencyBuffer(dist.group.WORLD, *shape, **options)
        return made

    first = buffer(variant(folder, settings=settings) if settings else None)
    yield "tuner", first, True
    if hidden == arguments.hidden[0]:  # what single choices are worth, on one shape
        yield "tuner, rows copied", first, False
        if first.kernels.is_double:
            package = Path(moe.__file__).parents[2]
            one = variant(folder, first.kernels, package, settings, BUFFERING="acknowledged")
            yield "tuner, one buffer", buffer(one), True


def contenders(
    load: Load, buffers: Sequence[tuple[str, LowLatencyBuffer, bool]], nvshmem: bool
) -> Iterator[Contender]:
    """Yield what races on a workload."""
    for label, buffer, zero_copy in buffers:
        yield Ours(label, buffer, load, zero_copy=zero_copy)
    yield AllToAll(load)
    yield AllGather(load)
    if nvshmem and not load.fp8:
        yield AllToAllV(load)


def measure(
    bench: Bench, shape: Shape, racers: Sequence[Contender], *, fp8: bool, on_gpu: bool
) -> Iterator[tuple[str, list[Result]]]:
    """Yield the operation and its rows."""
    sent, returned = shape.bytes_of(fp8)
    for racer in itertools.chain(racers, racers):  # compiles, allocates, and both buffers
        racer.dispatch()
        racer.combine()
    # pairs, whatever is timed of them: graphs are replayed with the buffer that they began with
    for racer in racers:
        racer.dispatch()
    times = bench.race({one.label: (one.combine, one.dispatch) for one in racers}, calls=1)
    yield "moe_dispatch", results_of(times, sent, CALL)
    for racer in racers:
        racer.combine()
    times = bench.race({one.label: (one.dispatch, one.combine) for one in racers}, calls=1)
    yield "moe_combine", results_of(times, returned, CALL)
    if not on_gpu:
        return
    captured = [racer for racer in racers if racer.capturable]
    alone = [racer for racer in captured if racer.repeatable]
    for op, some, size in (
        ("moe_dispatch", captured, sent),
        ("moe_combine", alone, returned),
        ("moe_dispatch + moe_combine", captured, sent + returned),
    ):
        graphs = {one.label: (nothing, capture(*phases_of(op, one))) for one in some}
        times = bench.race(graphs, calls=CALLS)
        yield f"{op} in a graph", results_of(times, size, GRAPH)


def phases_of(op: str, racer: Contender) -> list[Phase]:
    phases = {"moe_dispatch": racer.dispatch, "moe_combine": racer.combine}
    return [phase for name, phase in phases.items() if name in op]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the CSV file")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1, 512, 8, 32])
    parser.add_argument("--hidden", type=int, nargs="+", default=[7168, 4096, 2048])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--routing", nargs="+", default=["balanced", "skewed"])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=200.0, help="when to begin no more")
    parser.add_argument("--package", default="kernels_generated", help="whose winners are timed")
    parser.add_argument("--settings", help="JSON: kernel to parameters, instead of the winners'")
    parser.add_argument("--nvshmem", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    device = start(arguments)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    file = ResultsFile(arguments.output, f"{dist.get_world_size()} x {name}")
    bench = Bench(device, blocks=arguments.blocks, samples=arguments.samples)
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        for hidden in arguments.hidden:
            if is_over(deadline, device):
                break
            buffers = [] if arguments.nvshmem else [*buffers_of(arguments, hidden, Path(folder))]
            for fp8, routing, tokens in itertools.product(
                (True, False), arguments.routing, arguments.tokens
            ):
                if is_over(deadline, device):
                    break
                shape = Shape(tokens, hidden, arguments)
                load = shape.load(routing, fp8, device)
                racers = [*contenders(load, buffers, arguments.nvshmem)]
                on_gpu = device.type == "cuda"
                for op, rows in measure(bench, shape, racers, fp8=fp8, on_gpu=on_gpu):
                    if dist.get_rank() == 0:
                        file.replace(op, shape.workload(routing, fp8), rows)
    dist.destroy_process_group()


def is_over(deadline: float, device: torch.device) -> bool:
    """Return whether the time is up on any rank, so that all ranks stop at the same place."""
    over = torch.tensor(int(time.monotonic() > deadline), device=device)
    dist.all_reduce(over, op=dist.ReduceOp.MAX)
    return bool(over)


def start(arguments: argparse.Namespace) -> torch.device:
    """Join the other ranks and return this one's device."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if arguments.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if arguments.nvshmem:
        from torch.distributed import _symmetric_memory as symmetric_memory

        symmetric_memory.set_backend("NVSHMEM")  # before anything is allocated
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=device)
    return device


if __name__ == "__main__":
    main()
