# matmul / triton_split_k: c = a b for few rows, K divided among 4 programs, on matrix units.
# BLOCK_K=64, BLOCK_M=16, BLOCK_N=64, NUM_STAGES=4, NUM_WARPS=4, REDUCTION=second_kernel,
# SPLIT_K=4, SWAP=false
import torch
import triton
import triton.language as tl

STRIDED = ("b",)  # inputs that may have any strides


@triton.jit
def matmul_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    c_ptr,  # [M, N]
    partial_ptr,  # [SPLIT_K, M, N]
    M,
    N,
    K,
    stride_bk,
    stride_bn,
    EVEN_K: tl.constexpr,
):
    BLOCK_M: tl.constexpr = 16
    BLOCK_N: tl.constexpr = 64
    BLOCK_K: tl.constexpr = 64
    tile = tl.program_id(0)
    SPLIT_K: tl.constexpr = 4
    split = tl.program_id(1)
    row_of_tiles = tile // tl.cdiv(N, BLOCK_N)
    columns = tile % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = split * BLOCK_K + tl.arange(0, BLOCK_K)
    column_mask = columns < N
    # 64-bit: an offset into a large matrix does not fit 32 bits
    rows = row_of_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * K + depth[None, :]  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + (  # [BLOCK_K, BLOCK_N]
        depth.to(tl.int64)[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
    )
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    STEP_K: tl.constexpr = SPLIT_K * BLOCK_K
    for start in tl.range(split * BLOCK_K, K, STEP_K, num_stages=4):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_mask[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=column_mask[None, :], other=0.0)
        else:
            depth_mask = start + tl.arange(0, BLOCK_K) < K
            a = tl.load(a_ptrs, mask=row_mask[:, None] & depth_mask[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=depth_mask[:, None] & column_mask[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_ptrs += STEP_K
        b_ptrs += tl.cast(STEP_K, tl.int64) * stride_bk
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    size = tl.cast(M, tl.int64) * N
    tl.store(partial_ptr + split * size + offsets, accumulator, mask=mask)


@triton.jit
def add_parts_kernel(
    partial_ptr,  # [SPLIT_K, size]
    c_ptr,  # [size]
    size,
):
    SPLIT_K: tl.constexpr = 4
    BLOCK: tl.constexpr = 1024
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offsets = tl.arange(0, SPLIT_K).to(tl.int64)[:, None] * size + places[None, :]
    parts = tl.load(partial_ptr + offsets, mask=(places < size)[None, :], other=0.0)
    total = tl.sum(parts, axis=0)  # [BLOCK]
    tl.store(c_ptr + places, total.to(c_ptr.dtype.element_ty), mask=places < size)


def matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """Write the product of a [M, K] and b [K, N], whose strides are free, to c [M, N]."""
    M, K = a.shape
    N = b.shape[1]
    if M == 0 or N == 0:
        return
    tiles = ((M + 15) // 16) * ((N + 63) // 64)
    partial = torch.empty((4, M, N), dtype=torch.float32, device=a.device)
    matmul_kernel[(tiles, 4)](
        *(a, b, c, partial, M, N, K, b.stride(0), b.stride(1)),
        EVEN_K=K % 64 == 0,
        num_warps=4,
        num_stages=4,
    )
    grid = ((M * N + 1023) // 1024,)
    add_parts_kernel[grid](partial, c, M * N)
