# softmax / triton_parts: 8192 columns of a row per program, kept in registers while the row's
# programs wait for each other's maxima and sums.
# NUM_WARPS=8, PART=8192, STREAMING=false
import functools

import torch
import triton
import triton.language as tl


@triton.jit
def take_part(started_ptr, splits, PHASE: tl.constexpr):
    """Return a row and the part of it that this program takes."""
    number = tl.program_id(0)
    if PHASE == "together":
        # numbered as they start: the parts of every row but the newest have all started, so that
        # whoever waits is waited for by nobody older
        number = tl.atomic_add(started_ptr, 1, sem="relaxed")
    return (number // splits).to(tl.int64), number % splits


@triton.jit
def wait_for_row(arrivals_ptr, splits):
    """Wait until every part of a row has stored what it found."""
    tl.debug_barrier()  # no thread counts before all have stored
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") + 1
    while arrived < splits:
        arrived = tl.atomic_add(arrivals_ptr, 0, sem="acquire")


@triton.jit
def softmax_kernel(
    x_ptr,  # [M, N]
    y_ptr,  # [M, N]
    largest_ptr,  # [M, splits]
    total_ptr,  # [M, splits]
    counts_ptr,  # [M + 1]
    M,
    N,
    splits,
    SPLITS: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Write a part of a row of y ("together"), only its maximum and sum, or y from all of them."""
    PART: tl.constexpr = 8192
    row, part = take_part(counts_ptr + M, splits, PHASE)
    columns = part * PART + tl.arange(0, PART)
    mask = columns < N
    x_row = x_ptr + row * N
    x = tl.load(
        x_row + columns,
        mask=mask,
        other=float("-inf"),
    ).to(tl.float32)  # [PART]
    largest = tl.max(x, axis=0)
    # where there is nothing but -inf, the difference to it is not a number
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    powers = tl.exp(x - shift)
    if PHASE != "write":
        tl.store(largest_ptr + row * splits + part, largest)
        tl.store(total_ptr + row * splits + part, tl.sum(powers, axis=0))
    if PHASE != "sum":
        if PHASE == "together":
            wait_for_row(counts_ptr + row, splits)
        parts = tl.arange(0, SPLITS)
        part_mask = parts < splits
        places = row * splits + parts
        # past the nearest cache, which knows nothing of other programs' stores
        maxima = tl.load(
            largest_ptr + places, mask=part_mask, other=float("-inf"), cache_modifier=".cg"
        )
        totals = tl.load(total_ptr + places, mask=part_mask, other=0.0, cache_modifier=".cg")
        row_largest = tl.max(maxima, axis=0)
        row_total = tl.sum(totals * tl.exp(maxima - row_largest), axis=0)
        y = powers * (tl.exp(largest - row_largest) / row_total)
        y = y.to(y_ptr.dtype.element_ty)
        y_mask = mask
        y_row = y_ptr + row * N
        tl.store(y_row + columns, y, mask=y_mask)


@functools.cache
def compute_units(device: torch.device) -> int:
    """Return the number of multiprocessors, over which a persistent grid is spread."""
    if device.type == "cpu":  # Triton's interpreter
        return 2
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"]


def softmax(x: torch.Tensor, y: torch.Tensor) -> None:
    """Write the softmax over each row of x [M, N] to y [M, N]."""
    M, N = x.shape
    if M == 0 or N == 0:
        return
    splits = (N + 8191) // 8192
    # programs that wait need room for all parts of a row, beside other kernels that do the same;
    # longer rows are read twice, by kernels that follow each other
    together = splits <= max(1, compute_units(x.device) // 4)
    counts = torch.zeros(M + 1, dtype=torch.int32, device=x.device)  # of each row's parts, of all
    largest = torch.empty((M, splits), dtype=torch.float32, device=x.device)
    total = torch.empty_like(largest)
    for phase in ("together",) if together else ("sum", "write"):
        softmax_kernel[(M * splits,)](
            *(x, y, largest, total, counts, M, N, splits),
            SPLITS=1 << (splits - 1).bit_length(),
            PHASE=phase,
            num_warps=8,
        )
