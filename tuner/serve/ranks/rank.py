"""One rank's part in measuring a kernel that exchanges tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tuner import codec
from tuner.plugins import Device
from tuner.records import Workload
from tuner.runtime.check import Case, difference, make_inputs
from tuner.runtime.moe import Heap, Kernels, LowLatencyBuffer, default_kernels, heap_of
from tuner.runtime.moe.heap import Allocation
from tuner.runtime.moe.kernels import WITHOUT_WEIGHTS
from tuner.runtime.signature import Signature
from tuner.runtime.triton_module import import_file
from tuner.serve.problem import CheckedProblem

TIMEOUT_S = 5.0
"""After which a wait for a peer is given up: shorter than what a candidate may take."""

FIRST_TIMEOUT_S = 10.0
"""The same for the first rounds of a variant, whose binaries are loaded on all ranks."""

ROUNDS = 2
"""Rounds in a call: it begins and ends with the same buffer, in whatever graph it is captured."""

Message = Mapping[str, Any]
Play = Callable[[], Mapping[str, Tensor]]


class Rank:
    """Does what all ranks do, in the same order.

    Args:
        device: Where it runs.
        number: Its number.
        ranks: Number of ranks.
        store: File through which the ranks find each other.
    """

    def __init__(self, device: Device, number: int, *, ranks: int, store: Path) -> None:
        self.number, self._device, self._ranks = number, device, ranks
        on_gpu = device.torch_device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(device.index)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{store}",
            rank=number,
            world_size=ranks,
            device_id=torch.device(device.torch_device) if on_gpu else None,
        )
        self._heap = Arena(heap_of(cast(dist.ProcessGroup, dist.group.WORLD)))
        self._plays: dict[str, Play] = {}

    def prepare(self, message: Message) -> None:
        """Make the inputs of a workload, equal on every rank, and this rank's share of outputs."""
        self._plays.clear()
        workload = codec.from_json(Workload, message["workload"])
        signature = Signature.from_json(message["signature"])
        extents, flags = dict(workload.dims), dict(workload.flags)
        self._problem: Any = CheckedProblem(Path(message["problem"]), signature)
        case = Case(extents, flags, workload.dtype, device=self._device.torch_device)
        self._tolerance = self._problem.tolerance(extents, flags, workload.dtype)
        self._options = signature.arguments(flags, extents)
        self._inputs = make_inputs(signature, self._problem, case)
        doubles = {
            name: tensor.double() if tensor.is_floating_point() else tensor.clone()
            for name, tensor in self._inputs.items()
        }
        expected = self._problem.reference(**doubles, **self._options)
        self._expected = {name: self._share(tensor).clone() for name, tensor in expected.items()}
        self._kernel = signature.kernel

    def read(self, file: str) -> None:
        """Import a rendered file; other ranks are not waited for."""
        path = Path(file)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        module: Any = import_file(path, f"{__name__}.variant_{digest}")
        default, combines = default_kernels(), self._kernel == "moe_combine"
        without_weights = default.combine[WITHOUT_WEIGHTS]
        self._kernels = Kernels(
            dispatch=default.dispatch if combines else (module, module),
            combine=(module, module, without_weights) if combines else default.combine,
            digest=digest,
            buffering=module.BUFFERING,
        )

    def open(self, file: str) -> None:
        """Open a buffer for the file that all ranks have read; nothing is launched.

        Buffers share their memory. They may, for the ranks meet between two files' rounds, and
        signals lie at the same addresses in all and end a pair of rounds as they began it.
        """

        def open_buffer(*shape: int, topk: int) -> LowLatencyBuffer:
            return LowLatencyBuffer(
                self._heap,
                *shape,
                topk=topk,
                kernels=self._kernels,
                timeout_s=TIMEOUT_S,
                first_timeout_s=FIRST_TIMEOUT_S,
            )

        self._plays[file] = self._problem.share(
            open_buffer, self.number, self._inputs, self._options
        )

    def play(self, file: str) -> None:
        """Launch the rounds of a call of a loaded file."""
        for _ in range(ROUNDS):
            self._plays[file]()

    def check(self, file: str) -> str | None:
        """Play the rounds of a call and return what is wrong with any of them."""
        faults = []
        for _ in range(ROUNDS):  # all of them, whatever is wrong: the others do so, too
            outputs = self._plays[file]()
            self._device.synchronize()
            faults += [self._fault(name, got) for name, got in outputs.items()]
        return next(filter(None, faults), None)

    def _fault(self, name: str, got: Tensor) -> str | None:
        """Return what is wrong with this rank's share of an output."""
        expected = self._expected[name]
        # what no row came to is NaN or -1 in the reference, and garbage here
        filler = expected.isnan() if expected.is_floating_point() else expected == -1
        got = got.reshape(expected.shape).double().where(~filler, 0.0)
        wanted = expected.double().where(~filler, 0.0)
        fault = difference(got, wanted, **self._tolerance)
        return f"rank {self.number}: {name}{fault}" if fault else None

    def _share(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor whose first dim is of ranks or of their experts."""
        size = tensor.shape[0] // self._ranks
        return tensor[self.number * size : (self.number + 1) * size]


class Arena(Heap):
    """Lends the same memory to one buffer after the other: symmetric memory is never given back.

    Args:
        heap: Where the memory comes from.
    """

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.rank, self.ranks, self.device = heap.rank, heap.ranks, heap.device
        self._lent: Allocation | None = None

    def allocate(self, size: int) -> Allocation:
        """Return the memory lent before if it is large enough, else more."""
        if self._lent is None or self._lent.memory.numel() < size:
            self._lent = self._heap.allocate(size)
        return self._lent

    def gather(self, text: str) -> list[str]:
        """Return what each rank says."""
        return self._heap.gather(text)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._heap.barrier()
