"""Ranks that exchange tokens, what they must get, and what they got instead.

Imported by children whose environment lets Triton interpret kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tuner.catalog import Catalog
from tuner.records import Candidate
from tuner.render import Renderer
from tuner.runtime.moe import Kernels, LocalGroup, LowLatencyBuffer
from tuner.runtime.moe.results import Dispatched

DISPATCH = {
    **{"BUFFERING": "double", "COPIES": "expert", "MESSAGE": "apart", "SLOTS": "scan"},
    **{"SCAN_TOKENS": 32, "CONVERSION": "integer", "SIGNAL": "add", "AWAIT": "programs"},
    **{"STORE": "plain", "SEND_PROGRAMS": 2, "SEND_WARPS": 4, "RECEIVE_SPLIT": 1},
    **{"RECEIVE_TILE": 512, "RECEIVE_WARPS": 4},
}
COMBINE = {
    **{"BUFFERING": "double", "COPY": "push", "SIGNAL": "add", "AWAIT": "programs"},
    **{"STORE": "plain", "SEND_SPLIT": 1, "SEND_TILE": 512, "SEND_WARPS": 4},
    **{"RECEIVE_PROGRAMS": 2, "RECEIVE_TILE": 256, "RECEIVE_WARPS": 4, "UNROLL": True},
}
SHAPED = {"dispatch": DISPATCH, "combine": COMBINE}


def kernels(folder: Path, changes: tuple[tuple[str, str], ...] = (), **choices: object) -> Kernels:
    """Return kernels for the interpreter.

    Args:
        folder: Where the rendered files go.
        changes: Texts in the rendered files and what takes their place: mutations.
        choices: Parameters that differ, of both templates where both have them.
    """
    paths = []
    for name, defaults in SHAPED.items():
        parameters = {key: choices.get(key, value) for key, value in defaults.items()}
        candidate = Candidate.of("triton", parameters)
        source = Renderer(Catalog().template_folders).render(f"moe_{name}", "triton", candidate)
        text = source.text
        for old, new in changes:
            text = text.replace(old, new)
        path = folder / f"{name}_{source.sha256[:8]}_{abs(hash(text))}.py"
        path.write_text(text)
        paths.append(path)
    return Kernels.load((paths[0], paths[0]), (paths[1], paths[1]))


@dataclass
class Tokens:
    """One rank's tokens of a round: [tokens, hidden], [tokens, topk], [tokens, topk]."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class Case:
    """A shape, and how tokens choose.

    Attributes:
        counts: Number of tokens of each rank; None draws them anew in every round.
        routing: ``"random"``, ``"one_expert"``, ``"nobody"``, ``"twice"`` or ``"some_nobody"``.
    """

    ranks: int = 2
    local: int = 2
    topk: int = 2
    max_tokens: int = 4
    hidden: int = 128
    counts: tuple[int, ...] | None = None
    routing: str = "some_nobody"

    @property
    def experts(self) -> int:
        return self.ranks * self.local

    def tokens(self, seed: int) -> list[Tokens]:
        """Return the tokens of all ranks in a round."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, self.max_tokens + 1, (self.ranks,), generator=generator)
        counts = self.counts or [int(count) for count in drawn]
        return [self._of_rank(count, generator) for count in counts]

    def _of_rank(self, count: int, generator: torch.Generator) -> Tokens:
        shape = (count, self.topk)
        choices = torch.rand((count, self.experts), generator=generator).argsort(dim=1)
        choices = choices.repeat(1, self.topk)[:, : self.topk].contiguous()
        match self.routing:
            case "one_expert":
                choices = torch.full(shape, self.experts - 1)
            case "nobody":
                choices = torch.full(shape, -1)
            case "twice":
                choices = choices[:, :1].expand(shape).contiguous()
            case "some_nobody":
                choices = choices.masked_fill(torch.rand(shape, generator=generator) < 0.2, -1)
                choices[1:2] = -1
        weights = torch.randn(shape, generator=generator)
        weights[torch.rand(shape, generator=generator) < 0.1] = 0.0
        x = torch.randn((count, self.hidden), generator=generator)
        return Tokens(x.bfloat16(), choices, weights)

    def buffers(self, kernels: Kernels | None, **options: object) -> list[LowLatencyBuffer]:
        """Return the buffers of simulated ranks, with dirty memory."""
        group = LocalGroup(self.ranks)
        buffers = [self.buffer(group[rank], kernels, **options) for rank in range(self.ranks)]
        for memory in group.memories:
            memory[3 * 4096 :] = 255  # NaN: what is read before it is written shows
        return buffers

    def buffer(self, group, kernels: Kernels | None, **options: object) -> LowLatencyBuffer:
        shape = (self.max_tokens, self.hidden, self.experts)
        return LowLatencyBuffer(group, *shape, topk=self.topk, kernels=kernels, **options)


def expert_rows(case: Case, tokens: Sequence[Tokens], rank: int) -> Iterator[tuple[int, list]]:
    """Yield a rank's local experts with what each must get: (source rank, token, choice)."""
    for local in range(case.local):
        expert = rank * case.local + local
        rows = []
        for source, of_rank in enumerate(tokens):
            for token, choices in enumerate(of_rank.topk_idx.tolist()):
                if expert in choices:
                    rows.append((source, token, choices.index(expert)))
        yield local, rows


def dispatch_fault(
    case: Case, tokens: Sequence[Tokens], rank: int, got: Dispatched, fp8: bool
) -> str | None:
    """Return what is wrong with what a rank got from a dispatch."""
    for local, rows in expert_rows(case, tokens, rank):
        where = f"rank {rank}, expert {local}"
        if int(got.recv_count[local]) != len(rows):
            return f"{where}: {int(got.recv_count[local])} rows, not {len(rows)}"
        begin = 0
        for source in range(case.ranks):
            count = sum(row[0] == source for row in rows)
            packed = int(got.handle.layout_range[local, source])
            if (packed >> 32, packed & 0xFFFFFFFF) != (begin, count):
                return f"{where}: the range of rank {source} is {packed:x}"
            begin += count
        for row, (source, token, choice) in enumerate(rows):
            if int(got.handle.source[local, row]) != token * case.topk + choice:
                return f"{where}: row {row} says {int(got.handle.source[local, row])}"
            wanted, scales = tokens[source].x[token], None
            if fp8:
                wanted, scales = quantise(wanted)
            if not torch.equal(bytes_of(got.recv_x[local, row]), bytes_of(wanted)):
                return f"{where}: row {row} is not token {token} of rank {source}"
            if scales is not None and not torch.equal(got.scales[local, row], scales):
                return f"{where}: the scales of row {row} differ"
    return None


def arrived_fault(case: Case, tokens: Sequence[Tokens], rank: int, got: Dispatched) -> str | None:
    """Return what is wrong with what a rank knows of the choices of all tokens."""
    places, weights, counts = got.handle.arrived
    if counts.tolist() != [len(of_rank.x) for of_rank in tokens]:
        return f"{counts.tolist()} tokens"
    wanted = torch.full(places.shape, -1, dtype=torch.int32)
    for local, rows in expert_rows(case, tokens, rank):
        for row, (source, token, choice) in enumerate(rows):
            place = local * case.ranks * case.max_tokens + row
            wanted[source, token, choice] = place
            same = tokens[source].topk_idx[token] == rank * case.local + local
            weight = tokens[source].topk_weights[token, same].sum()
            if not torch.allclose(weights[source, token, choice], weight, atol=1e-6):
                return f"token {token} of rank {source}: the weight of choice {choice}"
    for source, of_rank in enumerate(tokens):
        count = len(of_rank.x)
        if not torch.equal(places[source, :count], wanted[source, :count]):
            return f"the places of rank {source}'s choices are {places[source, :count].tolist()}"
    return None


def quantise(row: Tensor) -> tuple[Tensor, Tensor]:
    groups = row.float().view(-1, 128)
    largest = groups.abs().amax(dim=1, keepdim=True).clamp_min(1e-4)
    factor = torch.full_like(largest, 448.0) / largest
    values = (groups * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(-1), (largest * torch.tensor(1 / 448))[:, 0]


def bytes_of(row: Tensor) -> Tensor:
    return row.contiguous().view(torch.uint8)


def expert_output(case: Case, got: Dispatched, rank: int) -> Tensor:
    """Return what the experts make of their rows: multiplied by 1 + the expert's number."""
    rows = got.recv_x.float()
    if got.scales is not None:
        rows = (rows.view(*rows.shape[:2], -1, 128) * got.scales[..., None]).flatten(2)
    factors = 1 + rank * case.local + torch.arange(case.local)[:, None, None]
    return (rows * factors).bfloat16()


def combine_fault(case: Case, tokens: Tokens, out: Tensor, rank: int, fp8: bool) -> str | None:
    """Return what is wrong with a rank's sums, which are of `expert_output`."""
    x = tokens.x
    if fp8 and len(x):
        rounded = [quantise(row) for row in x]
        x = torch.stack([(q.float().view(-1, 128) * s[:, None]).flatten() for q, s in rounded])
    wanted, size = torch.zeros(x.shape), torch.zeros(x.shape)
    for choice in range(case.topk):
        expert = tokens.topk_idx[:, choice, None]
        row = (x.float() * (expert + 1)).bfloat16().float()
        term = (row * tokens.topk_weights[:, choice, None]).where(expert >= 0, 0.0)
        wanted += term
        size += term.abs()
    wrong = (out.float() - wanted).abs() > 2**-7 * wanted.abs() + 2**-20 * size
    if out.shape != wanted.shape or bool(wrong.any()) or bool(out.isnan().any()):
        return f"rank {rank}: {int(wrong.sum())} sums are wrong"
    return None


def play_round(
    case: Case,
    buffers: Sequence[LowLatencyBuffer],
    seed: int,
    *,
    fp8: bool = False,
    zero_copy: bool = False,
    weighted: bool = True,
) -> str | None:
    """Play a dispatch and a combine of simulated ranks; return the first fault."""
    tokens = case.tokens(seed)
    sent = [
        buffer.dispatch(
            *(mine.x, mine.topk_idx, mine.topk_weights if weighted else None),
            fp8=fp8,
            hook=True,
        )
        for buffer, mine in zip(buffers, tokens, strict=True)
    ]
    for rank, got in enumerate(sent):
        got.hook()
        if fault := dispatch_fault(case, tokens, rank, got, fp8):
            return f"dispatch, seed {seed}: {fault}"
        if weighted and (fault := arrived_fault(case, tokens, rank, got)):
            return f"dispatch, seed {seed}, rank {rank}: {fault}"
    combined = []
    for rank, (buffer, mine, got) in enumerate(zip(buffers, tokens, sent, strict=True)):
        rows = expert_output(case, got, rank)
        if zero_copy:
            view = buffer.get_next_combine_buffer(got.handle)
            for local, count in enumerate(got.recv_count.tolist()):
                view[local, :count] = rows[local, :count]
            rows = view
        combined.append(
            buffer.combine(
                *(rows, mine.topk_idx, mine.topk_weights, got.handle),
                zero_copy=zero_copy,
                hook=True,
            )
        )
    for rank, (mine, got) in enumerate(zip(tokens, combined, strict=True)):
        got.hook()
        if fault := combine_fault(case, mine, got.out, rank, fp8):
            return f"combine, seed {seed}: {fault}"
    return None
