# matmul / triton_tma: c = a b, one output tile per program, loaded and stored through tensor
# descriptors.
# BLOCK_K=64, BLOCK_M=128, BLOCK_N=128, EPILOGUE_SPLIT=1, GROUP_M=8, NUM_STAGES=3, NUM_WARPS=8,
# PROGRAMS_PER_UNIT=0
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

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
def matmul_tile(tile, a_desc, b_desc, c_desc, M, N, K, TRANSPOSED: tl.constexpr):
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 128
    BLOCK_K: tl.constexpr = 64
    off_m, off_n = grouped_tile(tile, M, N, BLOCK_M, BLOCK_N)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for off_k in range(0, K, BLOCK_K):
        a = a_desc.load([off_m, off_k])  # [BLOCK_M, BLOCK_K]
        if TRANSPOSED:
            b = b_desc.load([off_n, off_k]).T
        else:
            b = b_desc.load([off_k, off_n])  # [BLOCK_K, BLOCK_N]
        accumulator = tl.dot(a, b, accumulator)
    c_desc.store([off_m, off_n], accumulator.to(c_desc.dtype))


@triton.jit
def matmul_kernel(
    a_desc,  # [M, K]
    b_desc,  # [N, K] if TRANSPOSED else [K, N]
    c_desc,  # [M, N]
    M,
    N,
    K,
    TRANSPOSED: tl.constexpr,
):
    matmul_tile(tl.program_id(0), a_desc, b_desc, c_desc, M, N, K, TRANSPOSED)


@triton.jit
def unaligned_matmul_kernel(
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
    c = accumulator.to(c_ptr.dtype.element_ty)
    tl.store(c_ptrs, c, mask=row_mask[:, None] & column_mask[None, :])


def matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    """Write the product of a [M, K] and b [K, N], whose strides are free, to c [M, N]."""
    M, K = a.shape
    N = b.shape[1]
    if M == 0 or N == 0:
        return
    transposed = b.stride(0) == 1
    rows_of_b = b.T if transposed else b
    # a descriptor's rows are contiguous and start at multiples of 16 bytes
    row_bytes = K | N | rows_of_b.stride(0)
    aligned = (row_bytes * a.element_size() | a.data_ptr() | b.data_ptr() | c.data_ptr()) % 16 == 0
    if K == 0 or not aligned or rows_of_b.stride(1) != 1:
        grid = (((M + 63) // 64) * ((N + 63) // 64),)
        strides = b.stride()
        unaligned_matmul_kernel[grid](a, b, c, M, N, K, *strides, EVEN_K=K % 32 == 0, num_stages=2)
        return
    block_b = [128, 64] if transposed else [64, 128]
    tiles = ((M + 127) // 128) * ((N + 127) // 128)
    grid = (tiles,)
    matmul_kernel[grid](
        TensorDescriptor.from_tensor(a, [128, 64]),
        TensorDescriptor.from_tensor(rows_of_b, block_b),
        TensorDescriptor.from_tensor(c, [128, 128]),
        *(M, N, K),
        TRANSPOSED=transposed,
        num_warps=8,
        num_stages=3,
    )
