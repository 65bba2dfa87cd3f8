# moe_dispatch / triton: every rank pushes its tokens' rows into the memory of their experts'
# ranks, once per rank, and packs by expert what it gets.
# AWAIT=programs, BUFFERING=double, CONVERSION=integer, COPIES=rank, MESSAGE=apart,
# RECEIVE_SPLIT=128, RECEIVE_TILE=8192, RECEIVE_WARPS=8, SCAN_TOKENS=128, SEND_PROGRAMS=132,
# SEND_WARPS=8, SIGNAL=count, SLOTS=scan, STORE=plain
import torch
import triton
import triton.language as tl

BUFFERING = "double"


SEND = tl.constexpr(1)  # phases, as the status names them
RECEIVE = tl.constexpr(2)
RANK_BITS = tl.constexpr(16)


@triton.jit
def words(address):
    """Return the pointer to the 32-bit integers at an address in some rank's memory."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def await_signal(
    signal_ptr, wanted, peer, status_ptr, report_ptr, max_polls, PHASE: tl.constexpr
):
    """Return whether a peer's signal came; what it wrote before is visible then."""
    # after one wait in vain the others of this round are not worth their time
    limit = tl.where(tl.load(status_ptr) == 0, max_polls, 0)
    # one word at a time: a poll of a whole vector would be an atomic addition per lane
    value = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    polls = 0
    while (value < wanted) & (polls < limit):
        value = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        polls += 1
    if value < wanted:
        late = peer + ((PHASE << RANK_BITS) + 1)
        if tl.atomic_cas(status_ptr, 0, late) == 0:
            tl.store(report_ptr, late)
    return value >= wanted


@triton.jit
def raise_signals(tables, rank, late, RANKS: tl.constexpr):
    """Tell every peer that what this program has written, or seen written, is there."""
    for step in range(1, RANKS + 1):  # this rank itself comes last
        address = tl.load(tables + (rank + step) % RANKS)
        if (address != 0) & (late == 0):
            # the release orders one thread's stores: the barrier makes them those of all threads
            tl.debug_barrier()
            tl.atomic_add(words(address) + rank, 1, sem="release", scope="sys")


@triton.jit
def lower_signals(address, RANKS: tl.constexpr):
    for peer in range(RANKS):
        tl.store(words(address) + peer, 0)


@triton.jit
def has_sent(signals, status_ptr, report_ptr, rank, peer, max_polls, SENDERS: tl.constexpr):
    """Return whether a peer takes part and its senders, programs of it, have sent their rows."""
    signal_ptr = words(tl.load(signals + rank)) + peer
    sent = tl.load(signals + peer) != 0
    if sent:
        sent = await_signal(
            signal_ptr, SENDERS, peer, status_ptr, report_ptr, max_polls, RECEIVE
        )
    return sent


@triton.jit
def choices_of(topk_ptr, tokens, T, TOPK: tl.constexpr, CHOICES: tl.constexpr):
    """Return the experts [tokens, CHOICES] of tokens [tokens, 1], -1 where there is none."""
    choice = tl.arange(0, CHOICES)[None, :]
    mask = (tokens < T) & (choice < TOPK)
    return tl.load(topk_ptr + tokens * TOPK + choice, mask=mask, other=-1).to(tl.int32)


@triton.jit
def first_of_each(named, CHOICES: tl.constexpr):
    """Return a token's experts [CHOICES] with -1 for one that it has named before."""
    choice = tl.arange(0, CHOICES)
    same = named[:, None] == named[None, :]
    first = tl.min(tl.where(same, choice[None, :], CHOICES), axis=1)
    return tl.where(first == choice, named, -1)


@triton.jit
def count_names(topk_ptr, experts, tokens, TOPK: tl.constexpr, CHOICES: tl.constexpr):
    """Return how many of the first tokens name each of some experts [experts]."""
    count = tl.zeros(experts.shape, tl.int32)
    for start in range(0, tokens, 128):
        some = start + tl.arange(0, 128)[:, None]
        named = choices_of(topk_ptr, some, tokens, TOPK, CHOICES)  # [tokens, CHOICES]
        same = (named[None, :, :] == experts[:, None, None]).to(tl.int32)
        count += tl.sum(tl.max(same, axis=2), axis=1)
    return count


@triton.jit
def send_counts(
    count,
    experts,  # [experts]
    buffers,
    late,
    rank,
    RANKS: tl.constexpr,
    LOCAL: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Tell the ranks of some experts how many rows there are for each."""
    exists = experts < RANKS * LOCAL
    address = tl.load(buffers + experts // LOCAL, mask=exists, other=0)
    counts_ptr = words(address + COUNTS) + experts % LOCAL * RANKS + rank
    tl.store(counts_ptr, count, mask=exists & (address != 0) & (late == 0))


@triton.jit
def e4m3(x):
    """Return the bytes of fp32 values of at most 448, rounded to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # fp32 has 20 bits more and its exponents begin 120 lower; a carry moves up into the exponent
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # fp32 values of 2^14 have steps of 2^-9, like those below the smallest normal value, 2^-6
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_row(
    payload,
    scales,
    row,  # [BLOCK_GROUPS, 128]
    scale,  # [BLOCK_GROUPS, 1]
    GROUPS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Write a row, and its scales where it has some, to addresses in a peer's memory."""
    group = tl.arange(0, row.shape[0])[:, None]
    channel = tl.arange(0, 128)[None, :]
    if FP8:
        scales_ptr = scales.to(tl.pointer_type(tl.float32))
        tl.store(scales_ptr + group, scale, mask=group < GROUPS)
        payload_ptr = payload.to(tl.pointer_type(tl.uint8))
    else:
        payload_ptr = payload.to(tl.pointer_type(tl.bfloat16))
    tl.store(
        tl.multiple_of(payload_ptr, 16) + group * 128 + channel,  # the hint: 128-bit stores
        row,
        mask=group < GROUPS,
    )


@triton.jit(do_not_specialize=["rank", "max_polls", "T"])
def send_kernel(
    signals,  # [RANKS] int64: address of each rank's signals of this round; 0: it is left out
    next_signals,  # [RANKS] int64: of the next round
    acknowledgements,  # [RANKS] int64
    buffers,  # [RANKS] int64: address of each rank's buffer of this round; 0: it is left out
    done_ptr,  # [2] int32: programs that are done with a phase
    status_ptr,  # [1] int32: phase and rank of the first wait that was in vain
    report_ptr,  # [1] int32: the same in memory that the host reads
    rank,
    max_polls,
    x_ptr,  # [T, GROUPS * 128]
    topk_ptr,  # [T, TOPK]
    weights_ptr,  # [T, TOPK] fp32, if WEIGHTED
    slots_ptr,  # [T, TOPK] int32
    places_ptr,  # [RANKS, MAX_TOKENS, TOPK] int32, if WEIGHTED: what this rank will have received
    T,
    RANKS: tl.constexpr,
    LOCAL: tl.constexpr,  # experts per rank
    MAX_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,  # of 128 channels in a row
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_LOCAL: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    FP8: tl.constexpr,
    WEIGHTED: tl.constexpr,  # whether choices have weights
    COUNTED: tl.constexpr,  # experts whose rows a program counts
    COUNTS: tl.constexpr,  # where [LOCAL, RANKS] int32 begin: the rows per expert and source
    TOKENS: tl.constexpr,  # [RANKS] int32: the tokens per source
    META: tl.constexpr,  # [3, TOPK] int32: a row's experts here, its slots with them, its weights
    META_STRIDE: tl.constexpr,
    PAYLOAD: tl.constexpr,
    PAYLOAD_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
):
    """Push rows; the last program signals the peers."""
    program = tl.program_id(0)
    # where a peer is behind nothing is written: it may still read what that would overwrite
    late = tl.load(status_ptr)
    choice = tl.arange(0, CHOICES)
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    channel = tl.arange(0, 128)[None, :]
    for token in range(program, T, tl.num_programs(0)):
        # asked for first, for it is under way for longest
        x_row = x_ptr + tl.cast(token, tl.int64) * (GROUPS * 128)
        row = tl.load(x_row + group * 128 + channel, mask=group < GROUPS, other=0.0)
        pair = token * TOPK + choice
        named = tl.load(topk_ptr + pair, mask=choice < TOPK, other=-1).to(tl.int32)
        expert = first_of_each(named, CHOICES)
        slot = count_names(topk_ptr, named, token, TOPK, CHOICES)
        tl.store(slots_ptr + pair, slot, mask=(choice < TOPK) & (named >= 0))
        bits = tl.zeros([CHOICES], tl.int32)
        if WEIGHTED:
            weight = tl.load(weights_ptr + pair, mask=choice < TOPK, other=0.0)
            same = named[:, None] == named[None, :]  # who is named twice has both weights
            weight = tl.sum(tl.where(same, weight[None, :], 0.0), axis=1)
            bits = weight.to(tl.int32, bitcast=True)
        scale = tl.full([BLOCK_GROUPS, 1], 1.0, tl.float32)
        if FP8:
            values = row.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(values), axis=1, keep_dims=True), 1e-4)
            scale = largest * (1.0 / 448.0)
            values = values * tl.div_rn(tl.full(largest.shape, 448.0, tl.float32), largest)
            row = e4m3(tl.minimum(tl.maximum(values, -448.0), 448.0))
        for step in range(1, RANKS + 1):  # this rank itself comes last
            peer = (rank + step) % RANKS
            buffer = tl.load(buffers + peer)
            if (buffer != 0) & (late == 0):
                message = tl.cast(rank * MAX_TOKENS + token, tl.int64)
                here = (expert >= 0) & (expert // LOCAL == peer)
                if tl.max(here.to(tl.int32), axis=0) > 0:
                    store_row(
                        buffer + PAYLOAD + message * PAYLOAD_STRIDE,
                        buffer + SCALES + message * SCALES_STRIDE,
                        *(row, scale, GROUPS, FP8),
                    )
                meta_ptr = words(buffer + META + message * META_STRIDE)
                local = tl.where(here, expert % LOCAL, -1)
                tl.store(meta_ptr + choice, local, mask=choice < TOPK)
                tl.store(meta_ptr + TOPK + choice, slot, mask=choice < TOPK)
                if WEIGHTED:
                    tl.store(meta_ptr + 2 * TOPK + choice, bits, mask=choice < TOPK)
    # counted while the rows are under way
    experts = program + tl.arange(0, COUNTED) * tl.num_programs(0)
    count = count_names(topk_ptr, experts, T, TOPK, CHOICES)
    send_counts(count, experts, buffers, late, rank, RANKS, LOCAL, COUNTS)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        for peer in range(RANKS):
            buffer = tl.load(buffers + peer)
            if (buffer != 0) & (late == 0):
                tl.store(words(buffer + TOKENS) + rank, T)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        # peers signal into this only after they have this round's signal, which comes later
        lower_signals(tl.load(next_signals + rank), RANKS)
    raise_signals(signals, rank, late, RANKS)


@triton.jit
def pointer_to_row(address, FP8: tl.constexpr):
    """Return the pointer to a row at an address in this rank's memory."""
    element: tl.constexpr = tl.uint8 if FP8 else tl.bfloat16
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit
def copy_scales(
    address,
    to_ptr,  # [rows], pointers to the first scale of each
    mask,  # [rows]
    group_stride,
    GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Copy a row's scales from an address in this rank's memory to some packed rows."""
    group = tl.arange(0, BLOCK_GROUPS)[:, None]
    from_ptr = address.to(tl.pointer_type(tl.float32)) + group
    scale = tl.load(from_ptr, mask=group < GROUPS)  # [BLOCK_GROUPS, 1]
    to_ptr = to_ptr[None, :] + group * group_stride
    tl.store(to_ptr, scale, mask=(group < GROUPS) & mask[None, :])


@triton.jit(
    do_not_specialize=["rank", "max_polls", "expert_stride", "row_stride", "group_stride"]
)
def receive_kernel(
    signals,  # [RANKS] int64: address of each rank's signals of this round; 0: it is left out
    next_signals,  # [RANKS] int64: of the next round
    acknowledgements,  # [RANKS] int64
    buffers,  # [RANKS] int64: address of each rank's buffer of this round; 0: it is left out
    done_ptr,  # [2] int32: programs that are done with a phase
    status_ptr,  # [1] int32: phase and rank of the first wait that was in vain
    report_ptr,  # [1] int32: the same in memory that the host reads
    rank,
    max_polls,
    rows_ptr,  # [LOCAL, RANKS * MAX_TOKENS, GROUPS * 128]
    scales_ptr,  # [LOCAL, RANKS * MAX_TOKENS, GROUPS] fp32
    expert_stride,  # of the scales
    row_stride,
    group_stride,
    source_ptr,  # [LOCAL, RANKS * MAX_TOKENS] int32: token * TOPK + choice at the source
    ranges_ptr,  # [LOCAL, RANKS] int64: rows and, 32 bits higher, the first row
    stats_ptr,  # [LOCAL] int32
    totals_ptr,  # [LOCAL] int32: stats and the rows of this round
    counts_ptr,  # [LOCAL] int32
    places_ptr,  # [RANKS, MAX_TOKENS, TOPK] int32, if WEIGHTED: the row for a choice, or -1
    weights_ptr,  # [RANKS, MAX_TOKENS, TOPK] fp32, if WEIGHTED
    tokens_ptr,  # [RANKS] int32, if WEIGHTED: the tokens of each rank
    RANKS: tl.constexpr,
    LOCAL: tl.constexpr,  # experts per rank
    MAX_TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,  # of 128 channels in a row
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_LOCAL: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    FP8: tl.constexpr,
    WEIGHTED: tl.constexpr,  # whether choices have weights
    COUNTED: tl.constexpr,  # experts whose rows a program counts
    COUNTS: tl.constexpr,  # where [LOCAL, RANKS] int32 begin: the rows per expert and source
    TOKENS: tl.constexpr,  # [RANKS] int32: the tokens per source
    META: tl.constexpr,  # [3, TOPK] int32: a row's experts here, its slots with them, its weights
    META_STRIDE: tl.constexpr,
    PAYLOAD: tl.constexpr,
    PAYLOAD_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
):
    """Pack the rows of each expert, those of rank 0 first."""
    HIDDEN: tl.constexpr = GROUPS * 128
    TILES: tl.constexpr = (HIDDEN + 8191) // 8192
    lane = tl.program_id(1)
    buffer = tl.load(buffers + rank)
    arrived_ptr = words(buffer + COUNTS)
    peer = tl.program_id(0)
    sent = peer < 0
    for earlier in range(peer + 1):  # the ranks whose rows come before the peer's, and the peer
        sent = has_sent(
            *(signals, status_ptr, report_ptr, rank, earlier, max_polls, 132)
        )
    complete = tl.load(status_ptr) == 0  # else what is here may be of another round
    tokens = tl.load(words(buffer + TOKENS) + peer, mask=sent & complete, other=0)
    choice = tl.arange(0, CHOICES)
    for item in range(lane, tokens * TILES, 128):
        token = item // TILES
        message = tl.cast(peer * MAX_TOKENS + token, tl.int64)
        channel = item % TILES * 8192 + tl.arange(0, 8192)
        from_ptr = pointer_to_row(buffer + PAYLOAD + message * PAYLOAD_STRIDE, FP8)
        values = tl.load(from_ptr + channel, mask=channel < HIDDEN)
        meta_ptr = words(buffer + META + message * META_STRIDE)
        expert = tl.load(meta_ptr + choice, mask=choice < TOPK, other=-1)
        place = tl.load(meta_ptr + TOPK + choice, mask=choice < TOPK, other=0)
        for other in tl.static_range(RANKS - 1):
            before = (other < peer) & (tl.load(signals + other) != 0)
            count_ptr = arrived_ptr + expert * RANKS + other
            place += tl.load(count_ptr, mask=before & (expert >= 0), other=0)
        row = tl.where(expert >= 0, expert * (RANKS * MAX_TOKENS) + place, -1)
        for k in tl.static_range(TOPK):
            to_row = tl.cast(tl.max(tl.where(choice == k, row, -1), axis=0), tl.int64)
            to_ptr = rows_ptr + to_row * HIDDEN + channel
            tl.store(to_ptr, values, mask=(to_row >= 0) & (channel < HIDDEN))
        if item % TILES == 0:
            tl.store(source_ptr + row, token * TOPK + choice, mask=row >= 0)
            if WEIGHTED:
                pair = (peer * MAX_TOKENS + token) * TOPK + choice
                tl.store(places_ptr + pair, row, mask=choice < TOPK)
                bits = tl.load(meta_ptr + 2 * TOPK + choice, mask=choice < TOPK)
                tl.store(weights_ptr + pair, bits.to(tl.float32, bitcast=True), mask=row >= 0)
            if FP8:
                scale_row = tl.cast(expert, tl.int64) * expert_stride + place * row_stride
                copy_scales(
                    buffer + SCALES + message * SCALES_STRIDE,
                    *(scales_ptr + scale_row, row >= 0, group_stride, GROUPS, BLOCK_GROUPS),
                )
    if lane == 127:
        if WEIGHTED:
            tl.store(tokens_ptr + peer, tokens)
        local = tl.arange(0, BLOCK_LOCAL)
        begin = tl.zeros([BLOCK_LOCAL], tl.int32)  # rows of the ranks before the peer
        count = tl.zeros([BLOCK_LOCAL], tl.int32)
        for earlier in range(peer + 1):
            begin += count
            came = complete & (tl.load(signals + earlier) != 0)
            count_ptr = arrived_ptr + local * RANKS + earlier
            count = tl.load(count_ptr, mask=came & (local < LOCAL), other=0)
        packed = (tl.cast(begin, tl.int64) << 32) | tl.cast(count, tl.int64)
        tl.store(ranges_ptr + local * RANKS + peer, packed, mask=local < LOCAL)
        if peer == RANKS - 1:
            total = begin + count
            stats = tl.load(stats_ptr + local, mask=local < LOCAL, other=0)
            tl.store(counts_ptr + local, total, mask=local < LOCAL)
            tl.store(totals_ptr + local, stats + total, mask=local < LOCAL)


def layout(
    ranks: int, experts: int, max_tokens: int, *, hidden: int, topk: int, fp8: bool
) -> tuple[dict[str, int], int]:
    """Return the kernels' constants and the bytes of a buffer.

    Args:
        ranks: Number of ranks.
        experts: Experts of all ranks together.
        max_tokens: The most tokens of a rank.
        hidden: Channels of a row.
        topk: Experts that a token names.
        fp8: Whether rows travel as e4m3 with a scale for 128 channels.
    """
    local, groups = experts // ranks, hidden // 128
    messages, meta = ranks * max_tokens, aligned(12 * topk, 16)
    payload, scales = (hidden, aligned(4 * groups, 16)) if fp8 else (2 * hidden, 0)
    tokens = aligned(4 * local * ranks, 128)
    start = tokens + aligned(4 * ranks, 128)
    scales_start = start + aligned(messages * meta, 128)
    payload_start = scales_start + aligned(messages * scales, 128)
    places = {
        **{"META": start, "META_STRIDE": meta},
        **{"PAYLOAD": payload_start, "PAYLOAD_STRIDE": payload},
        **{"SCALES": scales_start, "SCALES_STRIDE": scales},
    }
    size = payload_start + messages * payload
    constants = {
        **{"RANKS": ranks, "LOCAL": local, "MAX_TOKENS": max_tokens, "GROUPS": groups},
        **{"BLOCK_GROUPS": triton.next_power_of_2(groups), "TOPK": topk},
        **{"BLOCK_LOCAL": triton.next_power_of_2(local)},
        **{"CHOICES": triton.next_power_of_2(topk), "FP8": fp8, "COUNTS": 0, "TOKENS": tokens},
        **{"WEIGHTED": True, "COUNTED": triton.next_power_of_2(-(-experts // 132))},
    }
    return constants | places, aligned(size, 128)


def aligned(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit


def send(
    place: tuple,
    x: torch.Tensor,
    choices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    places: torch.Tensor,
    constants: dict[str, int],
) -> None:
    """Send rows to experts.

    Args:
        place: The rank's place in the round.
        x: [T, hidden].
        choices: Experts, their weights, which count if WEIGHTED, and slots to write: [T, topk].
        places: [ranks, max_tokens, topk] of this rank, which counts if WEIGHTED.
        constants: What `layout` returned.
    """
    topk_idx, weights, slots = choices
    tokens = x.shape[0]
    arguments = (*place, x, topk_idx, weights, slots, places, tokens)
    send_kernel[(132,)](*arguments, **constants, num_warps=8)


def receive(
    place: tuple, rows: torch.Tensor, scales: torch.Tensor, *others: torch.Tensor, **constants: int
) -> None:
    """Pack what the peers sent.

    Args:
        place: The rank's place in the round.
        rows: [local, ranks * max_tokens, hidden], bytes if they are e4m3.
        scales: [local, ranks * max_tokens, groups] of any strides.
        others: source, ranges, stats, totals, counts, places, weights and tokens.
        constants: What `layout` returned.
    """
    grid = (constants["RANKS"], 128)
    receive_kernel[grid](
        *(*place, rows, scales, *scales.stride(), *others),
        **constants,
        num_warps=8,
    )


def simulated_ranks(ranks: int, size: int, device: torch.device) -> tuple[torch.Tensor, list]:
    """Return the memory of ranks that share a device and each rank's place in a first round.

    Args:
        ranks: Number of ranks.
        size: Bytes of a rank's buffer.
        device: The device.
    """
    signal_bytes = 4096
    stride = 3 * signal_bytes + size
    memory = torch.empty((ranks, stride), dtype=torch.uint8, device=device)
    memory[:, : 2 * signal_bytes] = 0
    memory[:, 2 * signal_bytes : 3 * signal_bytes] = 1  # nothing is left to be acknowledged
    # computed where it is used: a copy from the host could not be captured in a graph
    base = torch.arange(ranks, dtype=torch.int64, device=device) * stride + memory.data_ptr()
    tables = [base + part * signal_bytes for part in range(4)]
    words = torch.zeros((ranks, 8), dtype=torch.int32, device=device)  # done, status: aligned
    places = []
    for rank in range(ranks):
        done, status = words[rank, :2], words[rank, 4:5]
        places.append((*tables, done, status, status, rank, 1000))
    return memory, places


def moe_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    stats: torch.Tensor,
    rows: torch.Tensor,
    rows_fp8: torch.Tensor,
    scales: torch.Tensor,
    source: torch.Tensor,
    ranges: torch.Tensor,
    totals: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    tokens: torch.Tensor,
    *,
    fp8: bool,
) -> None:
    """Dispatch the tokens of ranks that share a device: all send, then all receive.

    x is [ranks, tokens, groups, 128], topk_idx [ranks, tokens, topk], stats [experts].
    """
    ranks, max_tokens, groups, _ = x.shape
    topk, experts = topk_idx.shape[2], stats.shape[0]
    constants, size = layout(ranks, experts, max_tokens, hidden=groups * 128, topk=topk, fp8=fp8)
    # the memory is held until all is launched
    _memory, ranks_places = simulated_ranks(ranks, size, x.device)
    for rank, place in enumerate(ranks_places):
        choices = (topk_idx[rank], topk_weights[rank], slots[rank])
        send(place, x[rank].flatten(1), choices, places[rank], constants)
    chosen = rows_fp8.view(torch.uint8) if fp8 else rows
    packed = (chosen, scales.flatten(1, 2), source, ranges, stats, totals, counts)
    for rank, place in enumerate(ranks_places):
        mine = slice(rank * constants["LOCAL"], (rank + 1) * constants["LOCAL"])
        arrived = (places[rank], weights[rank], tokens[rank])
        receive(place, *(tensor[mine] for tensor in packed), *arrived, **constants)
