# matmul / triton: c = activation(a b + bias), one output tile per program, loaded through
# pointers.
# BLOCK_K=256, BLOCK_M=16, BLOCK_N=32, GROUP_M=4, NUM_STAGES=4, NUM_WARPS=4
import torch
import triton
import triton.language as tl

STRIDED = ("b",)  # inputs that may have any strides


@triton.jit
def grouped_tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # 4 rows of tiles are walked column by column: programs that run at the same time
    # share their blocks of a and b in L2
    GROUP_M: tl.constexpr = 4
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
def matmul_kernel(
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
    PRECISION: tl.constexpr,
):
    BLOCK_M: tl.constexpr = 16
    BLOCK_N: tl.constexpr = 32
    BLOCK_K: tl.constexpr = 256
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
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
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
    Products of float32 are rounded to TF32 if allow_tf32.
    """
    M, K = a.shape
    N = c.shape[1]
    if M == 0 or N == 0:
        return
    if transposed_b:
        b = b.T
    tiles = ((M + 15) // 16) * ((N + 31) // 32)
    matmul_kernel[(tiles,)](
        *(a, b, bias, c, M, N, K, b.stride(0), b.stride(1)),
        EVEN_K=K % 256 == 0,
        ACTIVATION=activation,
        PRECISION="tf32" if allow_tf32 else "ieee",
        num_warps=4,
        num_stages=4,
    )
