"""Dispatch and combine of tokens over the GPUs of one host that hold different experts.

Names are DeepEP's. All ranks make the same calls in the same order:

    buffer = LowLatencyBuffer(group, max_tokens=128, hidden=7168, num_experts=256, topk=8)
    recv_x, scales, recv_count, handle, _ = buffer.dispatch(x, topk_idx, topk_weights, fp8=True)
    view = buffer.get_next_combine_buffer(handle)  # the experts' last product writes into it
    out, _ = buffer.combine(view, topk_idx, topk_weights, handle, zero_copy=True)

`moe_dispatch` and `moe_combine` of this package serve it where they are frozen, else its own
default kernels. Written by `tune freeze`: changes are overwritten.
"""

from ._runtime.moe import (
    Combined,
    Dispatched,
    ExchangeError,
    Handle,
    LocalGroup,
    LowLatencyBuffer,
    MisuseError,
    PeerTimeout,
)

__all__ = [
    "Combined",
    "Dispatched",
    "ExchangeError",
    "Handle",
    "LocalGroup",
    "LowLatencyBuffer",
    "MisuseError",
    "PeerTimeout",
]
