"""Gradients of attention, O = softmax(scale * Q K^T) V, against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

RIVAL = "torch scaled_dot_product_attention backward"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"B": 1, "H": 1, "S": 1, "D": 1, "KV": 1, "T": 1},
    {"B": 2, "H": 2, "S": 1, "D": 64, "KV": 2, "T": 7},
    {"B": 2, "H": 3, "S": 13, "D": 37, "KV": 1, "T": 5},
    {"B": 1, "H": 4, "S": 129, "D": 80, "KV": 2, "T": 130},
    {"B": 1, "H": 2, "S": 131, "D": 16, "KV": 2, "T": 67},
    {"B": 1, "H": 1, "S": 3, "D": 8, "KV": 1, "T": 0},
    {"B": 1, "H": 1, "S": 0, "D": 8, "KV": 1, "T": 3},
    # more tiles than programs that stay on any card take at a time
    {"B": 1, "H": 150, "S": 130, "D": 16, "KV": 75, "T": 200},
    {"B": 2, "H": 75, "S": 150, "D": 16, "KV": 75, "T": 150},
)

_FEW = 1 << 16
"""Elements up to which the tail of their errors is taken as that of so many."""

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
    },
    {
        "B": (1,),
        "H KV": ((2, 2), (4, 1)),
        "S T": ((100, 100), (257, 129)),
        "D": (64, 128),
        "causal": _BOTH,
        "misaligned": (True,),
    },
    {
        "B": (1,),
        "H KV": ((2, 2),),
        "S T": ((96, 96), (70, 200)),
        "D": (64, 128),
        "causal": _BOTH,
        "scale": (-1.0, 0.0, 0.25, 1.7),
    },
    {
        "B": (1,),
        "H KV": ((2, 2),),
        "S T": ((100, 100), (130, 70), (64, 300)),
        "D": (64, 128),
        "causal": _BOTH,
        "magnitude offset": ((4.0, 0.0), (16.0, 0.0), (1.0, 32.0), (1.0, -32.0)),
    },
    {
        "B": (2,),
        "H KV": ((2, 2), (4, 1)),
        "S T": ((1, 300), (257, 129), (300, 300)),
        "D": (64, 128),
        "causal": _BOTH,
        "deterministic": (True,),
    },
)


def inputs(
    dims: Mapping[str, int],
    flags: Mapping[str, object],
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
        **options: `scale`, factor of the scores; `magnitude`, factor of q; `offset`, what the
            first number of every q is, and of every k up to its sign, which all scores get.
    """
    batch, heads, queries, width = (dims[name] for name in ("B", "H", "S", "D"))
    shapes = {"q": (heads, queries), "k": (dims["KV"], dims["T"]), "v": (dims["KV"], dims["T"])}
    drawn = {
        name: torch.randn(
            (batch, *shape, width), dtype=dtype, device=generator.device, generator=generator
        )
        for name, shape in {**shapes, "do": shapes["q"]}.items()
    }
    drawn["q"] *= options.get("magnitude", 1.0)
    if offset := options.get("offset"):
        drawn["q"][..., 0], drawn["k"][..., 0] = abs(offset), offset
    scale = options.get("scale", width**-0.5)
    q, k, v = (drawn[name].double() for name in ("q", "k", "v"))
    o, lse = q.clone(), q.new_empty(q.shape[:3])
    hidden = _hidden(q, k, bool(flags["causal"]))
    for here, there in _heads(q, k):
        scores = (scale * q[here] @ k[there].mT).masked_fill_(hidden, -torch.inf)
        lse[here] = scores.logsumexp(dim=-1)
        o[here] = (scores - lse[here][:, None]).exp_().masked_fill_(hidden, 0.0) @ v[there]
    return {**drawn, "o": o.to(dtype), "lse": lse.float()}


def reference(  # noqa: PLR0913 - one for each argument of the kernel
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
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
        scale: Factor of the scores.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    hidden = _hidden(q, k, causal)
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


def _hidden(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Return which keys each query does not see, [S, T]."""
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return hidden.triu(k.shape[2] - q.shape[2] + 1) if causal else ~hidden


def rival(  # noqa: PLR0913 - one for each argument of the kernel
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
) -> Callable[[], object] | None:
    """Return torch's backward pass, or None for causal q [.., S, ..], k [.., T, ..], S != T.

    Torch aligns the mask at the upper left there, which is another result. It allocates the
    gradients.
    """
    del o, lse  # torch keeps its own
    if causal and q.shape[2] != k.shape[2]:
        return None
    grouped = q.shape[1] != k.shape[1]
    sources = q, k, v = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return lambda: torch.autograd.grad(output, sources, do, retain_graph=True)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str, **options: float
) -> dict[str, float]:
    """Return bounds for standard normal inputs, and scores and sums kept in float32.

    An element of dP is a sum of D products. P and dS rounded to `dtype` err in proportion to the
    size of a gradient, which is that of a mean of as many values as the query sees; dk and dv
    gather from all queries of a group of heads. The `options` of the inputs add what they make
    larger: the scores, which then leave weight to few keys, and their gradients. The largest of
    many errors grows with the root of the logarithm of how many there are, and by more where D is
    small, since sums of few products are often far from their mean.
    """
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    queries, keys = dims["H"] // dims["KV"] * dims["S"], max(1, dims["T"])
    gathered = max(1.0, sqrt(queries / keys))
    fewest = max(1, keys - dims["S"] + 1 if flags["causal"] else keys)
    default = dims["D"] ** -0.5
    scale = abs(options.get("scale", default)) / default
    magnitude, offset = options.get("magnitude", 1.0), abs(options.get("offset", 0.0))
    if magnitude > 1.0:
        fewest = 1
    # a score as large as this errs by as many times the error of an ordinary one, which is below 4
    excess = max(4.0 * magnitude, offset**2 * default, 4.0) - 4.0
    gathered *= max(1.0, scale, magnitude, offset) * (1.0 + excess / 24)
    elements = dims["B"] * dims["D"] * max(dims["H"] * dims["S"], dims["KV"] * dims["T"])
    tail = sqrt(2 * log(max(elements, _FEW)))
    tail *= 1.0 + 20.0 / (dims["D"] + 4)
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
    pairs = visible_pairs(queries, dims["T"]) if flags["causal"] else queries * dims["T"]
    rows, keys = batch * heads * queries, batch * dims["KV"] * dims["T"]
    return 10.0 * batch * heads * pairs * width, float(
        itemsize * width * 4 * (rows + keys) + 4 * rows
    )


def visible_pairs(queries: int, keys: int) -> int:
    """Return how many pairs of query i and key j satisfy j <= i + keys - queries."""
    return sum(max(0, i + 1 + keys - queries) for i in range(queries))
