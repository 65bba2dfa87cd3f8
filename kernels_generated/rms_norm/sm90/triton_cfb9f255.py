# rms_norm / triton: 1 row at a time, 32768 columns in registers, columns beyond them read twice.
# BACKWARD=false, BLOCK_N=1024, NUM_STAGES=1, NUM_WARPS=16, PROGRAMS_PER_UNIT=0, RESIDENT=32768,
# ROWS=1, STREAMING=false
import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_rows(
    block,
    x_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    M,
    N,
    eps,
    RESIDENT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    """Write one row of y; columns beyond RESIDENT are its tail."""
    ROWS: tl.constexpr = 1
    rows = block * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    x_rows = x_ptr + rows.to(tl.int64) * N
    y_rows = y_ptr + rows.to(tl.int64) * N
    if HAS_TAIL:
        BLOCK_N: tl.constexpr = 1024
        chunk = RESIDENT + tl.arange(0, BLOCK_N)[None, :]
        squares = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=1):
            part = tl.load(
                x_rows + start + chunk,
                mask=(rows < M) & (chunk < N - start),
                other=0.0,
            ).to(tl.float32)  # [ROWS, BLOCK_N]
            squares += part * part

    columns = tl.arange(0, RESIDENT)[None, :]
    mask = (rows < M) & (columns < N)
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0)  # [1, RESIDENT]
    x = tl.load(
        x_rows + columns,
        mask=mask,
        other=0.0,
    ).to(tl.float32)  # [ROWS, RESIDENT]
    total = tl.sum(x * x, axis=1, keep_dims=True)  # [ROWS, 1]
    if HAS_TAIL:
        total += tl.sum(squares, axis=1, keep_dims=True)
    rstd = 1.0 / tl.sqrt(total / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = (x * rstd * weight.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_rows + columns, y, mask=mask)

    if HAS_TAIL:
        for start in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=1):
            part_mask = (rows < M) & (chunk < N - start)
            weight_part = tl.load(weight_ptr + start + chunk, mask=chunk < N - start)
            part = tl.load(x_rows + start + chunk, mask=part_mask)
            part = part.to(tl.float32) * rstd * weight_part.to(tl.float32)
            part = part.to(y_ptr.dtype.element_ty)
            tl.store(y_rows + start + chunk, part, mask=part_mask)


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [M, N]
    weight_ptr,  # [N]
    y_ptr,  # [M, N]
    rstd_ptr,  # [M]
    M,
    N,
    eps,
    RESIDENT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    rms_norm_rows(
        *(tl.program_id(0), x_ptr, weight_ptr, y_ptr, rstd_ptr, M, N, eps),
        *(RESIDENT, HAS_TAIL),
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, rstd: torch.Tensor, *, eps: float
) -> None:
    """Write each row of x [M, N] over its root mean square, times weight [N], to y [M, N].

    The reciprocal of the root mean square of each row goes to rstd [M].
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    resident = min(1 << (N - 1).bit_length(), 32768)
    grid = (M,)
    rms_norm_kernel[grid](
        *(x, weight, y, rstd, M, N, eps),
        RESIDENT=resident,
        HAS_TAIL=N > resident,
        num_warps=16,
    )
