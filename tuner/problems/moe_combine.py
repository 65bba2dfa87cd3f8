"""Weighted sums of the rows that experts made, on the ranks that the tokens came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

RIVAL = "torch.nn.functional.embedding_bag"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"RANKS": 1, "TOKENS": 1, "HIDDEN": 128, "TOPK": 1, "EXPERTS": 1},
    {"RANKS": 2, "TOKENS": 5, "HIDDEN": 384, "TOPK": 2, "EXPERTS": 4},
    {"RANKS": 3, "TOKENS": 2, "HIDDEN": 128, "TOPK": 5, "EXPERTS": 3},
    {"RANKS": 2, "TOKENS": 0, "HIDDEN": 256, "TOPK": 3, "EXPERTS": 2},
)


def inputs(
    dims: Mapping[str, int],
    flags: Mapping[str, object],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return rows, NaN where none arrived, with the choices that they arrived by."""
    del flags
    device, experts = generator.device, dims["EXPERTS"]
    ranks, tokens, topk = dims["RANKS"], dims["TOKENS"], dims["TOPK"]
    scores = torch.rand((ranks, tokens, experts), generator=generator, device=device)
    choices = scores.argsort(dim=-1).repeat(1, 1, topk)[..., :topk]
    absent = torch.rand(choices.shape, generator=generator, device=device) < 0.05
    choices = choices.masked_fill(absent, -1)
    choices[:, 1::16] = choices[:, 1::16, :1]
    source, ranges, slots, places = arrivals(choices, experts)
    split = (experts, ranks, tokens)
    x = torch.randn((experts, ranks * tokens, dims["HIDDEN"]), generator=generator, device=device)
    x = x.masked_fill((source < 0)[..., None], torch.nan)
    weights = torch.randn(choices.shape, generator=generator, device=device)
    same = choices[..., :, None] == choices[..., None, :]  # who is named twice has both weights
    summed = weights[..., None, :].where(same, 0.0).sum(dim=-1)
    return {
        "x": x.to(dtype).view(*split, dims["HIDDEN"]),
        "topk_idx": choices,
        "topk_weights": weights,
        "slots": slots.int(),
        "source": source.int().view(split),
        "ranges": ranges,
        "places": places.int(),
        "weights": summed.where(places >= 0, torch.nan),
        "tokens": torch.full((ranks, ranks), tokens, dtype=torch.int32, device=device),
    }


def arrivals(topk_idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what dispatch returns for choices [ranks, tokens, topk]: who comes where.

    Returns:
        source: [experts, ranks * tokens], token * topk + choice on its rank, or -1.
        ranges: [experts, ranks], the number of rows of a rank and, 32 bits higher, the first.
        slots: [ranks, tokens, topk], the number of a token among those of its rank.
        places: [ranks, ranks, tokens, topk], the row that each rank has for a choice, or -1.
    """
    ranks, tokens, topk = topk_idx.shape
    index = topk_idx.where(topk_idx >= 0, experts)
    shape = (ranks, tokens, experts + 1)
    first = torch.full(shape, topk, device=index.device)
    for choice in reversed(range(topk)):
        first.scatter_(2, index[..., choice : choice + 1], choice)
    first = first[..., :experts]
    named = (first < topk).long()
    slots = named.cumsum(dim=1) - named
    count = named.sum(dim=1)
    begin = count.cumsum(dim=0) - count
    rank, token, expert = named.nonzero(as_tuple=True)
    source = torch.full((experts, ranks * tokens), -1, device=index.device)
    row = begin[rank, expert] + slots[rank, token, expert]
    source[expert, row] = token * topk + first[rank, token, expert]
    places = torch.full((ranks, ranks, tokens, topk), -1, device=index.device)
    local = experts // ranks
    arrival = (expert // local, rank, token, first[rank, token, expert])
    places[arrival] = expert % local * (ranks * tokens) + row
    own = slots.gather(2, topk_idx.clamp_min(0)).where(topk_idx >= 0, -1)
    return source, (begin * 2**32 + count).T.contiguous(), own, places


def rows_of(topk_idx: Tensor, slots: Tensor, ranges: Tensor) -> Tensor:
    """Return the row [ranks, tokens, topk] among all experts' rows that each choice asks for."""
    ranks, tokens, _ = topk_idx.shape
    rank = torch.arange(ranks, device=topk_idx.device)[:, None, None]
    expert = topk_idx.clamp_min(0)
    return expert * (ranks * tokens) + (ranges[expert, rank] >> 32) + slots.clamp_min(0)


def reference(  # noqa: PLR0913 - one for each argument of the kernel
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    slots: Tensor,
    source: Tensor,
    ranges: Tensor,
    places: Tensor,
    weights: Tensor,
    tokens: Tensor,
    zero_copy: bool,
) -> dict[str, Tensor]:
    """Return the sums.

    Args:
        x: [experts, ranks, tokens, hidden] float64.
        topk_idx: [ranks, tokens, topk] experts, or -1.
        topk_weights: [ranks, tokens, topk] float64.
        slots: [ranks, tokens, topk], as dispatch returns them.
        source: [experts, ranks, tokens]; the ranges and slots tell as much.
        ranges: [experts, ranks], as dispatch returns them.
        places: [ranks, ranks, tokens, topk]; the ranges and slots tell as much.
        weights: [ranks, ranks, tokens, topk]; `topk_weights` tells as much.
        tokens: [ranks, ranks]; the shapes tell as much.
        zero_copy: Where x lies, which does not change the sums.
    """
    del source, places, weights, tokens, zero_copy
    rows = rows_of(topk_idx, slots, ranges)
    flat = x.flatten(0, 2)
    y = torch.zeros((*topk_idx.shape[:2], x.shape[3]), dtype=x.dtype, device=x.device)
    for choice in range(topk_idx.shape[2]):
        there = topk_idx[..., choice, None] >= 0
        term = topk_weights[..., choice, None] * flat[rows[..., choice]]
        y += term.where(there, 0.0)
    return {"y": y}


def rival(  # noqa: PLR0913 - one for each argument of the kernel
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    slots: Tensor,
    source: Tensor,
    ranges: Tensor,
    places: Tensor,
    weights: Tensor,
    tokens: Tensor,
    zero_copy: bool,
) -> Callable[[], object]:
    """Return torch's weighted sum of rows that need not be fetched; it allocates its result."""
    del source, places, tokens, zero_copy
    rows = rows_of(topk_idx, slots, ranges).flatten(0, 1)
    weights = topk_weights.masked_fill(topk_idx < 0, 0.0).flatten(0, 1).to(x.dtype)
    table = x.flatten(0, 2)
    return lambda: embedding_bag(rows, table, mode="sum", per_sample_weights=weights)


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
    experts, ranks, tokens, hidden = inputs["x"].shape
    local, zero_copy = experts // ranks, bool(options["zero_copy"])
    mine = slice(rank * local, (rank + 1) * local)
    x = inputs["x"][mine].flatten(1, 2)
    choices, weights, slots = (
        inputs[name][rank].contiguous() for name in ("topk_idx", "topk_weights", "slots")
    )
    buffer = open_buffer(tokens, hidden, experts, topk=choices.shape[1])
    arrived = tuple(inputs[name][rank] for name in ("places", "weights", "tokens"))
    source, ranges = inputs["source"][mine].flatten(1), inputs["ranges"][mine]
    handle = buffer.handle(slots, source, ranges, arrived)
    written: set[int] = set()

    def rows() -> Tensor:
        view: Tensor = buffer.get_next_combine_buffer(handle)
        if view.data_ptr() not in written:  # experts would have written it
            written.add(view.data_ptr())
            view.copy_(x)
        return view

    def play() -> dict[str, Tensor]:
        sent = rows() if zero_copy else x
        return {"y": buffer.combine(sent, choices, weights, handle, zero_copy=zero_copy).out}

    return play


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return one unit in the last place, and what sums of normal products in float32 lose."""
    del flags
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    return {"rtol": result.eps, "atol": 32 * dims["TOPK"] * single.eps}


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return two operations per element of the rows, and the bytes of the rows and of y."""
    del flags
    elements = dims["RANKS"] * dims["TOKENS"] * dims["HIDDEN"]
    return 2.0 * elements * dims["TOPK"], float(elements * (dims["TOPK"] + 1) * itemsize)
