"""Tokens to the ranks of their experts, packed by expert; every element must be exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

RIVAL = "torch.index_select"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"RANKS": 1, "TOKENS": 1, "GROUPS": 1, "CHANNELS": 128, "TOPK": 1, "EXPERTS": 1},
    {"RANKS": 2, "TOKENS": 5, "GROUPS": 3, "CHANNELS": 128, "TOPK": 2, "EXPERTS": 4},
    {"RANKS": 3, "TOKENS": 2, "GROUPS": 1, "CHANNELS": 128, "TOPK": 5, "EXPERTS": 3},
    {"RANKS": 2, "TOKENS": 0, "GROUPS": 2, "CHANNELS": 128, "TOPK": 3, "EXPERTS": 2},
)

LARGEST = 448.0
"""The largest value of e4m3, which the largest of 128 channels is scaled to."""


def inputs(
    dims: Mapping[str, int],
    flags: Mapping[str, object],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return rows, choices of which some name nobody or somebody twice, and counts."""
    del flags
    device, shape = generator.device, [dims[name] for name in ("RANKS", "TOKENS")]
    x = torch.randn((*shape, dims["GROUPS"], dims["CHANNELS"]), generator=generator, device=device)
    scores = torch.rand((*shape, dims["EXPERTS"]), generator=generator, device=device)
    choices = scores.argsort(dim=-1).repeat(1, 1, dims["TOPK"])[..., : dims["TOPK"]]
    absent = torch.rand(choices.shape, generator=generator, device=device) < 0.05
    choices = choices.masked_fill(absent, -1)
    choices[:, 1::16] = choices[:, 1::16, :1]
    stats = torch.arange(dims["EXPERTS"], dtype=torch.int32, device=device)
    # sums of these are exact
    weights = torch.randint(-512, 512, choices.shape, generator=generator, device=device) / 64
    return {"x": x.to(dtype), "topk_idx": choices, "topk_weights": weights, "stats": stats}


def reference(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, stats: Tensor, fp8: bool
) -> dict[str, Tensor]:
    """Return the packed rows, rank 0's first; what nothing is written to is NaN or -1.

    Args:
        x: [ranks, tokens, groups, channels] float64.
        topk_idx: [ranks, tokens, topk] experts, or -1.
        topk_weights: [ranks, tokens, topk] float64.
        stats: [experts] rows that each expert has had before.
        fp8: Whether rows are rounded to e4m3, with one scale for the channels of a group.
    """
    ranks, tokens, groups, channels = x.shape
    experts, topk, device = stats.shape[0], topk_idx.shape[2], x.device
    index = topk_idx.where(topk_idx >= 0, experts)
    first = torch.full((ranks, tokens, experts + 1), topk, device=device)
    for choice in reversed(range(topk)):
        first.scatter_(2, index[..., choice : choice + 1], choice)
    named = (first[..., :experts] < topk).long()
    slots = named.cumsum(dim=1) - named  # [ranks, tokens, experts]
    count = named.sum(dim=1)  # [ranks, experts]
    begin = count.cumsum(dim=0) - count
    rank, token, expert = named.nonzero(as_tuple=True)
    row = begin[rank, expert] + slots[rank, token, expert]
    source = torch.full((experts, ranks * tokens), -1, device=device)
    source[expert, row] = token * topk + first[rank, token, expert]
    packed = torch.full((*source.shape, groups, channels), torch.nan, dtype=x.dtype, device=device)
    packed[expert, row] = x[rank, token]
    quantised, scales = quantise(packed)
    nothing = torch.full_like(packed, torch.nan)
    split = (experts, ranks, tokens)
    own_slots = slots.gather(2, topk_idx.clamp_min(0)).where(topk_idx >= 0, -1)
    local = experts // ranks
    arrival = (expert // local, rank, token, first[rank, token, expert])
    places = torch.full((ranks, ranks, tokens, topk), -1, device=device)
    places[arrival] = expert % local * (ranks * tokens) + row
    weights = torch.full(places.shape, torch.nan, dtype=x.dtype, device=device)
    same = topk_idx[rank, token] == expert[:, None]  # who is named twice has both weights
    weights[arrival] = topk_weights[rank, token].where(same, 0.0).sum(dim=1)
    return {
        "rows": (nothing if fp8 else packed).view(*split, groups, channels),
        "rows_fp8": (quantised if fp8 else nothing).view(*split, groups, channels),
        "scales": (scales if fp8 else nothing[..., 0]).reshape(*split, groups),
        "source": source.view(split),
        "ranges": (begin * 2**32 + count).T,
        "totals": stats + count.sum(dim=0),
        "counts": count.sum(dim=0),
        "slots": own_slots,
        "places": places,
        "weights": weights,
        "tokens": torch.full((ranks, ranks), tokens, device=device),
    }


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [..., channels] as e4m3 holds them, and the scales [...], both as float64.

    Every step is rounded to float32, as a kernel's is.
    """
    single = x.float()
    largest = single.abs().amax(dim=-1, keepdim=True).clamp_min(1e-4)
    factor = torch.full_like(largest, LARGEST) / largest
    values = (single * factor).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    scales = largest * torch.tensor(1 / LARGEST, dtype=torch.float32, device=x.device)
    return values.double(), scales.double()[..., 0]


def rival(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, stats: Tensor, fp8: bool
) -> Callable[[], object] | None:
    """Return the copy of the rows alone, sorted before; there is none that rounds them."""
    del topk_weights, stats
    if fp8:
        return None
    rank, token, choice = (topk_idx >= 0).nonzero(as_tuple=True)
    order = topk_idx[rank, token, choice].argsort(stable=True)
    rows = (rank * x.shape[1] + token)[order]
    tokens = x.flatten(0, 1)
    return lambda: torch.index_select(tokens, 0, rows)


def share(
    open_buffer: Callable[..., Any],
    rank: int,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any],
) -> Callable[[], dict[str, Tensor]]:
    """Return the call that plays one rank's part, and returns its share of the outputs.

    Args:
        open_buffer: Returns a `LowLatencyBuffer` for max_tokens, hidden, experts and topk.
        rank: The rank.
        inputs: All ranks' inputs, as `inputs` makes them.
        options: Value of every flag.
    """
    x, choices = inputs["x"][rank].flatten(1), inputs["topk_idx"][rank].contiguous()
    weights = inputs["topk_weights"][rank].contiguous()
    experts, fp8 = inputs["stats"].shape[0], bool(options["fp8"])
    buffer = open_buffer(*x.shape, experts, topk=choices.shape[1])

    def play() -> dict[str, Tensor]:
        got = buffer.dispatch(x, choices, weights, fp8=fp8)
        handle = got.handle
        places, arrived, tokens = handle.arrived
        outputs = {"counts": got.recv_count, "rows_fp8" if fp8 else "rows": got.recv_x}
        outputs |= {"source": handle.source, "ranges": handle.layout_range}
        outputs |= {"places": places, "weights": arrived, "tokens": tokens}
        return outputs | ({"scales": got.scales} if fp8 else {})

    return play


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return zeros: rows are copied, and what is rounded is rounded in steps that are exact."""
    del dims, flags, dtype
    return {"rtol": 0.0, "atol": 0.0}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return no operations and the bytes of the rows, read once and written once per choice."""
    tokens, hidden = dims["RANKS"] * dims["TOKENS"], dims["GROUPS"] * dims["CHANNELS"]
    written = hidden + 4 * dims["GROUPS"] if flags["fp8"] else hidden * itemsize
    return 0.0, float(tokens * (hidden * itemsize + dims["TOPK"] * written))
