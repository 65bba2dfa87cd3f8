"""Dispatch and combine beside what is used instead, on several ranks.

``torchrun --nproc-per-node 2 benchmarks/moe.py --output benchmarks/results/moe_2xh200.csv``

Every sample is the slowest rank's. Contenders take turns, block by block, and the order of the
turns changes. A sample is one call by itself, after the caches were flushed and all ranks have met
behind a kernel that sleeps, or a tenth of a CUDA graph of ten pairs. `--nvshmem` times torch's
NVSHMEM operations instead of ours: they need another backend of symmetric memory, so they get a
run of their own, beside the same collectives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from moe_contenders import AllGather, AllToAll, AllToAllV, Contender, Load, Ours, variant
from rows import Result, ResultsFile, Spread

from tuner.runtime.moe import Kernels, LowLatencyBuffer, default_kernels

PAIRS = 10
"""Pairs of a dispatch and a combine in a graph: an even number of rounds."""

FLUSH_BYTES = 256 << 20
SLEEP_CYCLES = 2_000_000

Phase = Callable[[], object]
"""What is timed, or what comes before it."""


class Bench:
    """Times contenders on one workload, all ranks together.

    Args:
        device: This rank's device.
        blocks: Turns of each contender.
        samples: Samples in a turn.
    """

    def __init__(self, device: torch.device, *, blocks: int, samples: int) -> None:
        self._device, self._blocks, self._samples = device, blocks, samples
        self._on_gpu = device.type == "cuda"
        size = FLUSH_BYTES if self._on_gpu else 1
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)
        self._meet = torch.zeros(1, device=device)

    def race(
        self, phases: dict[str, tuple[Phase, Phase]], *, calls: int
    ) -> dict[str, list[float]]:
        """Return each contender's times of one call in milliseconds, the slowest rank's.

        Args:
            phases: What comes before each sample, and what is timed, by label.
            calls: Calls that a phase makes; a single one finds its caches overwritten.
        """
        times: dict[str, list[float]] = {label: [] for label in phases}
        order, labels = random.Random(0), list(phases)  # the same order on every rank
        for _ in range(self._blocks):
            order.shuffle(labels)
            for label in labels:
                before, call = phases[label]
                for _ in range(self._samples):
                    before()
                    times[label].append(self._sample(call, flush=calls == 1) / calls)
        table = torch.tensor(list(times.values()), dtype=torch.float64, device=self._device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return dict(zip(times, table.tolist(), strict=True))

    def _sample(self, call: Phase, *, flush: bool) -> float:
        if flush:
            self._flush.zero_()
        if not self._on_gpu:
            dist.barrier()
            begin = time.perf_counter()
            call()
            return (time.perf_counter() - begin) * 1e3
        torch.cuda._sleep(SLEEP_CYCLES)
        dist.all_reduce(self._meet)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def nothing() -> None:
    pass


def capture(contender: Contender) -> Phase:
    """Return the replay of a graph of `PAIRS` pairs."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        for _ in range(PAIRS):
            contender.dispatch()
            contender.combine()
    torch.cuda.synchronize()
    dist.barrier()
    return graph.replay


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
    chosen = variant(folder, settings) if settings else None
    pulling = chosen or default_kernels()

    def buffer(kernels: Kernels | None) -> LowLatencyBuffer:
        shape = (max(arguments.tokens), hidden, arguments.experts)
        options = {"topk": arguments.topk, "kernels": kernels, "timeout_s": 60.0}
        return LowLatencyBuffer(dist.group.WORLD, *shape, **options)

    first = buffer(chosen)
    yield "tuner", first, True
    yield "tuner, rows copied", first, False
    one = variant(folder, settings, BUFFERING="acknowledged")
    if pulling.is_double:
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
    dispatches = {racer.label: (nothing, racer.dispatch) for racer in racers}
    combines = {racer.label: (racer.dispatch, racer.combine) for racer in racers}
    for op, phases, size in (
        ("moe_dispatch", dispatches, sent),
        ("moe_combine", combines, returned),
    ):
        times = bench.race(phases, calls=1)
        yield op, results_of(times, size, "one call, slowest rank, 5th to 95th percentile")
    if on_gpu:
        graphs = {racer.label: (nothing, capture(racer)) for racer in racers if racer.capturable}
        times = bench.race(graphs, calls=PAIRS)
        note = f"graph of {PAIRS} pairs, slowest rank, 5th to 95th percentile"
        yield "moe_dispatch + moe_combine", results_of(times, sent + returned, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the CSV file")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--hidden", type=int, nargs="+", default=[2048, 4096, 7168])
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--routing", nargs="+", default=["balanced", "skewed"])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--settings", help="JSON: kernel to parameters, beside the default's")
    parser.add_argument("--nvshmem", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    device = start(arguments)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    file = ResultsFile(arguments.output, f"{dist.get_world_size()} x {name}")
    bench = Bench(device, blocks=arguments.blocks, samples=arguments.samples)
    with tempfile.TemporaryDirectory() as folder:
        for hidden in arguments.hidden:
            buffers = [] if arguments.nvshmem else [*buffers_of(arguments, hidden, Path(folder))]
            for tokens, routing, fp8 in itertools.product(
                arguments.tokens, arguments.routing, (False, True)
            ):
                shape = Shape(tokens, hidden, arguments)
                load = shape.load(routing, fp8, device)
                racers = [*contenders(load, buffers, arguments.nvshmem)]
                on_gpu = device.type == "cuda"
                for op, rows in measure(bench, shape, racers, fp8=fp8, on_gpu=on_gpu):
                    if dist.get_rank() == 0:
                        file.replace(op, shape.workload(routing, fp8), rows)
    dist.destroy_process_group()


def start(arguments: argparse.Namespace) -> torch.device:
    """Join the other ranks and return this one's device."""
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
