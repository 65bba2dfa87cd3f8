"""A Triton kernel that does nothing: what a launch costs."""

from __future__ import annotations

import triton


@triton.jit  # type: ignore[untyped-decorator] # triton has no types
def empty_kernel() -> None:
    """Do nothing."""
    pass


def launch() -> None:
    """Launch one program of one warp."""
    empty_kernel[(1,)](num_warps=1)
