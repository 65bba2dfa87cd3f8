"""Small Gluon kernels that each need one layout, and one that asks for much shared memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Triton and Gluon have no types.

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FEATURES = ("blocked", "swizzled_shared", "padded_shared", "nvmma_shared")
"""Layouts, as `try_feature` knows them."""

SIZE = 32

CHUNK = 1024
"""Bytes by which an amount of shared memory can be chosen."""


@gluon.jit
def blocked_kernel(x, y, SIZE: gl.constexpr, LANES: gl.constexpr):
    """Copy x to y, [SIZE] each."""
    layout: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    offsets = gl.arange(0, SIZE, layout=layout)
    gl.store(y + offsets, gl.load(x + offsets))


@gluon.jit
def shared_kernel(
    x,
    y,
    SIZE: gl.constexpr,
    LANES: gl.constexpr,
    SHARED: gl.constexpr,
):
    """Copy x to y, [SIZE, SIZE] each, through shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, LANES], [1, 1], [1, 0])
    rows = gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    offsets = rows[:, None] * SIZE + columns[None, :]
    memory = gl.allocate_shared_memory(gl.float16, [SIZE, SIZE], SHARED)
    memory.store(gl.load(x + offsets))
    gl.store(y + offsets, memory.load(layout))


@gluon.jit
def bulk_kernel(
    x,
    y,
    CHUNKS: gl.constexpr,
    CHUNK: gl.constexpr,
    LANES: gl.constexpr,
):
    """Copy x to y, [CHUNK] int8 each, through the last of CHUNKS pieces of shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    offsets = gl.arange(0, CHUNK, layout=layout)
    memory = gl.allocate_shared_memory(gl.int8, [CHUNKS, CHUNK], shared)
    last = memory.index(CHUNKS - 1)
    last.store(gl.load(x + offsets))
    gl.store(y + offsets, last.load(layout))


def try_feature(name: str, device: str, lanes: int) -> str | None:
    """Return what is wrong with a layout's result, or None; raises what triton raises.

    Args:
        name: One of `FEATURES`.
        device: Torch's name of the device.
        lanes: Threads in a warp.
    """
    x = torch.arange(SIZE * SIZE, device=device).to(torch.float16)
    y = torch.zeros_like(x)
    if name == "blocked":
        blocked_kernel[(1,)](x, y, SIZE=SIZE * SIZE, LANES=lanes, num_warps=1)
    else:
        shared_kernel[(1,)](x, y, SIZE=SIZE, LANES=lanes, SHARED=_shared_layout(name), num_warps=1)
    return None if torch.equal(x, y) else "gives wrong results"


def try_shared_bytes(chunks: int, device: str, lanes: int) -> None:
    """Use an amount of shared memory; raises what triton raises where there is less.

    Args:
        chunks: The amount, in `CHUNK` bytes.
        device: Torch's name of the device.
        lanes: Threads in a warp.
    """
    x = torch.arange(CHUNK, device=device).to(torch.int8)
    y = torch.zeros_like(x)
    bulk_kernel[(1,)](x, y, CHUNKS=chunks, CHUNK=CHUNK, LANES=lanes, num_warps=1)
    if not torch.equal(x, y):
        raise RuntimeError(f"{chunks * CHUNK} bytes of shared memory give wrong results")


def _shared_layout(name: str) -> object:
    if name == "padded_shared":
        return gl.PaddedSharedLayout.with_identity_for([[SIZE, 8]], [SIZE, SIZE], [1, 0])
    if name == "nvmma_shared":
        return gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    return gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
