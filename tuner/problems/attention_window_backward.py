"""Gradients of attention whose queries see a window of keys, against torch's with a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

RIVAL = "torch scaled_dot_product_attention backward with a mask"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"B": 1, "H": 1, "S": 1, "D": 1, "KV": 1, "T": 1},
    {"B": 2, "H": 2, "S": 1, "D": 64, "KV": 2, "T": 7},
    {"B": 2, "H": 3, "S": 13, "D": 37, "KV": 1, "T": 5},
    {"B": 1, "H": 4, "S": 129, "D": 80, "KV": 2, "T": 130},
    {"B": 1, "H": 1, "S": 3, "D": 8, "KV": 1, "T": 0},
    {"B": 1, "H": 1, "S": 0, "D": 8, "KV": 1, "T": 3},
)

_BOTH = (False, True)
_WINDOWS = ((-1, -1), (0, 0), (63, 0), (-1, 17), (64, 64), (100, -1), (1000, 1000))

SUITE: tuple[dict[str, tuple[Any, ...]], ...] = (
    {
        "B": (1,),
        "H KV": ((2, 2), (4, 1)),
        "S T": ((128, 128), (257, 257), (113, 203), (203, 113), (1, 300), (300, 1)),
        "D": (64, 128),
        "causal": _BOTH,
        "window_left window_right": _WINDOWS,
    },
    {
        "B": (2,),
        "H KV": ((4, 2),),
        "S T": ((300, 300), (77, 300)),
        "D": (8, 72, 96, 256),
        "causal": _BOTH,
        "window_left window_right": ((31, 0), (40, 9)),
        "misaligned deterministic": ((False, True), (True, False)),
    },
    {
        "B": (1,),
        "H KV": ((2, 1),),
        "S T": ((96, 96), (70, 200)),
        "D": (64,),
        "causal": _BOTH,
        "window_left window_right": ((31, 0), (40, 9)),
        "scale": (-1.0, 0.0, 0.25, 1.7),
    },
)


def inputs(
    dims: Mapping[str, int],
    flags: Mapping[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    **options: float,
) -> dict[str, Tensor]:
    """Return normal q, k, v and do, with the o and lse that belong to them.

    Args:
        dims: Extent of every dim.
        flags: Value of every flag.
        dtype: Element type.
        generator: Source of randomness, on the device of the tensors.
        **options: `scale`, factor of the scores.
    """
    batch, heads, queries, width = (dims[name] for name in ("B", "H", "S", "D"))
    shapes = {"q": (heads, queries), "k": (dims["KV"], dims["T"]), "v": (dims["KV"], dims["T"])}
    drawn = {
        name: torch.randn(
            (batch, *shape, width), dtype=dtype, device=generator.device, generator=generator
        )
        for name, shape in {**shapes, "do": shapes["q"]}.items()
    }
    scale = options.get("scale", width**-0.5)
    q, k, v = (drawn[name].double() for name in ("q", "k", "v"))
    o, lse = q.clone(), q.new_empty(q.shape[:3])
    hidden = _hidden(q, k, flags["causal"], flags["window_left"], flags["window_right"])
    for here, there in _heads(q, k):
        scores = (scale * q[here] @ k[there].mT).masked_fill_(hidden, -torch.inf)
        lse[here] = scores.logsumexp(dim=-1)
        o[here] = (scores - lse[here][:, None]).exp_().masked_fill_(hidden, 0.0) @ v[there]
    return {**drawn, "o": o.to(dtype), "lse": lse.float()}


def reference(  # noqa: PLR0913 - one for each argument of the kernel
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
) -> dict[str, Tensor]:
    """Return the gradients of q, k and v, head by head.

    Args:
        q: [B, H, S, D] float64.
        k: [B, KV, T, D] float64.
        v: [B, KV, T, D] float64.
        o: [B, H, S, D] float64, the output.
        lse: [B, H, S] float64, the log-sum-exp of each row of scores.
        do: [B, H, S, D] float64, the gradient of the output.
        causal: Whether query i sees only the keys j <= i + T - S.
        window_left: It sees only the keys j >= i + T - S - window_left, unless that is -1.
        window_right: It sees only the keys j <= i + T - S + window_right, unless that is -1.
        scale: Factor of the scores.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    hidden = _hidden(q, k, causal, window_left, window_right)
    for here, there in _heads(q, k):
        scores = scale * q[here] @ k[there].mT
        p = (scores - lse[here][:, None]).exp_().masked_fill_(hidden, 0.0)
        delta = (do[here] * o[here]).sum(dim=-1, keepdim=True)
        ds = scale * p * (do[here] @ v[there].mT - delta)
        dq[here] = ds @ k[there]
        dk[there] += ds.mT @ q[here]
        dv[there] += p.mT @ do[here]
    return {"dq": dq, "dk": dk, "dv": dv}


def _heads(q: Tensor, k: Tensor) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield each batch and head of q [B, H, S, D], and the batch and head of k that it reads."""
    group = q.shape[1] // k.shape[1]
    for batch, head in product(range(q.shape[0]), range(q.shape[1])):
        yield (batch, head), (batch, head // group)


def _hidden(q: Tensor, k: Tensor, causal: bool, left: int, right: int) -> Tensor:
    """Return which keys each query does not see, [S, T]."""
    queries, keys = q.shape[2], k.shape[2]
    own = torch.arange(keys - queries, keys, device=q.device)[:, None]
    distance = torch.arange(keys, device=q.device) - own
    left = queries + keys if left < 0 else left
    right = 0 if causal else queries + keys if right < 0 else right
    return (distance < -left) | (distance > right)


def rival(  # noqa: PLR0913 - one for each argument of the kernel
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
) -> Callable[[], object]:
    """Return torch's backward pass; the mask is made beforehand. It allocates the gradients."""
    del o, lse  # torch keeps its own
    seen = ~_hidden(q, k, causal, window_left, window_right)
    grouped = q.shape[1] != k.shape[1]
    sources = q, k, v = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped
    )
    return lambda: torch.autograd.grad(output, sources, do, retain_graph=True)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str, **options: float
) -> dict[str, float]:
    """Return bounds for standard normal inputs, and scores and sums kept in float32.

    An element of dP is a sum of D products. P and dS rounded to `dtype` err in proportion to the
    size of a gradient, which is that of a mean of as many values as the query sees; dk and dv
    gather from all queries of a group of heads that see a key. A larger `scale` gives larger
    scores.
    """
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    counts = [count for count in seen_keys(dims, flags) if count]
    fewest, pairs = min(counts, default=1), dims["H"] // dims["KV"] * len(counts)
    gathered = max(1.0, sqrt(pairs / max(1, dims["T"])))
    default = dims["D"] ** -0.5
    gathered *= max(1.0, abs(options.get("scale", default)) / default)
    elements = dims["B"] * dims["D"] * max(dims["H"] * dims["S"], dims["KV"] * dims["T"])
    # of so many errors; sums of few products are often far from their mean
    tail = sqrt(2 * log(max(elements, 1 << 16))) * (1.0 + 20.0 / (dims["D"] + 4))
    weights = 0.53 * tail * min(1.0, sqrt(3 / fewest)) * result.eps
    return {
        "rtol": result.eps + 16 * single.eps,
        "atol": gathered * ((48 + 3 * sqrt(dims["D"])) * single.eps + weights),
    }


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return 10 D operations for each pair of query and key, and the bytes of all tensors."""
    batch, heads, queries, width = (dims[name] for name in ("B", "H", "S", "D"))
    rows, keys = batch * heads * queries, batch * dims["KV"] * dims["T"]
    return 10.0 * batch * heads * sum(seen_keys(dims, flags)) * width, float(
        itemsize * width * 4 * (rows + keys) + 4 * rows
    )


def seen_keys(dims: Mapping[str, int], flags: Mapping[str, Any]) -> list[int]:
    """Return how many keys each query of a head sees."""
    queries, keys = dims["S"], dims["T"]
    left = flags["window_left"]
    right = 0 if flags["causal"] else flags["window_right"]
    return [
        max(
            0,
            min(keys - 1, own + right if right >= 0 else keys)
            - max(0, own - left if left >= 0 else 0)
            + 1,
        )
        for own in range(keys - queries, keys)
    ]
