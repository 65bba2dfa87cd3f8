"""A Triton kernel whose time is proportional to its number of rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def spin_kernel(out, rounds):
    """Step a generator of random numbers, in which each step waits for the one before."""
    x = tl.program_id(0) + 1
    for _ in range(rounds):
        x = x ^ (x << 13)
        x = x ^ (x >> 17)
        x = x ^ (x << 5)
    tl.store(out + tl.program_id(0), x)


def build(device: str, programs: int = 64) -> Callable[[int], Callable[[], None]]:
    """Return what makes the call of a number of rounds.

    Args:
        device: Torch's name of the device.
        programs: Number of programs, of one warp each.
    """
    out = torch.empty(programs, dtype=torch.int32, device=device)

    def call_of(rounds: int) -> Callable[[], None]:
        return lambda: spin_kernel[(programs,)](out, rounds, num_warps=1) and None

    return call_of
