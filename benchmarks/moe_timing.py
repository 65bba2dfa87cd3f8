"""Timing contenders on several ranks: what counts is the slowest rank's time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

CALLS = 10
"""Calls, or pairs of them, in a graph: an even number of rounds."""

FLUSH_BYTES = 256 << 20
SLEEP_CYCLES = 1_000_000
"""About half a millisecond, in which the host launches what is timed."""

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


def capture(*phases: Phase) -> Phase:
    """Return the replay of a graph that goes through the phases `CALLS` times."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            for phase in phases:
                phase()
    torch.cuda.synchronize()
    dist.barrier()
    return graph.replay
