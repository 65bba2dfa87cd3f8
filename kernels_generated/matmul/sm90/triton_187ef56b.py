# matmul / triton: c = a b, one output tile per program, loaded through pointers.
# BLOCK_K=64, BLOCK_M=128, BLOCK_N=256, GROUP_M=8, NUM_STAGES=3, NUM_WARPS=8
import torch
import triton
import triton.language as tl

STRIDED = ("b",)  # inputs that may have any strides


@triton.jit
def grouped_tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # 8 rows of tiles are walked column by column: programs that run at the same time
    # share their blocks of a and b in L2
    GROUP_M: tl.constexpr = 8
    tiles_in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first = tile // tiles_in_group * GROUP_M
    rows = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    place = tile % tiles_in_group
    return (first + place % rows) * BLOCK_M, place // rows * BLOCK_N


@triton.jit
def matmul_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    c_ptr,  # [M, N]
    M,
    N,
    K,
    stride_bk,
    stride_bn,
    EVEN_K: tl.constexpr,
):
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 256
    BLOCK_K: tl.constexpr = 64
    off_m, off_n = grouped_tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
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
    c = accumulator.to(c_ptr.dtype.element_ty)
    tl.store(c_ptrs, c, mask=row_mask[:, None] & column_mask[None, :])


def matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """Write the product of a [M, K] and b [K, N], whose strides are free, to c [M, N]."""
    M, K = a.shape
    N = b.shape[1]
    if M == 0 or N == 0:
        return
    tiles = ((M + 127) // 128) * ((N + 255) // 256)
    matmul_kernel[(tiles,)](
        *(a, b, c, M, N, K, b.stride(0), b.stride(1)),
        EVEN_K=K % 64 == 0,
        num_warps=8,
        num_stages=3,
    )
