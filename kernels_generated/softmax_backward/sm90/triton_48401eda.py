# softmax_backward / triton: 1 row at a time, 2048 columns in registers, columns beyond them read
# twice.
# BACKWARD=false, BLOCK_N=1024, NUM_STAGES=3, NUM_WARPS=2, PROGRAMS_PER_UNIT=0, RESIDENT=2048,
# ROWS=1, STREAMING=false
import torch
import triton
import triton.language as tl


@triton.jit
def softmax_backward_rows(
    block, y_ptr, dy_ptr, dx_ptr, M, N, RESIDENT: tl.constexpr, HAS_TAIL: tl.constexpr
):
    """Write one row of dx; columns beyond RESIDENT are its tail."""
    ROWS: tl.constexpr = 1
    rows = block * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    y_rows = y_ptr + rows.to(tl.int64) * N
    dy_rows = dy_ptr + rows.to(tl.int64) * N
    dx_rows = dx_ptr + rows.to(tl.int64) * N
    if HAS_TAIL:
        BLOCK_N: tl.constexpr = 1024
        chunk = RESIDENT + tl.arange(0, BLOCK_N)[None, :]
        products = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=3):
            part_mask = (rows < M) & (chunk < N - start)
            y_part = tl.load(
                y_rows + start + chunk,
                mask=part_mask,
                other=0.0,
            )
            dy_part = tl.load(
                dy_rows + start + chunk,
                mask=part_mask,
                other=0.0,
            )
            products += y_part.to(tl.float32) * dy_part.to(tl.float32)

    columns = tl.arange(0, RESIDENT)[None, :]
    mask = (rows < M) & (columns < N)
    y = tl.load(
        y_rows + columns,
        mask=mask,
        other=0.0,
    ).to(tl.float32)  # [ROWS, RESIDENT]
    dy = tl.load(
        dy_rows + columns,
        mask=mask,
        other=0.0,
    ).to(tl.float32)
    dot = tl.sum(y * dy, axis=1, keep_dims=True)  # [ROWS, 1]
    if HAS_TAIL:
        dot += tl.sum(products, axis=1, keep_dims=True)
    dx = (y * (dy - dot)).to(dx_ptr.dtype.element_ty)
    tl.store(dx_rows + columns, dx, mask=mask)

    if HAS_TAIL:
        for start in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=3):
            part_mask = (rows < M) & (chunk < N - start)
            y_part = tl.load(y_rows + start + chunk, part_mask)
            dy_part = tl.load(dy_rows + start + chunk, part_mask)
            dx_part = y_part.to(tl.float32) * (dy_part.to(tl.float32) - dot)
            dx_part = dx_part.to(dx_ptr.dtype.element_ty)
            tl.store(dx_rows + start + chunk, dx_part, part_mask)


@triton.jit
def softmax_backward_kernel(
    y_ptr,  # [M, N]
    dy_ptr,  # [M, N]
    dx_ptr,  # [M, N]
    M,
    N,
    RESIDENT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    softmax_backward_rows(tl.program_id(0), y_ptr, dy_ptr, dx_ptr, M, N, RESIDENT, HAS_TAIL)


def softmax_backward(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
    """Write the gradient of softmax's input to dx, from its output y and dy, all [M, N]."""
    M, N = y.shape
    if M == 0 or N == 0:
        return
    resident = min(1 << (N - 1).bit_length(), 2048)
    grid = (M,)
    softmax_backward_kernel[grid](
        *(y, dy, dx, M, N),
        RESIDENT=resident,
        HAS_TAIL=N > resident,
        num_warps=2,
    )
