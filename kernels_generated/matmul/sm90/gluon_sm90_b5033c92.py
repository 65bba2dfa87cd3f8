# matmul / gluon_sm90: c = activation(a b + bias) through a ring of 8 stages filled by TMA, loads
# and products issued by the same warps.
# BLOCK_K=64, BLOCK_M=64, BLOCK_N=128, CONSUMERS=1, GROUP_M=4, IN_FLIGHT=1, NUM_WARPS=4,
# SCHEDULE=pipelined, STAGES=8, SWIZZLE=128
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

STRIDED = ("b",)  # inputs that may have any strides

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.constexpr_function
def accumulator_layout(BLOCK_N, num_warps):
    """Return the layout of a float32 accumulator whose rows are divided among the warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, min(BLOCK_N, 256), 16]
    )


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """Return the ring's next slot and the parity that its barriers will have there."""
    wraps = slot + 1 == STAGES
    return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def grouped_tile(tile, M, N, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    # 4 rows of tiles are walked column by column: programs that run at the same time
    # share their blocks of a and b in L2
    GROUP_M: gl.constexpr = 4
    tiles_in_group = GROUP_M * gl.cdiv(N, BLOCK_N)
    first = tile // tiles_in_group * GROUP_M
    rows = gl.minimum(gl.cdiv(M, BLOCK_M) - first, GROUP_M)
    place = tile % tiles_in_group
    return (first + place % rows) * BLOCK_M, place // rows * BLOCK_N


@gluon.jit
def finish(accumulator, bias_ptr, off_n, N, ACTIVATION: gl.constexpr, layout: gl.constexpr):
    """Return the activation of accumulator + bias."""
    if bias_ptr is not None:
        columns = off_n + gl.arange(0, accumulator.shape[1], gl.SliceLayout(0, layout))
        bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(gl.float32)
        accumulator += gl.expand_dims(bias, 0)
    if ACTIVATION == "relu":
        accumulator = gl.where(accumulator < 0.0, 0.0, accumulator)  # NaN stays NaN
    elif ACTIVATION == "gelu":
        accumulator = 0.5 * accumulator * (1.0 + gl.erf(accumulator * 0.7071067811865476))
    elif ACTIVATION == "silu":
        accumulator = accumulator / (1.0 + gl.exp(-accumulator))
    return accumulator


@gluon.jit
def load_stage(
    a_desc,
    b_desc,
    a_ring,
    b_ring,
    ready,
    slot,
    off_m,
    off_n,
    off_k,
    wanted,
    TRANSPOSED: gl.constexpr,
):
    """Start the copies of one stage; the barrier `ready[slot]` completes with them."""
    STAGE_BYTES: gl.constexpr = 24576
    bar = ready.index(slot)
    mbarrier.expect(bar, STAGE_BYTES, pred=wanted)
    tma_load(a_desc, [off_m, off_k], bar, a_ring.index(slot), pred=wanted)
    if TRANSPOSED:
        tma_load(b_desc, [off_n, off_k], bar, b_ring.index(slot), pred=wanted)
    else:
        tma_load(b_desc, [off_k, off_n], bar, b_ring.index(slot), pred=wanted)


@gluon.jit
def matmul_kernel(
    a_desc,  # [M, K]
    b_desc,  # [N, K] if TRANSPOSED else [K, N]
    bias_ptr,  # [N], or None
    c_desc,  # [M, N]
    M,
    N,
    K,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    STAGES: gl.constexpr = 8
    A_SHAPE: gl.constexpr = [STAGES] + a_desc.block_type.shape
    B_SHAPE: gl.constexpr = [STAGES] + b_desc.block_type.shape
    a_ring = gl.allocate_shared_memory(a_desc.dtype, A_SHAPE, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, B_SHAPE, b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()

    off_m, off_n = grouped_tile(gl.program_id(0), M, N, 64, 128)
    AHEAD: gl.constexpr = 7
    for slot in gl.static_range(AHEAD):
        load_stage(
            *(a_desc, b_desc, a_ring, b_ring, ready, slot, off_m, off_n),
            *(slot * 64, slot * 64 < K, TRANSPOSED),
        )
    layout: gl.constexpr = accumulator_layout(128, 4)
    accumulator = gl.zeros([64, 128], gl.float32, layout)
    slot = 0
    phase = 0
    fill = AHEAD % STAGES
    for off_k in range(0, K, 64):
        mbarrier.wait(ready.index(slot), phase)
        b = b_ring.index(slot)
        if TRANSPOSED:
            b = b.permute((1, 0))  # [BLOCK_K, BLOCK_N]
        accumulator = warpgroup_mma(a_ring.index(slot), b, accumulator, is_async=True)
        accumulator = warpgroup_mma_wait(1, deps=(accumulator,))
        # the stage that was consumed one product before is free
        ahead_k = off_k + AHEAD * 64
        load_stage(
            *(a_desc, b_desc, a_ring, b_ring, ready, fill, off_m, off_n),
            *(ahead_k, ahead_k < K, TRANSPOSED),
        )
        fill = gl.where(fill + 1 == STAGES, 0, fill + 1)
        slot, phase = next_slot(slot, phase, STAGES)
    accumulator = warpgroup_mma_wait(0, deps=(accumulator,))

    c_tile = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_type.shape, c_desc.layout)
    accumulator = finish(accumulator, bias_ptr, off_n, N, ACTIVATION, layout)
    c_tile.store(accumulator.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [off_m, off_n], c_tile)
    tma.store_wait(0)


@triton.jit
def finish_unaligned(accumulator, bias_ptr, columns, N, ACTIVATION: tl.constexpr):
    """Return the activation of accumulator + bias."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)
        accumulator += bias.to(tl.float32)
    if ACTIVATION == "relu":
        accumulator = tl.where(accumulator < 0.0, 0.0, accumulator)  # NaN stays NaN
    elif ACTIVATION == "gelu":
        accumulator = 0.5 * accumulator * (1.0 + tl.erf(accumulator * 0.7071067811865476))
    elif ACTIVATION == "silu":
        accumulator = accumulator / (1.0 + tl.exp(-accumulator))
    return accumulator


@triton.jit
def unaligned_matmul_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    bias_ptr,  # [N], or None
    c_ptr,  # [M, N]
    M,
    N,
    K,
    stride_bk,
    stride_bn,
    EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    BLOCK_M: tl.constexpr = 64
    BLOCK_N: tl.constexpr = 64
    BLOCK_K: tl.constexpr = 32
    off_m = tl.program_id(0) // tl.cdiv(N, BLOCK_N) * BLOCK_M
    off_n = tl.program_id(0) % tl.cdiv(N, BLOCK_N) * BLOCK_N
    rows = off_m + tl.arange(0, BLOCK_M)
    columns = off_n + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    row_mask = rows < M
    column_mask = columns < N
    # 64-bit: an offset into a large matrix does not fit 32 bits
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * K + depth[None, :]  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + (  # [BLOCK_K, BLOCK_N]
        depth.to(tl.int64)[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
    )
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_mask[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=column_mask[None, :], other=0.0)
        else:
            depth_mask = depth < K - start
            a = tl.load(a_ptrs, mask=row_mask[:, None] & depth_mask[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=depth_mask[:, None] & column_mask[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk
    c_ptrs = c_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]  # [BLOCK_M, BLOCK_N]
    c = finish_unaligned(accumulator, bias_ptr, columns, N, ACTIVATION).to(c_ptr.dtype.element_ty)
    tl.store(c_ptrs, c, mask=row_mask[:, None] & column_mask[None, :])


RING_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
C_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    transposed_b: bool = False,
    allow_tf32: bool = False,
) -> None:
    """Write the activation of a b + bias to c [M, N]; a is [M, K], and bias [N].

    b is [K, N], or [N, K] if transposed_b, with any strides.
    All products are exact, whether or not allow_tf32.
    """
    M, K = a.shape
    N = c.shape[1]
    if M == 0 or N == 0:
        return
    if transposed_b:
        b = b.T
    transposed = b.stride(0) == 1
    rows_of_b = b.T if transposed else b
    # a descriptor's rows are contiguous and start at multiples of 16 bytes
    row_bytes = K | N | rows_of_b.stride(0)
    aligned = (row_bytes * a.element_size() | a.data_ptr() | b.data_ptr() | c.data_ptr()) % 16 == 0
    if K == 0 or not aligned or rows_of_b.stride(1) != 1:
        grid = (((M + 63) // 64) * ((N + 63) // 64),)
        unaligned_matmul_kernel[grid](
            *(a, b, bias, c, M, N, K, b.stride(0), b.stride(1)),
            EVEN_K=K % 32 == 0,
            ACTIVATION=activation,
            num_stages=2,
        )
        return
    block_b = [128, 64] if transposed else [64, 128]
    tiles = ((M + 63) // 64) * ((N + 127) // 128)
    grid = (tiles,)
    matmul_kernel[grid](
        TensorDescriptor.from_tensor(a, [64, 64], RING_LAYOUT),
        TensorDescriptor.from_tensor(rows_of_b, block_b, RING_LAYOUT),
        bias,
        TensorDescriptor.from_tensor(c, [64, 128], C_LAYOUT),
        *(M, N, K),
        TRANSPOSED=transposed,
        ACTIVATION=activation,
        num_warps=4,
    )
