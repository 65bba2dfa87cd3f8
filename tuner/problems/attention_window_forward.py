"""Attention whose queries see a window of keys, against torch's with a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

RIVAL = "torch scaled_dot_product_attention with a mask"

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
        "misaligned": _BOTH,
    },
)


def reference(  # noqa: PLR0913 - one for each argument of the kernel
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
) -> dict[str, Tensor]:
    """Return the outputs and the log-sum-exp of each row of scores, head by head.

    A query that sees no key gets the output 0 and the log-sum-exp -inf.

    Args:
        q: [B, H, S, D] float64.
        k: [B, KV, T, D] float64.
        v: [B, KV, T, D] float64.
        causal: Whether query i sees only the keys j <= i + T - S.
        window_left: It sees only the keys j >= i + T - S - window_left, unless that is -1.
        window_right: It sees only the keys j <= i + T - S + window_right, unless that is -1.
        scale: Factor of the scores.
    """
    group = q.shape[1] // k.shape[1]
    o, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    hidden = _hidden(q, k, causal, window_left, window_right)
    sees = ~hidden.all(dim=-1)
    for batch, head in product(range(q.shape[0]), range(q.shape[1])):
        scores = scale * q[batch, head] @ k[batch, head // group].mT
        scores = scores.masked_fill_(hidden, -torch.inf)[sees]
        o[batch, head, sees] = scores.softmax(dim=-1) @ v[batch, head // group]
        lse[batch, head, sees] = scores.logsumexp(dim=-1)
    return {"o": o, "lse": lse}


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
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
) -> Callable[[], object]:
    """Return torch's operation; its mask is made beforehand. It allocates its output."""
    seen = ~_hidden(q, k, causal, window_left, window_right)
    grouped = q.shape[1] != k.shape[1]
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped
    )


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str
) -> dict[str, float]:
    """Return bounds for standard normal inputs, and scores and sums kept in float32.

    A score is off by about sqrt(D) roundings to float32, and so is its exponential. Weights
    rounded to `dtype` err in proportion to the size of an output, a mean of as many values as the
    query sees.
    """
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    fewest = min(filter(None, seen_keys(dims, flags)), default=1)
    elements = dims["B"] * dims["H"] * dims["S"] * dims["D"]
    tail = sqrt(2 * log(max(elements, 1 << 16)))  # of so many errors
    weights = 0.32 * tail * min(1.0, sqrt(3 / fewest)) * result.eps
    return {
        "rtol": result.eps + 8 * single.eps,
        "atol": (16 + sqrt(dims["D"])) * single.eps + weights,
    }


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return 4 D operations for each pair of query and key, and the bytes of all tensors."""
    batch, heads, queries, width = (dims[name] for name in ("B", "H", "S", "D"))
    rows, keys = batch * heads * queries, batch * dims["KV"] * dims["T"]
    return 4.0 * batch * heads * sum(seen_keys(dims, flags)) * width, float(
        itemsize * width * 2 * (rows + keys) + 4 * rows
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
