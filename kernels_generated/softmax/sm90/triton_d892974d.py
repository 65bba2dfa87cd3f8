# softmax / triton: 1 row at a time, 1024 columns in registers, columns beyond them read twice.
# BACKWARD=false, BLOCK_N=4096, NUM_STAGES=3, NUM_WARPS=2, ONLINE=block, PROGRAMS_PER_UNIT=0,
# RESIDENT=1024, ROWS=1, STREAMING=false
import torch
import triton
import triton.language as tl


@triton.jit
def softmax_rows(block, x_ptr, y_ptr, M, N, RESIDENT: tl.constexpr, HAS_TAIL: tl.constexpr):
    """Write one row of y; columns beyond RESIDENT are its tail."""
    ROWS: tl.constexpr = 1
    rows = block * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    x_rows = x_ptr + rows.to(tl.int64) * N
    y_rows = y_ptr + rows.to(tl.int64) * N
    if HAS_TAIL:
        BLOCK_N: tl.constexpr = 4096
        chunk = RESIDENT + tl.arange(0, BLOCK_N)[None, :]
        largest = tl.full([ROWS, 1], float("-inf"), tl.float32)
        total = tl.zeros([ROWS, 1], tl.float32)
        for start in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=3):
            part = tl.load(
                x_rows + start + chunk,
                mask=(rows < M) & (chunk < N - start),
                other=float("-inf"),
            ).to(tl.float32)  # [ROWS, BLOCK_N]
            larger = tl.maximum(largest, tl.max(part, axis=1, keep_dims=True))
            # as long as there was nothing but -inf, the difference to it is not a number
            shift = tl.where(larger == float("-inf"), 0.0, larger)
            total *= tl.exp(largest - shift)
            total += tl.sum(tl.exp(part - shift), axis=1, keep_dims=True)
            largest = larger

    columns = tl.arange(0, RESIDENT)[None, :]
    mask = (rows < M) & (columns < N)
    x = tl.load(
        x_rows + columns,
        mask=mask,
        other=float("-inf"),
    ).to(tl.float32)  # [ROWS, RESIDENT]
    shift = tl.max(x, axis=1, keep_dims=True)  # [ROWS, 1]
    if HAS_TAIL:
        shift = tl.maximum(shift, tl.max(largest, axis=1, keep_dims=True))
    numerator = tl.exp(x - shift)
    denominator = tl.sum(numerator, axis=1, keep_dims=True)
    if HAS_TAIL:
        denominator += tl.sum(total * tl.exp(largest - shift), axis=1, keep_dims=True)
    scale = 1.0 / denominator
    y = (numerator * scale).to(y_ptr.dtype.element_ty)
    tl.store(y_rows + columns, y, mask=mask)

    if HAS_TAIL:
        for start in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=3):
            part_mask = (rows < M) & (chunk < N - start)
            part = tl.load(x_rows + start + chunk, mask=part_mask)
            part = (tl.exp(part.to(tl.float32) - shift) * scale).to(y_ptr.dtype.element_ty)
            tl.store(y_rows + start + chunk, part, mask=part_mask)


@triton.jit
def softmax_kernel(
    x_ptr,  # [M, N]
    y_ptr,  # [M, N]
    M,
    N,
    RESIDENT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):
    softmax_rows(tl.program_id(0), x_ptr, y_ptr, M, N, RESIDENT, HAS_TAIL)


def softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    """Write the softmax over each row of x [M, N] to y [M, N]."""
    M, N = x.shape
    if M == 0 or N == 0:
        return
    resident = min(1 << (N - 1).bit_length(), 1024)
    grid = (M,)
    softmax_kernel[grid](
        *(x, y, M, N),
        RESIDENT=resident,
        HAS_TAIL=N > resident,
        num_warps=2,
    )
