"""Attention, O = softmax(scale * Q K^T) V, against torch's `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

RIVAL = "torch scaled_dot_product_attention"

_FEW = 1 << 16
"""Elements up to which the tail of their errors is taken as that of so many."""

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"B": 1, "H": 1, "S": 1, "D": 1, "KV": 1, "T": 1},
    {"B": 2, "H": 2, "S": 1, "D": 64, "KV": 2, "T": 7},
    {"B": 2, "H": 3, "S": 13, "D": 37, "KV": 1, "T": 5},
    {"B": 1, "H": 4, "S": 129, "D": 80, "KV": 2, "T": 130},
    {"B": 1, "H": 2, "S": 131, "D": 16, "KV": 2, "T": 67},
    {"B": 1, "H": 1, "S": 5, "D": 3, "KV": 1, "T": 1031},
    {"B": 1, "H": 1, "S": 3, "D": 8, "KV": 1, "T": 0},
    {"B": 1, "H": 1, "S": 0, "D": 8, "KV": 1, "T": 3},
    # more tiles than programs that stay on any card take at a time
    {"B": 1, "H": 150, "S": 130, "D": 16, "KV": 75, "T": 200},
    {"B": 2, "H": 75, "S": 150, "D": 16, "KV": 75, "T": 150},
)


_BOTH = (False, True)
_SQUARES = ((64, 64), (100, 100), (128, 128), (257, 257))
_OBLONGS = ((113, 203), (256, 128), (77, 300))
_ODD = ((1, 1), (1, 7), (1, 300), (7, 1), (300, 1), (13, 5), (5, 13), (127, 127), (129, 129))
_LONG = ((1, 8192), (33, 4096), (4096, 33), (700, 1500), (2, 20000))

# Products of what varies; S queries, T keys, H heads of which KV have keys of their own.
SUITE: tuple[dict[str, tuple[Any, ...]], ...] = (
    {
        "B": (1,),
        "H KV": ((2, 2), (4, 2), (4, 1)),
        "S T": _SQUARES + _OBLONGS,
        "D": (64, 96, 128, 256),
        "causal": _BOTH,
    },
    {
        "B": (1,),
        "H KV": ((2, 1),),
        "S T": ((65, 130), (130, 65)),
        "D": (1, 8, 16, 37, 40, 72, 80, 136, 160),
        "causal": _BOTH,
        "misaligned": _BOTH,
    },
    {"B": (2,), "H KV": ((2, 1),), "S T": _ODD, "D": (64, 128), "causal": _BOTH},
    {"B": (1,), "H KV": ((1, 1),), "S T": _LONG, "D": (64, 128), "causal": _BOTH},
    {
        "B": (2, 3),
        "H KV": ((8, 1), (6, 2), (8, 8), (5, 5)),
        "S T": ((50, 77),),
        "D": (64, 80),
        "causal": _BOTH,
        "deterministic": _BOTH,
    },
    {
        "B": (1,),
        "H KV": ((2, 2),),
        "S T": ((96, 96), (70, 200)),
        "D": (64, 128),
        "causal": _BOTH,
        "scale": (-1.0, 0.0, 0.25, 1.7, 4.0, 16.0),
    },
)


def reference(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> dict[str, Tensor]:
    """Return the outputs and the log-sum-exp of each row of scores, head by head.

    A query that sees no key gets the output 0 and the log-sum-exp -inf.

    Args:
        q: [B, H, S, D] float64.
        k: [B, KV, T, D] float64.
        v: [B, KV, T, D] float64.
        causal: Whether query i sees only the keys j <= i + T - S.
        scale: Factor of the scores.
    """
    group = q.shape[1] // k.shape[1]
    o, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    hidden = hidden.triu(k.shape[2] - q.shape[2] + 1) if causal else ~hidden
    for batch, head in product(range(q.shape[0]), range(q.shape[1])):
        scores = scale * q[batch, head] @ k[batch, head // group].mT
        scores.masked_fill_(hidden, -torch.inf)
        sees = ~hidden.all(dim=-1)
        o[batch, head, sees] = scores[sees].softmax(dim=-1) @ v[batch, head // group]
        lse[batch, head, sees] = scores[sees].logsumexp(dim=-1)
    return {"o": o, "lse": lse}


def rival(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> Callable[[], object] | None:
    """Return torch's operation, or None for causal q [.., S, ..] and k [.., T, ..] with S != T.

    Torch aligns the mask at the upper left there, which is another result. It allocates its
    output.
    """
    if causal and q.shape[2] != k.shape[2]:
        return None
    grouped = q.shape[1] != k.shape[1]
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str, **options: float
) -> dict[str, float]:
    """Return bounds for standard normal inputs, and scores and sums kept in float32.

    A score is off by about sqrt(D) roundings to float32, and so is its exponential. Weights
    rounded to `dtype` err in proportion to the size of an output, a mean of as many values as the
    query sees. The largest of many errors grows with the root of the logarithm of how many there
    are. A larger `scale` gives scores that err more, and leave weight to few keys.
    """
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    fewest = max(1, dims["T"] - dims["S"] + 1 if flags["causal"] else dims["T"])
    default = dims["D"] ** -0.5
    larger = max(1.0, abs(options.get("scale", default)) / default)
    fewest = 1 if larger > 1.0 else fewest
    elements = dims["B"] * dims["H"] * dims["S"] * dims["D"]
    tail = sqrt(2 * log(max(elements, _FEW)))
    weights = 0.32 * tail * min(1.0, sqrt(3 / fewest)) * result.eps
    return {
        "rtol": result.eps + 8 * single.eps,
        "atol": larger * (16 + sqrt(dims["D"])) * single.eps + weights,
    }


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return 4 D operations for each pair of query and key, and the bytes of all tensors."""
    batch, heads, queries, width = (dims[name] for name in ("B", "H", "S", "D"))
    pairs = visible_pairs(queries, dims["T"]) if flags["causal"] else queries * dims["T"]
    rows, keys = batch * heads * queries, batch * dims["KV"] * dims["T"]
    return 4.0 * batch * heads * pairs * width, float(
        itemsize * width * 2 * (rows + keys) + 4 * rows
    )


def visible_pairs(queries: int, keys: int) -> int:
    """Return how many pairs of query i and key j satisfy j <= i + keys - queries."""
    return sum(max(0, i + 1 + keys - queries) for i in range(queries))
