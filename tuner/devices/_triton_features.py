"""Small Triton kernels that each need one feature, to find out whether a device has it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Triton and Gluon have no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

SIZE = 32
"""Extent of the square blocks: the least that every dot accepts."""

FEATURES = (
    *("dot_float32", "dot_tf32", "dot_float16", "dot_bfloat16", "dot_float8_e4m3fn"),
    *("dot_float8_e5m2", "dot_int8", "atomic_add_int32", "atomic_add_float32"),
    *("atomic_add_float16", "atomic_add_bfloat16", "tensor_descriptors"),
)


@triton.jit
def dot_kernel(a, b, c, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply, c = a b, [SIZE, SIZE] each."""
    rows = tl.arange(0, SIZE)
    offsets = rows[:, None] * SIZE + rows[None, :]
    product = tl.dot(tl.load(a + offsets), tl.load(b + offsets), input_precision=PRECISION)
    tl.store(c + offsets, product)


@triton.jit
def atomic_kernel(total):
    """Add 1 to total [1]."""
    tl.atomic_add(total, 1)


@triton.jit
def descriptor_kernel(x, y, SIZE: tl.constexpr):
    """Copy x to y, [SIZE, SIZE] each, through tensor descriptors."""
    source = tl.make_tensor_descriptor(x, [SIZE, SIZE], [SIZE, 1], [SIZE, SIZE])
    target = tl.make_tensor_descriptor(y, [SIZE, SIZE], [SIZE, 1], [SIZE, SIZE])
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def warp_kernel(x):
    """Write a 1 to x [1], with however many warps it is launched."""
    tl.store(x, 1)


def try_feature(name: str, device: str) -> str | None:
    """Return what is wrong with a feature's result, or None; raises what triton raises.

    Args:
        name: One of `FEATURES`.
        device: Torch's name of the device.
    """
    if name == "tensor_descriptors":
        return _try_descriptors(device)
    kind, _, dtype = name.rpartition("_add_") if "atomic" in name else name.partition("_")
    return (_try_atomic if kind == "atomic" else _try_dot)(dtype, device)


def largest_warps(device: str, limit: int = 64) -> int:
    """Return the largest number of warps, a power of two, that a program launches with."""
    found, warps = 0, 1
    while warps <= limit:
        x = torch.zeros(1, dtype=torch.int32, device=device)
        try:
            warp_kernel[(1,)](x, num_warps=warps)
            if int(x.item()) != 1:
                break
        except Exception:  # whatever the driver says: so many do not launch
            break
        found, warps = warps, 2 * warps
    return found


def _try_dot(dtype: str, device: str) -> str | None:
    integer = dtype == "int8"
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers are exact in every type, and so are their sums.
    a, b = (torch.randint(-2, 3, (SIZE, SIZE), generator=generator) for _ in range(2))
    element = getattr(torch, "float32" if dtype == "tf32" else dtype)
    left, right = (x.float().to(element).to(device) for x in (a, b))
    c = torch.zeros(SIZE, SIZE, dtype=torch.int32 if integer else torch.float32, device=device)
    precision = "tf32" if dtype == "tf32" else "ieee"
    dot_kernel[(1,)](left, right, c, SIZE=SIZE, PRECISION=precision)
    return _difference(c, a @ b)


def _try_atomic(dtype: str, device: str) -> str | None:
    total = torch.zeros(1, dtype=getattr(torch, dtype), device=device)
    atomic_kernel[(64,)](total)
    return _difference(total, torch.tensor([64]))


def _try_descriptors(device: str) -> str | None:
    def allocate(size: int, alignment: int, stream: Any) -> torch.Tensor:
        del alignment, stream
        return torch.empty(size, dtype=torch.int8, device=device)

    set_allocator: Callable[..., None] = triton.set_allocator
    set_allocator(allocate)
    x = torch.arange(SIZE * SIZE, dtype=torch.float16, device=device).view(SIZE, SIZE)
    y = torch.zeros_like(x)
    descriptor_kernel[(1,)](x, y, SIZE=SIZE)
    return _difference(y, x)


def _difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    got, expected = got.double().cpu(), expected.double().cpu()
    if torch.equal(got, expected):
        return None
    return f"gives wrong results: {got.flatten()[0]:g} for {expected.flatten()[0]:g}"
