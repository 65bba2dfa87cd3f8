"""Children of `test_moe.py`: what they find wrong, by the name of what they tried, as JSON.

``local``: simulated ranks in one process, whose kernels Triton interprets. ``rank``: one of
several processes with shared memory. ``compiled``: what kernels look like for an H200.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from exchange_ranks import (
    Case,
    combine_fault,
    dispatch_fault,
    expert_output,
    kernels,
    play_round,
)

from tuner.runtime.moe import LocalGroup, LowLatencyBuffer, MisuseError, PeerTimeout
from tuner.runtime.moe.rounds import Rounds

FOLDER = Path(tempfile.mkdtemp())
SHORT = {"timeout_s": 0.001}  # whoever waits among simulated ranks waits for ever

VARIANTS: dict[str, dict[str, object]] = {
    "push": {},
    "rows once per rank, pulled": {
        **{"COPIES": "rank", "COPY": "pull", "RECEIVE_SPLIT": 2, "SIGNAL": "count"},
    },
    "sums": {"COPIES": "rank", "COPY": "reduce", "RECEIVE_SPLIT": 2, "SIGNAL": "count"},
    "sums, rows once per expert": {"COPY": "reduce"},
    "acknowledged": {
        **{"BUFFERING": "acknowledged", "AWAIT": "kernel", "SIGNAL": "exchange"},
        **{"MESSAGE": "interleaved", "SLOTS": "walk"},
    },
    "acknowledged, pulled": {
        **{"BUFFERING": "acknowledged", "COPY": "pull", "COPIES": "rank", "SLOTS": "walk"},
        **{"UNROLL": False},
    },
}
CASES = {
    "one rank": Case(ranks=1, local=3, topk=2, hidden=256),
    "two ranks": Case(ranks=2, local=2, topk=2, hidden=384),
    "three ranks, all experts": Case(ranks=3, local=1, topk=3, max_tokens=2),
    "four ranks": Case(ranks=4, local=1, topk=1, max_tokens=2),
    "eight ranks": Case(ranks=8, local=1, topk=1, max_tokens=1),
    "nobody has tokens": Case(counts=(0, 0)),
    "one rank has none": Case(counts=(0, 4), routing="random"),
    "one hot expert": Case(counts=(4, 3), routing="one_expert"),
    "nobody is named": Case(counts=(2, 1), routing="nobody"),
    "experts are named twice": Case(topk=3, counts=(3, 2), routing="twice"),
}
WIDE = [
    Case(ranks=ranks, local=local, topk=topk, max_tokens=5, hidden=hidden, routing=routing)
    for ranks, local in itertools.product((1, 2, 3, 4, 8), (1, 4))
    for topk, hidden, routing in (
        *((2, 384, "some_nobody"), (ranks * local, 128, "random"), (3, 256, "twice")),
    )
]


def faults_of(case: Case, variant: str, rounds: int) -> str | None:
    """Play pairs of rounds; one more round between them makes each use the other buffer."""
    buffers = case.buffers(kernels(FOLDER, **VARIANTS[variant]), **SHORT)
    for number in range(rounds):
        if number and (fault := play_out_of_step(buffers, case, number, 1)):
            return fault
        options = {"fp8": number % 2 == 1, "zero_copy": number % 4 in (1, 2)}
        options["weighted"] = (number + len(variant)) % 3 > 0
        if fault := play_round(case, buffers, number, **options):
            return fault
    return None


def play_out_of_step(
    buffers: Sequence[LowLatencyBuffer], case: Case, seed: int, rounds: int
) -> str | None:
    """Let ranks run ahead as far as two buffers let them; return the first fault.

    A rank may receive when all ranks have sent, and send when it has received itself.
    """
    tokens = [case.tokens(seed + number) for number in range(rounds)]
    order, sent, received = random.Random(seed), [0] * case.ranks, [0] * case.ranks
    got: list = [None] * case.ranks
    while min(received) < rounds:
        sending = [rank for rank in range(case.ranks) if sent[rank] == received[rank] < rounds]
        receiving = [rank for rank in range(case.ranks) if received[rank] < min(sent)]
        rank = order.choice(sending + receiving)
        mine = tokens[received[rank]]
        if rank in receiving:
            got[rank].hook()
            received[rank] += 1
            if fault := dispatch_fault(case, mine, rank, got[rank], False):
                return fault
        else:
            got[rank] = buffers[rank].dispatch(mine[rank].x, mine[rank].topk_idx, hook=True)
            sent[rank] += 1
    return None


def out_of_step(changes: tuple[tuple[str, str], ...] = (), **choices: object) -> str | None:
    case = Case(ranks=2, local=1, topk=1, max_tokens=2, counts=(2, 2), routing="random")
    buffers = case.buffers(kernels(FOLDER, changes, **choices), **SHORT)
    with unhurt():
        return play_out_of_step(buffers, case, 3, 10)
    return "a peer was late"


@contextlib.contextmanager
def unhurt():
    """Let a PeerTimeout end the block."""
    with contextlib.suppress(PeerTimeout):
        yield


def early_receive(changes: tuple[tuple[str, str], ...] = (), variant: str = "push") -> str | None:
    """Receive before a peer has sent, after both buffers were used: it must be a timeout."""
    case = Case(counts=(2, 2))
    buffers = case.buffers(kernels(FOLDER, changes, **VARIANTS[variant]), **SHORT)
    for number in range(2):
        if fault := play_round(case, buffers, number):
            return fault
    mine = case.tokens(5)[0]
    try:
        buffers[0].dispatch(mine.x, mine.topk_idx)
    except PeerTimeout as error:
        found = (error.rank, error.phase, error.round)
        return None if found == (1, "receive", 4) else f"{found}"
    return "no timeout"


def early_receive_of_rows_once_per_rank() -> str | None:
    return early_receive(variant="rows once per rank, pulled")


def mutant(
    change: tuple[str, str],
    case: Case | None = None,
    *,
    weighted: bool = False,
    **choices: object,
) -> str | None:
    """Return what a plain round finds wrong with changed kernels.

    It is without weights where a wrong row would have its places written anywhere.
    """
    case = case or Case(counts=(4, 4), topk=3, routing="some_nobody")
    buffers = case.buffers(kernels(FOLDER, (change,), **choices), **SHORT)
    with unhurt():
        return play_round(case, buffers, 1, weighted=weighted)
    return "a peer was late"


class _OneBuffer:
    """Makes rounds use the first buffer alone, as if the index were flipped twice."""

    def __enter__(self) -> None:
        self._index = Rounds.index
        Rounds.index = property(lambda _: 0)

    def __exit__(self, *_: object) -> None:
        Rounds.index = self._index


def one_buffer() -> str | None:
    with _OneBuffer():
        return out_of_step()


ZEROING = "        lower_signals(tl.load(next_signals + rank), RANKS)"
AWAITING = (
    "            await_signal(mine + peer, 1, peer, status_ptr, report_ptr, max_polls, SEND)"
)
MUTANTS: dict[str, Callable[[], str | None]] = {
    "signals are never lowered": lambda: early_receive(((ZEROING, "        pass"),)),
    "there is one buffer": one_buffer,
    "acknowledgements are not awaited": lambda: out_of_step(
        ((AWAITING, "            pass"),), BUFFERING="acknowledged"
    ),
    "an empty rank does not signal": lambda: mutant(
        ("    if is_last(done_ptr):\n", "    if is_last(done_ptr) and T > 0:\n"),
        case=Case(counts=(3, 0)),
    ),
    "-1 names the first expert": lambda: mutant(
        ("expert = first_of_each(named, CHOICES)", "expert = tl.maximum(named, 0)")
    ),
    "counts are taken for first rows": lambda: mutant(
        ("(packed >> 32).to(tl.int32), mask", "packed.to(tl.int32), mask"), COPY="pull"
    ),
    "one of two weights counts": lambda: mutant(
        ("weight = tl.sum(tl.where(same, weight[None, :], 0.0), axis=1)", "pass"),
        case=Case(topk=3, counts=(3, 2), routing="twice"),
        weighted=True,
        **{"COPIES": "rank", "COPY": "reduce", "RECEIVE_SPLIT": 2},
    ),
    "sums of the other rank are taken": lambda: mutant(
        ("named // LOCAL == peer", "named // LOCAL != peer"),
        case=Case(topk=1, counts=(4, 4), routing="random"),
        weighted=True,
        **{"COPY": "reduce"},
    ),
    "a rank's rows all go to one slot": lambda: mutant(
        ("place = tl.sum(tl.where(choice == k, slot, 0), axis=0)", "place = 0")
    ),
}


def timeout_and_reset() -> str | None:
    """A silent peer is named; nothing goes on before a reset; all goes on after it."""
    case = Case(ranks=3, local=1, topk=2, counts=(2, 2, 2))
    buffers = case.buffers(kernels(FOLDER), **SHORT)
    if fault := play_round(case, buffers, 0):
        return fault
    tokens = case.tokens(1)
    sent = [buffers[r].dispatch(tokens[r].x, tokens[r].topk_idx, hook=True) for r in (0, 2)]
    for attempt in (
        sent[0].hook,
        sent[1].hook,
        buffers[0].check,
        lambda: play_round(case, buffers, 2),
    ):
        try:
            attempt()
        except PeerTimeout as error:
            if (error.rank, error.phase) != (1, "receive"):
                return f"{error}"
        else:
            return "no timeout"
    for buffer in buffers:
        buffer.reset()
    return play_round(case, buffers, 3) or play_round(case, buffers, 4, zero_copy=True)


def timeout_of_a_send() -> str | None:
    """With one buffer, a peer that has not read is waited for, and nothing is overwritten."""
    case = Case(counts=(2, 2))
    buffers = case.buffers(kernels(FOLDER, BUFFERING="acknowledged"), **SHORT)
    tokens = case.tokens(0)
    sent = [b.dispatch(t.x, t.topk_idx, hook=True) for b, t in zip(buffers, tokens, strict=True)]
    sent[0].hook()
    mine = case.tokens(1)[0]
    try:
        buffers[0].dispatch(mine.x, mine.topk_idx)
    except PeerTimeout as error:
        if (error.rank, error.phase, error.round) != (1, "send", 1):
            return f"{error}"
    else:
        return "no timeout"
    sent[1].hook()
    return dispatch_fault(case, tokens, 1, sent[1], False)


def masked_rank() -> str | None:
    """Ranks that leave out a third one play on without its experts."""
    case = Case(ranks=3, local=1, topk=3, counts=(2, 2, 2), routing="random")
    buffers = case.buffers(kernels(FOLDER), **SHORT)
    tokens = case.tokens(0)
    for buffer in buffers[:2]:
        buffer.mask(2)
    sent = [buffers[r].dispatch(tokens[r].x, tokens[r].topk_idx, hook=True) for r in (0, 1)]
    tokens[2].topk_idx[:] = -1  # nothing comes from it
    for rank, got in enumerate(sent):
        got.hook()
        if fault := dispatch_fault(case, tokens, rank, got, False):
            return fault
    combined = [
        buffers[r].combine(
            *(expert_output(case, sent[r], r), tokens[r].topk_idx, tokens[r].topk_weights),
            sent[r].handle,
            hook=True,
        )
        for r in (0, 1)
    ]
    for rank, got in enumerate(combined):
        got.hook()
        tokens[rank].topk_idx[tokens[rank].topk_idx == 2] = -1  # nothing comes back from it
        if fault := combine_fault(case, tokens[rank], got.out, rank, False):
            return fault
    return None


def two_layers() -> str | None:
    """Handles belong to dispatches, not to rounds: two layers may be under way at once."""
    case = Case(counts=(3, 2))
    buffers = case.buffers(kernels(FOLDER), **SHORT)
    layers = []
    for seed in (0, 1):
        tokens = case.tokens(seed)
        sent = [
            buffer.dispatch(mine.x, mine.topk_idx, hook=True)
            for buffer, mine in zip(buffers, tokens, strict=True)
        ]
        for got in sent:
            got.hook()
        layers.append((tokens, sent))
    for tokens, sent in layers:
        combined = [
            buffer.combine(
                *(expert_output(case, got, rank), mine.topk_idx, mine.topk_weights, got.handle),
                hook=True,
            )
            for rank, (buffer, mine, got) in enumerate(zip(buffers, tokens, sent, strict=True))
        ]
        for rank, got in enumerate(combined):
            got.hook()
            if fault := combine_fault(case, tokens[rank], got.out, rank, False):
                return fault
    return None


def frozen_package_serves() -> str | None:
    """The package in this repository has the buffer with kernels that work everywhere."""
    from kernels_generated import moe

    buffer = moe.LowLatencyBuffer(moe.LocalGroup(1)[0], 2, 128, 2, topk=1)
    x, choices, weights = (
        torch.randn(2, 128).bfloat16(),
        torch.tensor([[1], [0]]),
        torch.ones(2, 1),
    )
    got = buffer.dispatch(x, choices)
    out = buffer.combine(got.recv_x, choices, weights, got.handle).out
    return None if torch.equal(out, x) else "the rows that come back are others"


def counts_are_added() -> str | None:
    """Counts of rows are added to `stats`, and int32 ids serve as well as int64."""
    case = Case(ranks=1, local=2, topk=1, counts=(3,), routing="random")
    (buffer,) = case.buffers(kernels(FOLDER), **SHORT)
    (mine,) = case.tokens(0)
    stats = torch.tensor([5, 7], dtype=torch.int32)
    got = buffer.dispatch(mine.x, mine.topk_idx.int(), stats=stats)
    wanted = [5 + int((mine.topk_idx == 0).sum()), 7 + int((mine.topk_idx == 1).sum())]
    if stats.tolist() != wanted or got.handle.src_info[0, 0] >= 3:
        return f"stats are {stats.tolist()}, not {wanted}"
    return None


def far_rows() -> str | None:
    """Rows more than 2 GiB into a buffer are where they belong."""
    case = Case(ranks=1, local=40, topk=1, max_tokens=4096, hidden=7168, routing="one_expert")
    group = LocalGroup(1)
    buffer = case.buffer(group[0], kernels(FOLDER), **SHORT)
    x = torch.randn(2, 7168).bfloat16()
    choices = torch.full((2, 1), 39)
    got = buffer.dispatch(x, choices)
    if not torch.equal(got.recv_x[39, :2], x):
        return "dispatch"
    got = buffer.combine(got.recv_x, choices, torch.ones(2, 1), got.handle)
    return None if torch.equal(got.out, x) else "combine"


def misuse() -> dict[str, str | None]:
    """Return for each misuse what is wrong with the error that it gives."""
    case = Case(ranks=1, local=2, topk=2, max_tokens=4, counts=(2,))
    other = Case(ranks=1, local=2, topk=2, max_tokens=4)
    (buffer,) = case.buffers(kernels(FOLDER), debug=True, **SHORT)
    (foreign,) = other.buffers(kernels(FOLDER), **SHORT)
    (one,) = case.buffers(kernels(FOLDER, BUFFERING="acknowledged"), **SHORT)
    (mine,) = case.tokens(0)
    x, ids, weights = mine.x, mine.topk_idx, mine.topk_weights

    def got(of=buffer):
        return of.dispatch(x, ids)

    def use_an_old_view() -> None:
        handle = got().handle
        view = buffer.get_next_combine_buffer(handle)
        got()
        buffer.combine(view, ids, weights, handle, zero_copy=True)

    def send_before_receiving() -> None:
        hook = buffer.dispatch(x, ids, hook=True).hook
        try:
            got()
        finally:
            hook()

    def call_a_hook_twice() -> None:
        hook = buffer.dispatch(x, ids, hook=True).hook
        hook()
        hook()

    def take_a_view_after_a_combine() -> None:
        first = got(one)
        one.combine(first.recv_x, ids, weights, first.handle)
        one.get_next_combine_buffer(first.handle)

    def differ() -> None:
        group = LocalGroup(2)
        Case(max_tokens=4).buffer(group[0], kernels(FOLDER))
        Case(max_tokens=5).buffer(group[1], kernels(FOLDER))

    def combine_with(**changed: object) -> None:
        first = got()
        arguments = {"x": first.recv_x, "topk_idx": ids, "topk_weights": weights}
        buffer.combine(**(arguments | {"handle": first.handle} | changed))

    tries: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
        "a foreign handle": (
            lambda: combine_with(handle=got(foreign).handle),
            *(MisuseError, "another buffer"),
        ),
        "an old view": (use_an_old_view, MisuseError, "other buffer"),
        "a send before a receive": (send_before_receiving, MisuseError, "call its hook first"),
        "a hook twice": (call_a_hook_twice, MisuseError, "called already"),
        "a view of one buffer": (take_a_view_after_a_combine, MisuseError, "after a dispatch"),
        "different shapes": (differ, MisuseError, "max_tokens=5"),
        "an id out of range": (
            lambda: buffer.dispatch(x, ids + 2),
            *(ValueError, "experts from 0 to 1"),
        ),
        "too many tokens": (
            lambda: buffer.dispatch(x.repeat(3, 1), ids.repeat(3, 1)),
            *(ValueError, "at most 4 tokens, but got 6"),
        ),
        "float32 rows": (lambda: buffer.dispatch(x.float(), ids), ValueError, "be bfloat16"),
        "other choices": (
            lambda: combine_with(topk_idx=ids[:1]),
            *(ValueError, "shape [2, 2], but got [1, 2]"),
        ),
        "rows that are not contiguous": (
            lambda: buffer.dispatch(x.T.contiguous().T, ids),
            *(ValueError, "contiguous"),
        ),
        "a mask of oneself": (lambda: buffer.mask(0), ValueError, "other than 0"),
        "hidden of 100": (
            lambda: Case(ranks=1, hidden=100).buffer(LocalGroup(1)[0], None),
            *(ValueError, "multiple of 128, but got 100"),
        ),
        "no time": (
            lambda: case.buffer(LocalGroup(1)[0], kernels(FOLDER), timeout_s=0.0),
            *(ValueError, "timeout_s"),
        ),
    }
    return {f"misuse: {name}": _error_fault(*tried) for name, tried in tries.items()}


def _error_fault(call: Callable[[], object], kind: type[Exception], words: str) -> str | None:
    try:
        call()
    except kind as error:
        return None if words in str(error) else f"says {error}"
    return "no error"


SITUATIONS = (
    *(timeout_and_reset, timeout_of_a_send, masked_rank, two_layers, frozen_package_serves),
    *(counts_are_added, early_receive, early_receive_of_rows_once_per_rank, out_of_step),
)


def local() -> dict[str, str | None]:
    """Return the faults by name; those of mutants must not be None."""
    report = misuse()
    for (name, case), variant in zip(CASES.items(), itertools.cycle(VARIANTS), strict=False):
        report[f"{name}: {variant}"] = faults_of(case, variant, 2 if case.ranks < 4 else 1)
    for situation in SITUATIONS:
        report[situation.__name__.replace("_", " ")] = situation()
    return report | {f"mutant: {name}": play() for name, play in MUTANTS.items()}


def wide() -> dict[str, str | None]:
    """Return the faults of the whole grid."""
    return {"far rows": far_rows()} | {
        f"{case}: {variant}": faults_of(case, variant, 4)
        for case, variant in zip(WIDE, itertools.cycle(VARIANTS), strict=False)
    }


def rank(number: int, ranks: int, rounds: int, store: str) -> dict[str, str | None]:
    """Play rounds with other processes, at random times and without a barrier between them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=ranks)
    case = Case(ranks=ranks, local=2, topk=2, max_tokens=3)
    delays = random.Random(number)
    report: dict[str, str | None] = {}
    few = rounds < 4  # the others differ in what one process sees as well
    variants = ["push", "sums", "acknowledged"] if few else list(VARIANTS)
    for variant in variants:
        buffer = case.buffer(dist.group.WORLD, kernels(FOLDER, **VARIANTS[variant]), timeout_s=20)
        report[variant] = _play_as(case, buffer, number, delays, rounds)
        dist.barrier()
    buffer = case.buffer(dist.group.WORLD, kernels(FOLDER), timeout_s=1)
    with _OneBuffer(), unhurt():
        report["mutant"] = _dispatch_as(case, buffer, number, delays, 12)
    buffer.reset()
    report["dead peer"] = _survive(case, buffer, number)
    report["contenders"] = _contenders(case, buffer, number)
    dist.destroy_process_group()
    return report


def _play_as(
    case: Case, buffer: LowLatencyBuffer, rank: int, delays: random.Random, rounds: int
) -> str | None:
    """Return the first fault of a rank in some pairs of rounds; it plays on after one."""
    faults = []
    for number in range(rounds):
        fp8, zero_copy = number % 2 == 1, number % 4 in (1, 2)
        tokens = case.tokens(number)
        mine = tokens[rank]
        time.sleep(delays.choice((0, 0, 0.05)))
        weights = mine.topk_weights if number % 3 else None
        got = buffer.dispatch(mine.x, mine.topk_idx, weights, fp8=fp8)
        faults.append(dispatch_fault(case, tokens, rank, got, fp8))
        rows = expert_output(case, got, rank)
        if zero_copy:
            rows = buffer.get_next_combine_buffer(got.handle).copy_(rows)
        time.sleep(delays.choice((0, 0, 0.05)))
        arguments = (rows, mine.topk_idx, mine.topk_weights, got.handle)
        out = buffer.combine(*arguments, zero_copy=zero_copy).out
        faults.append(combine_fault(case, mine, out, rank, fp8))
    return next(filter(None, faults), None)


def _dispatch_as(
    case: Case, buffer: LowLatencyBuffer, rank: int, delays: random.Random, rounds: int
) -> str | None:
    """Return the first fault of a rank in some dispatches."""
    faults = []
    for number in range(rounds):
        tokens = case.tokens(number)
        time.sleep(delays.choice((0, 0, 0.05)))
        got = buffer.dispatch(tokens[rank].x, tokens[rank].topk_idx)
        faults.append(dispatch_fault(case, tokens, rank, got, False))
    return next(filter(None, faults), None)


def _survive(case: Case, buffer: LowLatencyBuffer, rank: int) -> str | None:
    """Rank 0 misses a round; the others say so, and all play on after a reset."""
    mine = case.tokens(0)[rank]
    if rank:
        try:
            buffer.dispatch(mine.x, mine.topk_idx)
        except PeerTimeout as error:
            if (error.rank, error.phase, error.round) != (0, "receive", 0):
                return f"{error}"
        else:
            return "no timeout"
    buffer.reset()
    return _play_as(case, buffer, rank, random.Random(rank), 2)


def _contenders(case: Case, buffer: LowLatencyBuffer, rank: int) -> str | None:
    """Let what is timed beside the buffer send the same tokens there and back."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from moe_contenders import AllGather, AllToAll, Load, Ours

    case = dataclasses.replace(case, counts=(case.max_tokens,) * case.ranks, routing="random")
    mine = case.tokens(9)[rank]
    wanted = mine.x.float() * mine.topk_weights.sum(dim=1, keepdim=True)
    load = Load(mine.x, mine.topk_idx, mine.topk_weights, case.experts, fp8=False)
    for contender in (
        *(AllToAll(load), AllGather(load), Ours("tuner", buffer, load, zero_copy=True)),
    ):
        contender.dispatch()
        if hasattr(contender, "fill"):
            contender.fill()
        out = contender.combine().float()
        if not torch.allclose(out, wanted, rtol=2**-6, atol=2**-4):
            return f"{contender.label}: {(out - wanted).abs().max()}"
    return None


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    if name == "rank":
        found = rank(*map(int, arguments[:3]), arguments[3])
    else:
        found = {"local": local, "wide": wide}[name]()
    print(json.dumps(found))
