"""One of several processes, each with a GPU: many rounds, graphs, a peer that is missing; as JSON.

``python exchange_soak.py RANK RANKS ROUNDS STORE DEVICE VARIANT``; on ``cpu`` there are no graphs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from exchange_child import VARIANTS
from exchange_ranks import Case, kernels
from torch import Tensor

from tuner.runtime.moe import LowLatencyBuffer, PeerTimeout

CHECKED = 1000
"""Rounds between two looks at what went wrong."""

SLEEP_CYCLES = 100_000
FOLDER = Path(tempfile.mkdtemp())


class Soak:
    """Sends whole numbers to experts that copy, so that every sum must be exact.

    Args:
        case: The shape.
        buffer: This rank's buffer.
        seed: Differs from rank to rank.
    """

    def __init__(self, case: Case, buffer: LowLatencyBuffer, seed: int) -> None:
        self.case, self.buffer, self.device = case, buffer, buffer.device
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._delays = random.Random(seed)
        self.errors = torch.zeros((), dtype=torch.int64, device=self.device)

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of whole numbers, choices, of which some name nobody, and weights of 1."""
        shape = (tokens, self.case.hidden)
        x = torch.randint(0, 8, shape, generator=self._generator, device=self.device)
        scores = torch.rand(
            (tokens, self.case.experts), generator=self._generator, device=self.device
        )
        choices = scores.argsort(dim=1)[:, : self.case.topk].contiguous()
        choices.masked_fill_(scores[:, : self.case.topk] < 0.1, -1)
        weights = torch.ones(choices.shape, device=self.device)
        return x.bfloat16(), choices, weights

    def play(self, x: Tensor, choices: Tensor, weights: Tensor, *, zero_copy: bool) -> Tensor:
        """Return what comes back of a dispatch and a combine."""
        self._sleep()
        got = self.buffer.dispatch(x, choices, weights)
        rows = got.recv_x
        if zero_copy:
            rows = self.buffer.get_next_combine_buffer(got.handle).copy_(rows)
        self._sleep()
        arguments = (rows, choices, weights, got.handle)
        return self.buffer.combine(*arguments, zero_copy=zero_copy).out

    def count(self, out: Tensor, x: Tensor, choices: Tensor) -> None:
        """Count the sums that are wrong, without waiting for the device."""
        self.errors += (out != x * (choices >= 0).sum(dim=1, keepdim=True)).sum()

    def rounds(self, count: int) -> str | None:
        """Return what is wrong after some pairs of rounds with random numbers of tokens."""
        for number in range(count):
            inputs = self.inputs(self._delays.randint(0, self.case.max_tokens))
            self.count(self.play(*inputs, zero_copy=number % 2 == 1), *inputs[:2])
            if number % CHECKED == CHECKED - 1 or number == count - 1:
                self.buffer.check()
                if int(self.errors):
                    return f"{int(self.errors)} sums are wrong by round {number}"
        return None

    def _sleep(self) -> None:
        if self.device.type == "cuda" and self._delays.random() < 0.2:
            torch.cuda._sleep(self._delays.randint(1, SLEEP_CYCLES))


def graphs(soak: Soak, replays: int) -> str | None:
    """Capture a pair for each of some numbers of tokens and replay them in random order."""
    captured: list[tuple[Callable[[], None], Tensor, Tensor, Tensor]] = []
    for tokens in (1, 2, 4, 8):
        inputs = soak.inputs(min(tokens, soak.case.max_tokens))
        soak.play(*inputs, zero_copy=True)  # compiles
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = soak.play(*inputs, zero_copy=True)
        dist.barrier()
        captured.append((graph.replay, out, *inputs[:2]))
    order = random.Random(0)  # the same on every rank
    for _ in range(replays):
        replay, out, x, choices = order.choice(captured)
        replay()
        soak.count(out, x, choices)
    soak.buffer.check()
    return f"{int(soak.errors)} sums are wrong after replays" if int(soak.errors) else None


def missing_peer(soak: Soak, rank: int) -> str | None:
    """Rank 0 misses a round: the others must learn of it, and all go on after a reset."""
    inputs = soak.inputs(1)
    if rank:
        try:
            soak.buffer.dispatch(*inputs)
            soak.buffer.check()
        except PeerTimeout as error:
            if (error.rank, error.phase) != (0, "receive"):
                return f"{error}"
        else:
            return "no timeout"
    soak.buffer.reset()
    return soak.rounds(4)


def reports(
    rank: int, ranks: int, rounds: int, device: str, variant: str
) -> Iterator[tuple[str, str | None]]:
    case = Case(ranks=ranks, local=4, topk=4, max_tokens=8, hidden=256)
    if device == "cuda":
        case = Case(ranks=ranks, local=8, topk=8, max_tokens=64, hidden=2048)
    choices = VARIANTS[variant]
    programs = {"SEND_PROGRAMS": 32, "RECEIVE_PROGRAMS": 32} if device == "cuda" else {}
    rendered = kernels(FOLDER, **choices, **programs)
    patience = {"timeout_s": 4.0, "first_timeout_s": 60.0}
    buffer = case.buffer(dist.group.WORLD, rendered, **patience)
    soak = Soak(case, buffer, seed=rank)
    # one buffer gives a view after each dispatch alone, which is what happens here
    yield f"{variant}: rounds", soak.rounds(rounds)
    if device == "cuda":
        yield f"{variant}: graphs", graphs(soak, 200)
    yield f"{variant}: missing peer", missing_peer(soak, rank)


def main(
    rank: int, ranks: int, rounds: int, store: str, device: str, variant: str
) -> dict[str, str | None]:
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )
    found = dict(reports(rank, ranks, rounds, device, variant))
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = main(*map(int, sys.argv[1:4]), *sys.argv[4:7])
    print(json.dumps(found))
