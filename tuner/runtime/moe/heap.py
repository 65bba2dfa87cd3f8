"""Memory that every rank can write into: one interface for GPUs, processes and simulated ranks."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ExchangeError, MisuseError

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Allocation:
    """The same number of bytes on every rank, all zero at first.

    Attributes:
        memory: This rank's bytes, uint8.
        addresses: Where each rank's bytes begin as this rank's device sees them.
        keeper: What must live as long as the memory.
    """

    memory: Tensor
    addresses: tuple[int, ...]
    keeper: object = None


class Heap(ABC):
    """A rank's way to memory of all ranks.

    Attributes:
        rank: This rank.
        ranks: Number of ranks.
        device: Where the memory is.
    """

    rank: int
    ranks: int
    device: torch.device

    @abstractmethod
    def allocate(self, size: int) -> Allocation:
        """Return memory of `size` bytes on every rank; all ranks call it, in the same order."""

    @abstractmethod
    def gather(self, text: str) -> list[str]:
        """Return what each rank says, those that can be heard; all ranks call it."""

    def agree(self, text: str) -> None:
        """Raise MisuseError unless all ranks say the same of what they are about to share."""
        for rank, other in enumerate(self.gather(text)):
            if other != text:
                raise MisuseError(
                    f"the ranks' buffers differ: rank {self.rank} has {text}, rank {rank} {other}"
                )

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here and their devices have done what they were told."""


class GroupHeap(Heap):
    """What heaps of the ranks of a process group share."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, text: str) -> list[str]:
        """Return what each rank says, by rank."""
        texts: list[str] = [""] * self.ranks
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def barrier(self) -> None:
        """Wait for the device and for the group."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.group)


class CudaHeap(GroupHeap):
    """Torch's symmetric memory: GPUs of one host that write into each other's memory.

    Multicast must be off: ``TORCH_SYMM_MEM_DISABLE_MULTICAST=1`` in every rank's environment.
    """

    def allocate(self, size: int) -> Allocation:
        """Return symmetric memory, zeroed.

        Raises:
            ExchangeError: Multicast is on, or torch's addresses are not what they should be.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)
        handle = cast(Any, symmetric_memory.rendezvous(memory, self.group))
        if handle.multicast_ptr:
            raise ExchangeError(
                "symmetric memory was set up with multicast, which must stay off: set "
                "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 in the environment of every rank"
            )
        # the pointers are those of whole segments: a tensor may begin later in its own
        offset = memory.data_ptr() - handle.buffer_ptrs[self.rank]
        own = handle.get_buffer(self.rank, (1,), torch.uint8, offset).data_ptr()
        if offset < 0 or own != memory.data_ptr():
            raise ExchangeError(
                f"symmetric memory lies {offset} bytes into its segment, but torch finds it at "
                f"{own - handle.buffer_ptrs[self.rank]}: this version of torch is not supported"
            )
        memory.zero_()
        self.barrier()
        addresses = tuple(int(address) + offset for address in handle.buffer_ptrs)
        return Allocation(memory, addresses, handle)


class SharedHeap(GroupHeap):
    """Memory that processes on one CPU share, for kernels that Triton interprets."""

    def allocate(self, size: int) -> Allocation:
        """Return memory that all processes map; its file is gone when this returns."""
        folder = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        with tempfile.NamedTemporaryFile(prefix="tuner-exchange-", dir=folder) as file:
            file.truncate(size)
            names = self.gather(file.name)
            mapped = [
                torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name in names
            ]
            self.barrier()
        return Allocation(mapped[self.rank], tuple(tensor.data_ptr() for tensor in mapped), mapped)


class LocalGroup:
    """Ranks that one process simulates, or one GPU: each phase of all ranks comes in turn.

    Args:
        ranks: Number of ranks.
        device: Where all their memory is.
    """

    def __init__(self, ranks: int, device: str | torch.device = "cpu") -> None:
        self.heaps = tuple(
            LocalHeap(self, rank, ranks, torch.device(device)) for rank in range(ranks)
        )
        self.texts: dict[int, str] = {}
        self.memories: list[Tensor] = []

    def __getitem__(self, rank: int) -> LocalHeap:
        """Return the heap of a rank."""
        return self.heaps[rank]


class LocalHeap(Heap):
    """The memory of one of the ranks of a `LocalGroup`: a list of tensors."""

    def __init__(self, group: LocalGroup, rank: int, ranks: int, device: torch.device) -> None:
        self._group, self.rank, self.ranks, self.device = group, rank, ranks, device

    def allocate(self, size: int) -> Allocation:
        """Return this rank's memory; that of all ranks is made for the first one who asks.

        Raises:
            MisuseError: The ranks ask for different sizes.
        """
        memories = self._group.memories
        if not memories:
            memories += [
                torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(self.ranks)
            ]
        if memories[0].numel() != size:
            raise MisuseError(
                f"rank {self.rank} asks for {size} bytes, the others for {memories[0].numel()}: "
                "a local group is for one buffer per rank"
            )
        addresses = tuple(memory.data_ptr() for memory in memories)
        return Allocation(memories[self.rank], addresses, memories)

    def gather(self, text: str) -> list[str]:
        """Return what was said so far, by rank; this rank's text for those who did not speak."""
        self._group.texts[self.rank] = text
        return [self._group.texts.get(rank, text) for rank in range(self.ranks)]

    def barrier(self) -> None:
        """Return at once: one process runs all ranks, and one stream all phases."""


def heap_of(group: dist.ProcessGroup | Heap) -> Heap:
    """Return the heap of a process group: in GPUs' memory with NCCL, else in the host's.

    Args:
        group: A process group, or a heap, which is returned.
    """
    if isinstance(group, Heap):
        return group
    if "nccl" in str(dist.get_backend_config(group)):
        return CudaHeap(group, torch.device("cuda", torch.cuda.current_device()))
    return SharedHeap(group, torch.device("cpu"))
