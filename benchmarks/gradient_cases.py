"""Random cases of attention, and what computes each: torch, FlashAttention-4, and float64."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """Attention of q [B, H, S, D], k and v [B, KV, T, D]; scale is relative to D ** -0.5."""

    dtype: str
    B: int
    H: int
    KV: int
    S: int
    T: int
    D: int
    causal: bool
    scale: float

    @property
    def factor(self) -> float:
        """Factor of the scores."""
        return float(self.scale * self.D**-0.5)

    def tensors(self, device: str, seed: int) -> tuple[Tensor, ...]:
        """Return q, k, v and the gradient of the output, all standard normal."""
        generator = torch.Generator(device).manual_seed(seed)
        heads = ((self.H, self.S), (self.KV, self.T), (self.KV, self.T), (self.H, self.S))
        return tuple(
            torch.randn((self.B, *shape, self.D), device=device, generator=generator).to(
                getattr(torch, self.dtype)
            )
            for shape in heads
        )


def draw(count: int, dtypes: Sequence[str], longest: int, seed: int) -> list[Case]:
    """Return random cases; causal ones are square, since torch aligns other masks differently.

    Args:
        count: How many.
        dtypes: The element types; every combination with head dims and masks comes up equally
            often.
        longest: The most queries or keys.
        seed: Of the lengths, heads and scales.
    """
    chance = random.Random(seed)
    kinds = itertools.cycle(itertools.product(dtypes, (64, 128), (False, True), (False, True)))
    cases = []
    for dtype, head_dim, causal, odd in itertools.islice(kinds, count):
        queries = _length(chance, longest, odd)
        keys = queries if causal or chance.random() < 0.3 else _length(chance, longest, odd)
        heads, groups = chance.choice(((1, 1), (4, 4), (4, 2), (6, 2), (8, 1)))
        scale = chance.choice((1.0, 1.0, 0.5, 2.0))
        batch = chance.choice((1, 2))
        cases.append(
            Case(dtype, batch, heads, groups, queries, keys, head_dim, causal=causal, scale=scale)
        )
    return cases


def _length(chance: random.Random, longest: int, odd: bool) -> int:
    """Return a length, long and short ones equally likely: odd, or a multiple of 16."""
    length = round(2 ** chance.uniform(4, math.log2(longest)))
    return length // 16 * 16 if not odd else length // 2 * 2 + 1


def gradients(attend: Attend, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of q, k and v."""
    *inputs, do = tensors
    sources = [item.detach().clone().requires_grad_() for item in inputs]
    return list(torch.autograd.grad(attend(*sources), sources, do))


def reference(case: Case) -> Attend:
    """Return attention written out, for float64."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = case.H // case.KV
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = case.factor * q @ k.mT
        if case.causal:
            hidden = torch.ones(case.S, case.T, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(dim=-1) @ v

    return attend


def torchs(case: Case, backend: SDPBackend) -> Attend:
    """Return torch's attention with one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                *(q, k, v), is_causal=case.causal, scale=case.factor, enable_gqa=case.H != case.KV
            )

    return attend


def flash_4(case: Case) -> Attend:
    """Return FlashAttention-4's attention, whose tensors are [batch, seq, heads, head_dim]."""
    function: Any = importlib.import_module("flash_attn.cute.interface").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tensors = (item.transpose(1, 2).contiguous() for item in (q, k, v))
        result = function(*tensors, causal=case.causal, softmax_scale=case.factor)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.transpose(1, 2)

    return attend


def errors(found: Sequence[Tensor], true: Sequence[Tensor]) -> list[float]:
    """Return the relative error of each gradient in the Frobenius norm."""
    return [
        float(torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other))
        for one, other in zip(found, true, strict=True)
    ]
