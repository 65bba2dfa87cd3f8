# matmul / triton_split_k: c = activation(a b + bias) for few rows, K undivided, with the roles
# of a and b swapped.
# BLOCK_K=32, BLOCK_M=64, BLOCK_N=256, NUM_STAGES=5, NUM_WARPS=8, REDUCTION=second_kernel,
# SPLIT_K=1, SWAP=true
import torch
import triton
import triton.language as tl

STRIDED = ("b",)  # inputs that may have any strides


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
    BLOCK_M: tl.constexpr = 64
    BLOCK_N: tl.constexpr = 256
    BLOCK_K: tl.constexpr = 32
    tile = tl.program_id(0)
    row_of_tiles = tile // tl.cdiv(N, BLOCK_N)
    columns = tile % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    column_mask = columns < N
    # 64-bit: an offset into a large matrix does not fit 32 bits
    rows = row_of_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = rows < M
    a_ptrs = a_ptr + rows.to(tl.int64)[:, None] * K + depth[None, :]  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + (  # [BLOCK_K, BLOCK_N]
        depth.to(tl.int64)[:, None] * stride_bk + columns.to(tl.int64)[None, :] * stride_bn
    )
    accumulator = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=5):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_mask[:, None], other=0.0)
            b = tl.load(b_ptrs, mask=column_mask[None, :], other=0.0)
        else:
            depth_mask = start + tl.arange(0, BLOCK_K) < K
            a = tl.load(a_ptrs, mask=row_mask[:, None] & depth_mask[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=depth_mask[:, None] & column_mask[None, :], other=0.0)
        accumulator = tl.dot(b.T, a.T, accumulator, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk
    accumulator = accumulator.T  # [BLOCK_M, BLOCK_N]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    accumulator = finish(accumulator, bias_ptr, columns, N, ACTIVATION)
    tl.store(c_ptr + offsets, accumulator.to(c_ptr.dtype.element_ty), mask=mask)


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
    tiles = ((M + 63) // 64) * ((N + 255) // 256)
    matmul_kernel[(tiles,)](
        *(a, b, bias, c, M, N, K, b.stride(0), b.stride(1)),
        EVEN_K=K % 32 == 0,
        ACTIVATION=activation,
        PRECISION="tf32" if allow_tf32 else "ieee",
        num_warps=8,
        num_stages=5,
    )
