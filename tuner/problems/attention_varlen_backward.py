"""Gradients of attention within each sequence of a batch, against a call for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor

RIVAL = "torch scaled_dot_product_attention backward, a call for each sequence"

EDGE_SHAPES: tuple[dict[str, int], ...] = (
    {"N": 1, "H": 1, "D": 1, "M": 1, "KV": 1, "C": 2},
    {"N": 7, "H": 2, "D": 64, "M": 7, "KV": 2, "C": 4},
    {"N": 13, "H": 3, "D": 37, "M": 29, "KV": 1, "C": 9},
    {"N": 129, "H": 4, "D": 80, "M": 130, "KV": 2, "C": 3},
    {"N": 2, "H": 1, "D": 8, "M": 2, "KV": 1, "C": 6},
    {"N": 3, "H": 1, "D": 8, "M": 0, "KV": 1, "C": 3},
    {"N": 0, "H": 1, "D": 8, "M": 3, "KV": 1, "C": 2},
)

_BOTH = (False, True)
_WINDOWS = ((-1, -1), (0, 0), (63, 0), (-1, 17), (64, 64))

SUITE: tuple[dict[str, tuple[Any, ...]], ...] = (
    {
        "H KV": ((4, 1),),
        "N M": ((256, 256), (700, 700), (500, 900), (900, 500), (3, 300), (300, 3)),
        "C": (2, 18),
        "D": (64, 128),
        "causal": _BOTH,
        "window_left window_right": _WINDOWS,
    },
    {
        "H KV": ((4, 2),),
        "N M": ((400, 400), (77, 300)),
        "C": (4, 100),
        "D": (8, 72, 96, 256),
        "causal": _BOTH,
        "misaligned deterministic": ((False, True), (True, False)),
    },
    {
        "H KV": ((2, 1),),
        "N M": ((300, 300), (77, 300)),
        "C": (4,),
        "D": (64,),
        "causal": _BOTH,
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
    """Return normal q, k, v and do, where sequences begin, and the o and lse that belong.

    Args:
        dims: Extent of every dim.
        flags: Value of every flag.
        dtype: Element type.
        generator: Source of randomness, on the device of the tensors.
        **options: `scale`, factor of the scores.
    """
    queries, keys = (dims["N"], dims["H"], dims["D"]), (dims["M"], dims["KV"], dims["D"])
    drawn = {
        name: torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)
        for name, shape in {"q": queries, "k": keys, "v": keys, "do": queries}.items()
    }
    place: Any = {"dtype": torch.int32, "device": generator.device}
    starts = [torch.tensor(cut, **place) for cut in starts_of(dims)]
    q, k, v = (drawn[name].double() for name in ("q", "k", "v"))
    window = (flags["causal"], flags["window_left"], flags["window_right"])
    o, lse = torch.zeros_like(q), torch.full_like(q[..., 0].T, -torch.inf)
    for mine, theirs, head, kv_head in _heads(q, k, *starts):
        hidden = _hidden(q[mine], k[theirs], *window)
        scores = options.get("scale", dims["D"] ** -0.5) * q[mine, head] @ k[theirs, kv_head].mT
        sums = scores.masked_fill_(hidden, -torch.inf).logsumexp(dim=-1)
        p = (scores - sums[:, None]).exp_().masked_fill_(hidden, 0.0)
        lse[head, mine], o[mine, head] = sums, p @ v[theirs, kv_head]
    begins = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    return {**drawn, **begins, "o": o.to(dtype), "lse": lse.float()}


def starts_of(dims: Mapping[str, int]) -> tuple[list[int], ...]:
    """Return where the sequences' queries and keys begin, the same as in the forward pass."""
    weights = [1 + number % 4 for number in range(dims["C"] - 1)]
    turned = weights[:: 1 if dims["N"] == dims["M"] else -1]
    return tuple(
        [total * part // sum(weights) for part in accumulate(shares, initial=0)]
        for total, shares in ((dims["N"], weights), (dims["M"], turned))
    )


def reference(  # noqa: PLR0913 - one for each argument of the kernel
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
) -> dict[str, Tensor]:
    """Return the gradients of q, k and v, sequence by sequence.

    Args:
        q: [N, H, D] float64.
        k: [M, KV, D] float64.
        v: [M, KV, D] float64.
        cu_seqlens_q: [C] int32, where the queries of each sequence begin, and their end.
        cu_seqlens_k: [C] int32, the same of the keys.
        o: [N, H, D] float64, the output.
        lse: [H, N] float64, the log-sum-exp of each row of scores.
        do: [N, H, D] float64, the gradient of the output.
        causal: Whether query i of S sees only the keys j <= i + T - S of T.
        window_left: It sees only the keys j >= i + T - S - window_left, unless that is -1.
        window_right: It sees only the keys j <= i + T - S + window_right, unless that is -1.
        scale: Factor of the scores.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for mine, theirs, head, kv_head in _heads(q, k, cu_seqlens_q, cu_seqlens_k):
        hidden = _hidden(q[mine], k[theirs], causal, window_left, window_right)
        scores = scale * q[mine, head] @ k[theirs, kv_head].mT
        p = (scores - lse[head, mine, None]).exp_().masked_fill_(hidden, 0.0)
        delta = (do[mine, head] * o[mine, head]).sum(dim=-1, keepdim=True)
        ds = scale * p * (do[mine, head] @ v[theirs, kv_head].mT - delta)
        dq[mine, head] = ds @ k[theirs, kv_head]
        dk[theirs, kv_head] += ds.mT @ q[mine, head]
        dv[theirs, kv_head] += p.mT @ do[mine, head]
    return {"dq": dq, "dk": dk, "dv": dv}


def _heads(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Iterator[tuple[slice, slice, int, int]]:
    """Yield queries, keys, head and head of the keys, for every sequence and head."""
    group = q.shape[1] // k.shape[1]
    for mine, theirs in _sequences(cu_seqlens_q, cu_seqlens_k):
        yield from ((mine, theirs, head, head // group) for head in range(q.shape[1]))


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence."""
    parts = (pairwise(starts.tolist()) for starts in (cu_seqlens_q, cu_seqlens_k))
    yield from ((slice(*mine), slice(*theirs)) for mine, theirs in zip(*parts, strict=True))


def _hidden(q: Tensor, k: Tensor, causal: bool, left: int, right: int) -> Tensor:
    """Return which keys each query does not see, [S, T]."""
    queries, keys = len(q), len(k)
    own = torch.arange(keys - queries, keys, device=q.device)[:, None]
    distance = torch.arange(keys, device=q.device) - own
    left = queries + keys if left < 0 else left
    right = 0 if causal else queries + keys if right < 0 else right
    return (distance < -left) | (distance > right)


def rival(  # noqa: PLR0913 - one for each argument of the kernel
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
) -> Callable[[], object] | None:
    """Return torch's backward pass of each sequence, or None where its mask is another."""
    del o, lse  # torch keeps its own
    found = list(_sequences(cu_seqlens_q, cu_seqlens_k))
    oblong = any(len(q[mine]) != len(k[theirs]) for mine, theirs in found)
    if window_left >= 0 or (window_right >= 0 and not causal) or (causal and oblong):
        return None
    sources = q, k, v = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
    options: dict[str, Any] = {
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    attention: Any = torch.nn.functional.scaled_dot_product_attention
    parts = [
        attention(*(x.transpose(0, 1)[None] for x in (q[mine], k[theirs], v[theirs])), **options)
        for mine, theirs in found
    ]
    gradients = [do[mine].transpose(0, 1)[None] for mine, _ in found]
    return lambda: torch.autograd.grad(parts, sources, gradients, retain_graph=True)


def tolerance(
    dims: Mapping[str, int], flags: Mapping[str, object], dtype: str, **options: float
) -> dict[str, float]:
    """Return bounds for standard normal inputs, and scores and sums kept in float32.

    An element of dP is a sum of D products; few have heavy tails. P and dS rounded to `dtype` err
    in proportion to the size of a gradient, a mean of as many values as the query sees; dk and dv
    gather from all queries of a group of heads that may see a key. A larger `scale` adds to that.
    """
    single, result = torch.finfo(torch.float32), torch.finfo(getattr(torch, dtype))
    fewest = min(filter(None, seen_keys(dims, flags)), default=1)
    lengths = [[end - begin for begin, end in pairwise(part)] for part in starts_of(dims)]
    most = max(mine / max(1, theirs) for mine, theirs in zip(*lengths, strict=True))
    gathered = max(1.0, sqrt(dims["H"] // dims["KV"] * most))
    gathered *= max(1.0, abs(options.get("scale", 0.0)) * sqrt(dims["D"]))
    elements = dims["D"] * max(dims["N"] * dims["H"], dims["M"] * dims["KV"])
    tail = sqrt(2 * log(max(elements, 1 << 16))) * (1.0 + 20.0 / (dims["D"] + 4))  # of errors
    weights = 0.53 * tail * min(1.0, sqrt(3 / fewest)) * result.eps
    return {
        "rtol": result.eps + 16 * single.eps,
        "atol": gathered * ((48 + 3 * sqrt(dims["D"])) * single.eps + weights),
    }


def cost(
    dims: Mapping[str, int], flags: Mapping[str, object], itemsize: int
) -> tuple[float, float]:
    """Return 10 D operations for each pair of query and key, and the bytes of all tensors."""
    rows, keys = dims["N"] * dims["H"], dims["M"] * dims["KV"]
    return 10.0 * dims["H"] * sum(seen_keys(dims, flags)) * dims["D"], float(
        itemsize * dims["D"] * 4 * (rows + keys) + 4 * rows + 8 * dims["C"]
    )


def seen_keys(dims: Mapping[str, int], flags: Mapping[str, Any]) -> list[int]:
    """Return how many keys each query of a head sees."""
    left = flags["window_left"]
    right = 0 if flags["causal"] else flags["window_right"]
    counts = []
    for mine, theirs in zip(*map(pairwise, starts_of(dims)), strict=True):
        queries, keys = mine[1] - mine[0], theirs[1] - theirs[0]
        for own in range(keys - queries, keys):
            last = min(keys - 1, own + right if right >= 0 else keys)
            first = max(0, own - left if left >= 0 else 0)
            counts.append(max(0, last - first + 1))
    return counts
