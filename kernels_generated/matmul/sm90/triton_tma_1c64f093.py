# matmul / triton_tma: c = activation(a b + bias), one output tile per program, loaded and stored
# through tensor descriptors.
# BLOCK_K=32, BLOCK_M=128, BLOCK_N=256, EPILOGUE_SPLIT=1, GROUP_M=8, NUM_STAGES=6, NUM_WARPS=8,
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
def finish(accumulator, bias_ptr, columns, N, ACTIVATION: tl.constexpr):
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
def matmul_tile(
    tile,
    a_desc,
    b_desc,
    bias_ptr,
    c_desc,
    M,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    BLOCK_M: tl.constexpr = 128
    BLOCK_N: tl.constexpr = 256
    BLOCK_K: tl.constexpr = 32
    off_m, off_n = grouped_tile(tile, M, N, BLOCK_M, BLOCK_N)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for off_k in range(0, K, BLOCK_K):
        a = a_desc.load([off_m, off_k])  # [BLOCK_M, BLOCK_K]
        if TRANSPOSED:
            b = b_desc.load([off_n, off_k]).T
        else:
            b = b_desc.load([off_k, off_n])  # [BLOCK_K, BLOCK_N]
        accumulator = tl.dot(a, b, accumulator)
    columns = off_n + tl.arange(0, BLOCK_N)
    accumulator = finish(accumulator, bias_ptr, columns, N, ACTIVATION)
    c_desc.store([off_m, off_n], accumulator.to(c_desc.dtype))


@triton.jit
def matmul_kernel(
    a_desc,  # [M, K]
    b_desc,  # [N, K] if TRANSPOSED else [K, N]
    bias_ptr,  # [N], or None
    c_desc,  # [M, N]
    M,
    N,
    K,
    TRANSPOSED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    matmul_tile(
        *(tl.program_id(0), a_desc, b_desc, bias_ptr, c_desc, M, N, K, TRANSPOSED, ACTIVATION)
    )


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
    c = finish(accumulator, bias_ptr, columns, N, ACTIVATION).to(c_ptr.dtype.element_ty)
    tl.store(c_ptrs, c, mask=row_mask[:, None] & column_mask[None, :])


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
    block_b = [256, 32] if transposed else [32, 256]
    tiles = ((M + 127) // 128) * ((N + 255) // 256)
    grid = (tiles,)
    matmul_kernel[grid](
        TensorDescriptor.from_tensor(a, [128, 32]),
        TensorDescriptor.from_tensor(rows_of_b, block_b),
        bias,
        TensorDescriptor.from_tensor(c, [128, 256]),
        *(M, N, K),
        TRANSPOSED=transposed,
        ACTIVATION=activation,
        num_warps=8,
        num_stages=6,
    )
