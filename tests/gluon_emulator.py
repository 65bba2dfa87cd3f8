"""Gluon for Hopper on the CPU: partitions are threads, tensors torch's, layouts nothing.

It runs a rendered file's kernels as they stand, and is strict where the card would be silently
wrong or hang: a product reads shared memory when it is waited for, a copy to global memory when
its group is, both fail on memory that was stored to and not fenced, a result cannot be used while
it is in flight, and a barrier that nobody can complete raises `Deadlock`.

A file that is imported under `emulated()` uses it; plain Triton kernels need the interpreter.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import torch

LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg")

_here = threading.local()
_memory = threading.Lock()  # additions to global memory are atomic


class Deadlock(Exception):
    """All partitions wait."""


class Program:
    """One program: its place in the grid, and the condition on which its partitions wait."""

    def __init__(
        self, place: tuple[int, ...], grid: tuple[int, ...], failures: list[BaseException]
    ) -> None:
        self.place, self.grid, self.failures = place, grid, failures
        self.changed = threading.Condition()
        self.running = 1
        self.waiting: dict[Partition, tuple[Barrier, int]] = {}
        self.polling: set[Partition] = set()  # who waits for other programs, and nobody for them

    def stuck(self) -> bool:
        """Return whether every partition waits for a barrier that is still in its phase."""
        waiting = self.waiting.values()
        return len(waiting) == self.running - len(self.polling) and all(
            barrier.phase % 2 == parity for barrier, parity in waiting
        )

    def poll(self, partition: Partition) -> None:
        """Let others run, as long as they do."""
        self.polling.add(partition)
        partition.polls += 1
        if self.failures or partition.polls > 20_000:
            raise Deadlock("what a partition polls for does not come")
        time.sleep(1e-3)


class Partition:
    """What one thread has in flight: products, and groups of copies from shared memory."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.products: deque[Product] = deque()
        self.groups: deque = deque()
        self.unfenced: set[int] = set()
        self.polls = 0

    def drain(self, queue: deque, left: int) -> None:
        while len(queue) > left:
            queue.popleft()()

    def finish(self) -> None:
        assert not self.products, "a partition ended with products in flight"
        assert not self.groups, "a partition ended with copies in flight"


@dataclass
class Layout:
    """Any layout: what it was made with."""

    arguments: tuple
    options: dict


def layout(*arguments, **options) -> Layout:
    return Layout(arguments, options)


class Shared:
    """A view of shared memory."""

    def __init__(self, data: torch.Tensor, base: int) -> None:
        self.data, self.base = data, base
        self.shape, self.dtype = list(data.shape), data.dtype

    def index(self, slot) -> Shared:
        assert 0 <= int(slot) < self.shape[0], f"slot {slot} of {self.shape}"
        return Shared(self.data[int(slot)], self.base)

    def reshape(self, shape) -> Shared:
        return Shared(self.data.view(shape), self.base)

    def permute(self, order) -> Shared:
        return Shared(self.data.permute(order), self.base)

    def slice(self, start, length, dim) -> Shared:
        return Shared(self.data.narrow(dim, start, length), self.base)

    def load(self, layout) -> torch.Tensor:
        del layout  # which thread holds what changes nothing here
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        assert list(value.shape) == self.shape, f"{list(value.shape)} into {self.shape}"
        assert value.dtype == self.dtype, f"{value.dtype} into {self.dtype}"
        self.data.copy_(value)
        _here.partition.unfenced.add(self.base)

    def read_by_hardware(self) -> torch.Tensor:
        assert self.base not in _here.partition.unfenced, "a fence is missing before a read"
        return self.data.clone()


class Barrier:
    """An mbarrier: a phase ends when the arrivals and the bytes of its transfers are in."""

    def __init__(self) -> None:
        self.count = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def change(self, arrivals: int, size: int) -> None:
        changed = _here.partition.program.changed
        with changed:
            self.pending -= arrivals
            self.bytes += size
            assert self.pending >= 0, "too many arrivals at a barrier"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase + 1
            changed.notify_all()

    def wait(self, parity: int) -> None:
        assert self.count, "a barrier was not initialised"
        partition = _here.partition
        program = partition.program
        with program.changed:
            program.waiting[partition] = (self, parity)
            while self.phase % 2 == parity:
                if program.failures or program.stuck():
                    program.changed.notify_all()
                    raise Deadlock(f"a barrier stays in phase {self.phase}")
                program.changed.wait(1.0)
            del program.waiting[partition]


class Barriers:
    """Barriers in shared memory."""

    def __init__(self, count: int) -> None:
        self.items = [Barrier() for _ in range(count)]

    def index(self, slot) -> Barrier:
        return self.items[int(slot)]


class Product:
    """A wgmma in flight: it reads shared memory when it is waited for."""

    def __init__(self, a, b, accumulator) -> None:
        self.a, self.b, self.accumulator = a, b, accumulator
        self.value: torch.Tensor | None = None

    def __call__(self) -> None:
        a = self.a.read_by_hardware() if isinstance(self.a, Shared) else self.a
        result = a.float() @ self.b.read_by_hardware().float()
        if self.accumulator is not None:
            result += settled(self.accumulator)
        self.value = result


def settled(value):
    """Return a product's result once it is there; as long as it is not, the product."""
    if isinstance(value, Product) and value.value is not None:
        return value.value
    return value


class Pointer:
    """A pointer, or a block of pointers, into a tensor."""

    def __init__(self, memory: torch.Tensor, offset=0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset) -> Pointer:
        return Pointer(self.memory, self.offset + offset)


class TensorDescriptor:
    """A descriptor for copies by TMA."""

    def __init__(self, tensor: torch.Tensor, block: list[int], layout: Layout) -> None:
        assert tensor.data_ptr() % 16 == 0
        assert tensor.stride(-1) == 1
        assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1])
        assert all(size == 1 << (size - 1).bit_length() <= 256 for size in block[:-1])
        self.tensor, self.layout, self.dtype = tensor, layout, tensor.dtype
        self.block_type = SimpleNamespace(
            shape=list(block), nbytes=math.prod(block) * tensor.itemsize
        )

    @classmethod
    def from_tensor(cls, tensor, block_shape, layout) -> TensorDescriptor:
        return cls(tensor, block_shape, layout)

    def inside(self, corner) -> tuple[tuple, tuple]:
        """Return the part of a block that lies in the tensor: there, and in the block."""
        begins = [int(place) for place in corner]
        assert len(begins) == self.tensor.ndim
        counts = [
            max(0, min(begin + size, extent) - begin)
            for begin, size, extent in zip(
                begins, self.block_type.shape, self.tensor.shape, strict=True
            )
        ]
        pairs = list(zip(begins, counts, strict=True))
        there = tuple(slice(begin, begin + count) for begin, count in pairs)
        return there, tuple(slice(0, count) for count in counts)


def async_load(descriptor, corner, barrier, target, pred=True) -> None:
    if not pred:
        return
    assert target.shape == descriptor.block_type.shape, f"{target.shape} of {descriptor}"
    there, here = descriptor.inside(corner)
    target.data.zero_()
    target.data[here] = descriptor.tensor[there]
    barrier.change(0, -descriptor.block_type.nbytes)


def _to_global(descriptor, corner, source, add: bool) -> None:
    assert source.shape == descriptor.block_type.shape
    there, here = descriptor.inside(corner)
    source.read_by_hardware()

    def copy() -> None:
        part = source.data[here]
        with _memory:
            descriptor.tensor[there] = descriptor.tensor[there] + part if add else part

    _here.partition.groups.append(copy)


def warpgroup_mma(a, b, accumulator, use_acc=True, is_async=False):
    assert is_async
    assert a.shape[1] == b.shape[0]
    product = Product(a, b, accumulator if use_acc else None)
    _here.partition.products.append(product)
    return product


def warpgroup_mma_wait(left=0, deps=()):
    partition = _here.partition
    partition.drain(partition.products, left)
    results = tuple(settled(value) for value in deps)
    return results if len(results) > 1 else results[0]


def warp_specialize(parts, warps, registers) -> None:
    assert len(parts) == len(warps) + 1 == len(registers) + 1
    assert all(count % 8 == 0 and 24 <= count <= 240 for count in registers)
    program = _here.partition.program
    program.running = len(parts)

    def run(function, arguments) -> None:
        _here.partition = Partition(program)
        try:
            function(*arguments)
            _here.partition.finish()
        except BaseException as error:
            program.failures.append(error)
        with program.changed:
            program.running -= 1
            program.polling.discard(_here.partition)
            program.changed.notify_all()

    threads = [threading.Thread(target=run, args=part, daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a partition hangs"
    if program.failures:
        raise program.failures[0]


class Kernel:
    """A `gluon.jit` function: called by another one, or launched on a grid."""

    def __init__(self, function) -> None:
        self.function = function

    def __call__(self, *arguments, **options):
        return self.function(*arguments, **options)

    def __getitem__(self, grid):
        def launch(*arguments, **options) -> None:
            taken = {k: v for k, v in options.items() if k not in LAUNCH_OPTIONS}
            values = [_argument(value) for value in arguments]
            failures: list[BaseException] = []

            def run(place: tuple[int, ...]) -> None:
                _here.partition = Partition(Program(place, grid, failures))
                self.function(*values, **taken)
                _here.partition.finish()

            # a program may wait for another, which may not have started
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(run, itertools.product(*map(range, grid))))

        return launch


def _argument(value):
    if isinstance(value, torch.Tensor):
        return Pointer(value.view(-1))
    return torch.tensor(value) if isinstance(value, int) else value


def jit(function=None, **options):
    return Kernel(function) if function else Kernel


def allocate_shared_memory(dtype, shape, layout):
    if layout == "barriers":
        return Barriers(shape[0])
    data = torch.full(shape, math.nan if dtype.is_floating_point else 1 << 30, dtype=dtype)
    return Shared(data, data.data_ptr())


def load(pointer, mask=None, other=0.0):
    if mask is None:
        return pointer.memory[pointer.offset]
    inside = torch.where(mask, pointer.offset, 0)
    return torch.where(mask, pointer.memory[inside], other)


def store(pointer, value, mask=None) -> None:
    offset, value = torch.broadcast_tensors(pointer.offset, value)
    mask = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.expand_as(offset)
    pointer.memory[offset[mask]] = value[mask].to(pointer.memory.dtype)


def atomic_add(pointer, value, sem, mask=True):
    offset, value = (torch.as_tensor(item).flatten() for item in (pointer.offset, value))
    if len(value) == 1 and not value.any():  # a look at a counter
        _here.partition.program.poll(_here.partition)
    with _memory:
        old = pointer.memory[offset]
        if mask:
            pointer.memory.index_add_(0, offset, value.to(pointer.memory.dtype))
    return old if len(old) > 1 else old[0]


def inline_asm_elementwise(instruction, constraints, values, *_, **__):
    """Copy, or wait until all but some additions are in global memory: no other one is used."""
    if instruction == "mov.b32 $0, $1;":
        return values[0]
    left = re.fullmatch(r"cp\.async\.bulk\.wait_group (\d); // \$0", instruction)
    _here.partition.drain(_here.partition.groups, int(left[1]))
    return None


def _pair(function):
    return lambda one, other: function(torch.as_tensor(one), torch.as_tensor(other))


def language() -> ModuleType:
    gl = ModuleType("triton.experimental.gluon.language")
    gl.__dict__.update(
        constexpr=object,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        num_warps=lambda: 4,
        program_id=lambda axis: torch.tensor(_here.partition.program.place[axis]),
        num_programs=lambda axis: _here.partition.program.grid[axis],
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        expand_dims=lambda value, axis: value.unsqueeze(axis),
        convert_layout=lambda value, layout, assert_trivial=False: value,
        where=lambda condition, *values: torch.where(torch.as_tensor(condition), *values),
        maximum=_pair(torch.maximum),
        minimum=_pair(torch.minimum),
        cdiv=lambda a, b: (a + b - 1) // b,
        exp=torch.exp,
        exp2=torch.exp2,
        erf=torch.erf,
        log2=torch.log2,
        max=torch.amax,
        sum=torch.sum,
        load=load,
        store=store,
        atomic_add=atomic_add,
        inline_asm_elementwise=inline_asm_elementwise,
        barrier=lambda: None,
        static_range=range,
        allocate_shared_memory=allocate_shared_memory,
        warp_specialize=warp_specialize,
        _core=SimpleNamespace(builtin=lambda function: function),
    )
    for kind in ("Blocked", "NVMMAShared", "NVMMADistributed", "Slice", "SwizzledShared"):
        setattr(gl, f"{kind}Layout", layout)
    gl.DotOperandLayout = layout
    return gl


@contextmanager
def emulated():
    """Stand in for the modules of Gluon while a rendered file is imported."""
    import triton.experimental.gluon.nvidia.hopper  # the true ones, which Triton imports late

    name = "triton.experimental.gluon"
    gluon, gl = ModuleType(name), language()
    gluon.jit, gluon.constexpr_function, gluon.language = jit, lambda function: function, gl
    hopper = ModuleType(f"{name}.language.nvidia.hopper")
    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, size, pred=True: barrier.change(1, size) if pred else None,
        arrive=lambda barrier, count=1, pred=True: barrier.change(count, 0) if pred else None,
        wait=lambda barrier, phase: barrier.wait(int(phase)),
    )
    hopper.tma = SimpleNamespace(
        async_load=async_load,
        async_store=lambda *arguments: _to_global(*arguments, add=False),
        async_atomic_add=lambda *arguments: _to_global(*arguments, add=True),
        store_wait=lambda left: _here.partition.drain(_here.partition.groups, left),
    )
    hopper.fence_async_shared = lambda: _here.partition.unfenced.clear()
    hopper.warpgroup_mma, hopper.warpgroup_mma_wait = warpgroup_mma, warpgroup_mma_wait
    host = ModuleType(f"{name}.nvidia.hopper")
    host.TensorDescriptor = TensorDescriptor
    stand_ins = {module.__name__: module for module in (gluon, gl, hopper, host)}
    true = {name: sys.modules[name] for name in stand_ins}
    sys.modules |= stand_ins
    triton.experimental.gluon = gluon
    try:
        yield
    finally:
        sys.modules |= true
        triton.experimental.gluon = true[name]
