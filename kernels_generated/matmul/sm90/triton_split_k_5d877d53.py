# matmul / triton_split_k: c = activation(a b + bias) for few rows, K divided among 4 programs,
# on matrix units.
# BLOCK_K=64, BLOCK_M=16, BLOCK_N=64, NUM_STAGES=4, NUM_WARPS=4, REDUCTION=second_kernel,
# SPLIT_K=4, SWAP=false
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
    c_ptr,  # [M, N]
    partial_ptr,  # [SPLIT_K, M, N]
    M,
    N,
    K,
    stride_bk,
    stride_bn,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
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
        accumulator = tl.dot(a, b, accumulator, input_precision=PRECISION)
        a_ptrs += STEP_K
        b_ptrs += tl.cast(STEP_K, tl.int64) * stride_bk
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    size = tl.cast(M, tl.int64) * N
    tl.store(partial_ptr + split * size + offsets, accumulator, mask=mask)


@triton.jit
def add_parts_kernel(
    partial_ptr,  # [SPLIT_K, size]
    bias_ptr,  # [N], or None
    c_ptr,  # [size]
    size,
    N,  # None where there is no bias
    ACTIVATION: tl.constexpr,
):
    SPLIT_K: tl.constexpr = 4
    BLOCK: tl.constexpr = 1024
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offsets = tl.arange(0, SPLIT_K).to(tl.int64)[:, None] * size + places[None, :]
    parts = tl.load(partial_ptr + offsets, mask=(places < size)[None, :], other=0.0)
    total = tl.sum(parts, axis=0)  # [BLOCK]
    columns = places if bias_ptr is None else places % N
    total = finish(total, bias_ptr, columns, N, ACTIVATION)
    tl.store(c_ptr + places, total.to(c_ptr.dtype.element_ty), mask=places < size)


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
    tiles = ((M + 15) // 16) * ((N + 63) // 64)
    partial = torch.empty((4, M, N), dtype=torch.float32, device=a.device)
    matmul_kernel[(tiles, 4)](
        *(a, b, c, partial, M, N, K, b.stride(0), b.stride(1)),
        EVEN_K=K % 64 == 0,
        PRECISION="tf32" if allow_tf32 else "ieee",
        num_warps=4,
        num_stages=4,
    )
    grid = ((M * N + 1023) // 1024,)
    columns = None if bias is None else N
    add_parts_kernel[grid](partial, bias, c, M * N, columns, ACTIVATION=activation)
