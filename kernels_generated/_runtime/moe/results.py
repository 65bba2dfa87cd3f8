"""What dispatch and combine return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import Shape

Hook = Callable[[], None]
Arrived = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """What a combine must know of the dispatch that its rows came by.

    Attributes:
        buffer: The buffer that made it.
        topk: Experts that a token names.
        tokens: Number of tokens of this rank.
        slots: [tokens, topk] int32, a token's number among those of this rank at its expert.
        source: [local, rows] int32, token * topk + choice on the rank that a row came from.
        layout_range: [local, ranks] int64, number of rows of a rank and, 32 bits up, the first.
        arrived: What came with the weights of a dispatch, else None: places [ranks, max_tokens,
            topk] int32, the row for a choice of a rank's token or -1, the weights of those
            choices, float32, and the number of tokens of each rank, [ranks] int32.
    """

    buffer: object
    topk: int
    tokens: int
    slots: Tensor
    source: Tensor
    layout_range: Tensor
    arrived: Arrived | None = None

    @property
    def src_info(self) -> Tensor:
        """Token of each row on the rank that it came from, [local, rows] int32."""
        return self.source // self.topk


class Dispatched(NamedTuple):
    """What came out of a dispatch; it is there once the hook was called, if there is one.

    Attributes:
        recv_x: [local, rows, hidden] packed by rank, then by token; bfloat16 or float8_e4m3fn.
        scales: [local, rows, hidden / 128] float32 of fp8 rows, rows next to each other.
        recv_count: [local] int32, number of rows of each expert; what lies beyond is garbage.
        handle: What combine needs.
        hook: Launches the receive phase.
    """

    recv_x: Tensor
    scales: Tensor | None
    recv_count: Tensor
    handle: Handle
    hook: Hook | None


class Combined(NamedTuple):
    """What came out of a combine: [tokens, hidden] bfloat16, and the hook if there is one."""

    out: Tensor
    hook: Hook | None


class Packed(NamedTuple):
    """What the receive phase of a dispatch writes, but for the counts that it adds to.

    Attributes:
        rows: [local, rows, hidden] bfloat16 or float8_e4m3fn.
        scales: [local, rows, groups] float32, rows next to each other; no groups without fp8.
        source: [local, rows] int32.
        ranges: [local, ranks] int64.
        counts: [local] int32.
    """

    rows: Tensor
    scales: Tensor
    source: Tensor
    ranges: Tensor
    counts: Tensor

    @classmethod
    def empty(cls, shape: Shape, device: torch.device, *, fp8: bool) -> Packed:
        """Return tensors that are not initialised."""
        local, rows = shape.local, shape.rows
        element = torch.float8_e4m3fn if fp8 else torch.bfloat16
        groups = shape.hidden // 128 if fp8 else 0
        return cls(
            torch.empty((local, rows, shape.hidden), dtype=element, device=device),
            torch.empty((local, groups, rows), device=device).transpose(1, 2),
            torch.empty((local, rows), dtype=torch.int32, device=device),
            torch.empty((local, shape.ranks), dtype=torch.int64, device=device),
            torch.empty(local, dtype=torch.int32, device=device),
        )


def empty_arrived(shape: Shape, device: torch.device) -> Arrived:
    """Return room for what comes with weights, not initialised."""
    choices = (shape.ranks, shape.max_tokens, shape.topk)
    return (
        torch.empty(choices, dtype=torch.int32, device=device),
        torch.empty(choices, dtype=torch.float32, device=device),
        torch.empty(shape.ranks, dtype=torch.int32, device=device),
    )
