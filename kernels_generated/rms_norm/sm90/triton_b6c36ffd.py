# rms_norm / triton: 1 row at a time, 1024 columns in registers, columns beyond them read twice.
# BACKWARD=true, BLOCK_N=16384, NUM_STAGES=4, NUM_WARPS=8, PROGRAMS_PER_UNIT=2, RESIDENT=1024,
# ROWS=1, STREAMING=true
import functools

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_rows(
    block,
    x_ptr,
    weight_ptr,
    weight,  # [1, RESIDENT]
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
        BLOCK_N: tl.constexpr = 16384
        chunk = RESIDENT + tl.arange(0, BLOCK_N)[None, :]
        squares = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=4):
            part = tl.load(
                x_rows + start + chunk,
                mask=(rows < M) & (chunk < N - start),
                other=0.0,
                eviction_policy="evict_last",
            ).to(tl.float32)  # [ROWS, BLOCK_N]
            squares += part * part

    columns = tl.arange(0, RESIDENT)[None, :]
    mask = (rows < M) & (columns < N)
    x = tl.load(
        x_rows + columns,
        mask=mask,
        other=0.0,
        eviction_policy="evict_first",
    ).to(tl.float32)  # [ROWS, RESIDENT]
    total = tl.sum(x * x, axis=1, keep_dims=True)  # [ROWS, 1]
    if HAS_TAIL:
        total += tl.sum(squares, axis=1, keep_dims=True)
    rstd = 1.0 / tl.sqrt(total / N + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = (x * rstd * weight.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_rows + columns, y, mask=mask, eviction_policy="evict_first")

    if HAS_TAIL:
        # what was read last is most likely still in a cache
        first = (N - RESIDENT - 1) // BLOCK_N * BLOCK_N
        for done in tl.range(0, N - RESIDENT, BLOCK_N, num_stages=4):
            start = first - done
            part_mask = (rows < M) & (chunk < N - start)
            weight_part = tl.load(weight_ptr + start + chunk, mask=chunk < N - start)
            part = tl.load(x_rows + start + chunk, mask=part_mask, eviction_policy="evict_first")
            part = part.to(tl.float32) * rstd * weight_part.to(tl.float32)
            part = part.to(y_ptr.dtype.element_ty)
            tl.store(y_rows + start + chunk, part, mask=part_mask, eviction_policy="evict_first")


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
    columns = tl.arange(0, RESIDENT)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < N, other=0.0)
    blocks = tl.cdiv(M, 1)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=4):
        rms_norm_rows(
            *(block, x_ptr, weight_ptr, weight, y_ptr, rstd_ptr, M, N, eps),
            *(RESIDENT, HAS_TAIL),
        )


@functools.cache
def compute_units(device: torch.device) -> int:
    """Return the number of multiprocessors, over which a persistent grid is spread."""
    if device.type == "cpu":  # Triton's interpreter
        return 2
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, rstd: torch.Tensor, *, eps: float
) -> None:
    """Write each row of x [M, N] over its root mean square, times weight [N], to y [M, N].

    The reciprocal of the root mean square of each row goes to rstd [M].
    """
    M, N = x.shape
    if M == 0 or N == 0:
        return
    resident = min(1 << (N - 1).bit_length(), 1024)
    grid = (min(M, 2 * compute_units(x.device)),)
    rms_norm_kernel[grid](
        *(x, weight, y, rstd, M, N, eps),
        RESIDENT=resident,
        HAS_TAIL=N > resident,
        num_warps=8,
    )
