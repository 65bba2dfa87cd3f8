# rms_norm_backward / triton_columns: first the rows' dot products, then dx by blocks of columns
# with sums of dweight over a 64th of the rows.
# BLOCK_M=32, BLOCK_N=64, CHUNK_N=1024, NUM_STAGES=1, NUM_WARPS=2, ROWS=2, SPLIT_M=64
import torch
import triton
import triton.language as tl


@triton.jit
def dot_rows_kernel(
    x_ptr,  # [M, N]
    weight_ptr,  # [N]
    rstd_ptr,  # [M]
    dy_ptr,  # [M, N]
    dot_ptr,  # [M]
    M,
    N,
):
    """Write the mean of x_hat * weight * dy over each row, x_hat being x * rstd."""
    ROWS: tl.constexpr = 2
    BLOCK_N: tl.constexpr = 1024
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    x_rows = x_ptr + rows.to(tl.int64) * N
    dy_rows = dy_ptr + rows.to(tl.int64) * N
    columns = tl.arange(0, BLOCK_N)[None, :]
    products = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=1):
        column_mask = columns < N - start
        mask = (rows < M) & column_mask
        x = tl.load(x_rows + start + columns, mask=mask, other=0.0)  # [ROWS, BLOCK_N]
        dy = tl.load(dy_rows + start + columns, mask=mask, other=0.0)
        weight = tl.load(weight_ptr + start + columns, mask=column_mask, other=0.0)
        products += x.to(tl.float32) * dy.to(tl.float32) * weight.to(tl.float32)
    rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
    dot = tl.sum(products, axis=1, keep_dims=True) * rstd / N
    tl.store(dot_ptr + rows, dot, mask=rows < M)


@triton.jit
def columns_kernel(
    x_ptr,  # [M, N]
    weight_ptr,  # [N]
    rstd_ptr,  # [M]
    dy_ptr,  # [M, N]
    dot_ptr,  # [M]
    dx_ptr,  # [M, N]
    partial_ptr,  # [programs, N]
    M,
    N,
    part_m,
):
    """Write dx and the sums of dweight over `part_m` rows of a block of columns."""
    BLOCK_M: tl.constexpr = 32
    BLOCK_N: tl.constexpr = 64
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    part = tl.program_id(1)
    begin = part * part_m
    end = tl.minimum(begin + part_m, M)
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(begin, end, BLOCK_M, num_stages=1):
        rows = start + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
        offsets = rows.to(tl.int64) * N + columns  # [BLOCK_M, BLOCK_N]
        mask = (rows < end) & (columns < N)
        rstd = tl.load(rstd_ptr + rows, mask=rows < end, other=0.0)
        dot = tl.load(dot_ptr + rows, mask=rows < end, other=0.0)
        x_hat = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dx = (dy * weight - x_hat * dot) * rstd
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dweight += dy * x_hat
    total = tl.sum(dweight, axis=0, keep_dims=True)  # [1, BLOCK_N]
    tl.store(partial_ptr + part.to(tl.int64) * N + columns, total, mask=columns < N)


@triton.jit
def add_partials_kernel(
    partial_ptr,  # [parts, N]
    dweight_ptr,  # [N]
    parts,
    N,
):
    BLOCK_M: tl.constexpr = 32
    BLOCK_N: tl.constexpr = 64
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, parts, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
        mask = (rows < parts) & (columns < N)
        total += tl.load(partial_ptr + rows.to(tl.int64) * N + columns, mask=mask, other=0.0)
    dweight = tl.sum(total, axis=0, keep_dims=True).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + columns, dweight, mask=columns < N)


def rms_norm_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    dx: torch.Tensor,
    dweight: torch.Tensor,
) -> None:
    """Write the gradients of x [M, N] and weight [N] from rstd [M] and dy [M, N]."""
    M, N = x.shape
    if N == 0:
        return
    if M == 0:
        dweight.zero_()
        return
    dot = torch.empty_like(rstd)
    grid = ((M + 1) // 2,)
    dot_rows_kernel[grid](x, weight, rstd, dy, dot, M, N, num_warps=2)
    part_m = (M + 2047) // 2048 * 32
    parts = (M + part_m - 1) // part_m
    partial = torch.empty((parts, N), dtype=torch.float32, device=x.device)
    columns_kernel[((N + 63) // 64, parts)](
        *(x, weight, rstd, dy, dot, dx, partial, M, N, part_m),
        num_warps=2,
    )
    add_partials_kernel[((N + 63) // 64,)](partial, dweight, parts, N)
