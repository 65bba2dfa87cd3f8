"""Ways to send tokens to experts on other ranks and back: ours, and what is used instead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tuner.runtime.moe import LowLatencyBuffer


@dataclass(frozen=True, slots=True)
class Load:
    """A rank's share of a workload.

    Attributes:
        x: [tokens, hidden] bfloat16.
        topk_idx: [tokens, topk] int64 experts, none twice.
        topk_weights: [tokens, topk] float32.
        experts: Experts of all ranks together.
        fp8: Whether rows travel as e4m3 with a scale for 128 channels.
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    experts: int
    fp8: bool

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    @property
    def local(self) -> int:
        return self.experts // self.ranks


class Contender(ABC):
    """One way; `dispatch` comes before `combine`, which returns sums over experts that copy.

    Attributes:
        label: Its name in the results.
        capturable: Whether a CUDA graph can hold it.
        repeatable: Whether a combine may follow a combine.
    """

    label: str
    capturable = True
    repeatable = True

    @abstractmethod
    def dispatch(self) -> None:
        """Bring the rows to their experts, packed by expert."""

    @abstractmethod
    def combine(self) -> Tensor:
        """Bring them back and return their weighted sums, [tokens, hidden]."""


class Ours(Contender):
    """A `LowLatencyBuffer`.

    Args:
        label: Its name.
        buffer: The buffer.
        load: This rank's share.
        zero_copy: Whether the experts write where combine sends from.
    """

    def __init__(
        self, label: str, buffer: LowLatencyBuffer, load: Load, *, zero_copy: bool
    ) -> None:
        self.label, self._buffer, self._load, self._zero_copy = label, buffer, load, zero_copy
        self.repeatable = buffer.kernels.is_double
        self._rows: Tensor | None = None
        self._handle = None

    def dispatch(self) -> None:
        load = self._load
        got = self._buffer.dispatch(load.x, load.topk_idx, load.topk_weights, fp8=load.fp8)
        self._rows, self._handle = (None if load.fp8 else got.recv_x), got.handle

    def fill(self) -> None:
        """Do the experts' work for a test: copy the rows into the view."""
        view = self._buffer.get_next_combine_buffer(self._handle)
        if self._zero_copy and self._rows is not None:
            view.copy_(self._rows)

    def combine(self) -> Tensor:
        load, rows = self._load, self._rows
        if self._zero_copy or rows is None:
            rows = self._buffer.get_next_combine_buffer(self._handle)
        arguments = (rows, load.topk_idx, load.topk_weights, self._handle)
        return self._buffer.combine(*arguments, zero_copy=self._zero_copy).out


class AllToAll(Contender):
    """`all_to_all_single` of rows sorted by expert, and a permutation of what arrives."""

    label = "all_to_all_single"
    capturable = False  # the host must know the counts

    def __init__(self, load: Load) -> None:
        self._load = load

    def dispatch(self) -> None:
        load = self._load
        flat = load.topk_idx.flatten()
        order = flat.argsort(stable=True)
        self._order = order[int((flat < 0).sum()) :]  # those that name nobody come first
        named = flat.clamp_min(0)
        counts = torch.zeros(load.experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, named, (flat >= 0).long())
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        self._sent = counts.view(load.ranks, load.local).sum(dim=1).tolist()
        self._got = arriving.view(load.ranks, load.local).sum(dim=1).tolist()
        rows = load.x[self._order // load.topk_idx.shape[1]]
        if load.fp8:
            rows, scales = quantise(rows)
            scales = self._exchange(scales, self._got, self._sent)
            rows = self._exchange(rows.view(torch.uint8), self._got, self._sent)
        else:
            rows = self._exchange(rows, self._got, self._sent)
        experts = torch.arange(load.local, device=rows.device).repeat(load.ranks)
        self._packing = experts.repeat_interleave(arriving).argsort(stable=True)
        self.rows = rows[self._packing]
        if load.fp8:
            self.scales = scales[self._packing]

    def combine(self) -> Tensor:
        load = self._load
        rows = self.rows
        if load.fp8:
            rows = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        unpacked = torch.empty_like(rows)
        unpacked[self._packing] = rows
        rows = self._exchange(unpacked, self._sent, self._got)
        weights = load.topk_weights.flatten()[self._order, None]
        sums = torch.zeros(load.x.shape, dtype=torch.float32, device=rows.device)
        sums.index_add_(0, self._order // load.topk_idx.shape[1], rows.float() * weights)
        return sums.bfloat16()

    def _exchange(self, rows: Tensor, into: list[int], out: list[int]) -> Tensor:
        result = rows.new_empty((sum(into), *rows.shape[1:]))
        dist.all_to_all_single(result, rows, into, out)
        return result


class AllGather(Contender):
    """One all-gather of all tokens with their choices, and a reduce-scatter of each rank's sums.

    It does not pack rows by expert.
    """

    label = "all_gather + reduce_scatter"

    def __init__(self, load: Load) -> None:
        self._load = load
        tokens, hidden = load.x.shape
        self._choices = [bytes_of(load.topk_idx.int()), bytes_of(load.topk_weights)]
        self._sent = torch.cat([*self._rows(), *self._choices], dim=1)
        self._got = self._sent.new_empty((load.ranks * tokens, self._sent.shape[1]))
        self._sums = load.x.new_empty((load.ranks * tokens, hidden))
        self._out = torch.empty_like(load.x)

    def dispatch(self) -> None:
        torch.cat([*self._rows(), *self._choices], dim=1, out=self._sent)
        dist.all_gather_into_tensor(self._got, self._sent)

    def _rows(self) -> list[Tensor]:
        return [*map(bytes_of, quantise(self._load.x) if self._load.fp8 else (self._load.x,))]

    def fill(self) -> None:
        """Do the experts' work for a test: weight the rows of this rank's experts."""
        width = 4 * self._load.topk_idx.shape[1]
        rows, ids, weights = self._got.split([self._got.shape[1] - 2 * width, width, width], dim=1)
        experts = ids.contiguous().view(torch.int32)
        mine = experts.div(self._load.local, rounding_mode="floor") == dist.get_rank()
        weight = weights.contiguous().view(torch.float32).where(mine & (experts >= 0), 0.0)
        self._sums.copy_(rows.contiguous().view(torch.bfloat16) * weight.sum(dim=1, keepdim=True))

    def combine(self) -> Tensor:
        dist.reduce_scatter_tensor(self._out, self._sums)
        return self._out


class AllToAllV(Contender):
    """Torch's NVSHMEM operations, `symm_mem.all_to_all_vdev_2d` and its way back.

    At most 16 experts per rank; rows are sorted by expert before, and summed up after.
    """

    label = "all_to_all_vdev_2d"

    def __init__(self, load: Load) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self._load, self._group = load, dist.group.WORLD.group_name
        flat = load.topk_idx.flatten()
        most = load.ranks * flat.numel()

        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            tensor = symmetric_memory.empty(*shape, dtype=dtype, device=load.x.device)
            symmetric_memory.rendezvous(tensor, group=self._group)
            return tensor

        hidden = load.x.shape[1]
        self._send = room(flat.numel(), hidden, dtype=torch.bfloat16)
        self.rows = room(most, hidden, dtype=torch.bfloat16)
        self._back = room(flat.numel(), hidden, dtype=torch.bfloat16)
        self._splits = room(load.experts, dtype=torch.int64)
        self._arrived = room(2, load.experts, dtype=torch.int64)
        self._returned = room(2, load.experts, dtype=torch.int64)

    def dispatch(self) -> None:
        load = self._load
        flat = load.topk_idx.flatten()
        self._order = flat.argsort(stable=True)
        self._splits.zero_().scatter_add_(0, flat, torch.ones_like(flat))
        torch.index_select(load.x, 0, self._order // load.topk_idx.shape[1], out=self._send)
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self._send, self.rows, self._splits, self._arrived, self._group
        )

    def combine(self) -> Tensor:
        load = self._load
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self.rows, self._back, self._arrived, self._returned, self._group
        )
        weights = load.topk_weights.flatten()[self._order, None]
        sums = torch.zeros(load.x.shape, dtype=torch.float32, device=load.x.device)
        sums.index_add_(0, self._order // load.topk_idx.shape[1], self._back.float() * weights)
        return sums.bfloat16()


def bytes_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as e4m3 and a scale for each 128 channels, as torch computes them."""
    groups = rows.float().unflatten(1, (-1, 128))
    largest = groups.abs().amax(dim=2, keepdim=True).clamp_min(1e-4)
    values = (groups * (448.0 / largest)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return values.flatten(1), (largest / 448.0)[..., 0]
