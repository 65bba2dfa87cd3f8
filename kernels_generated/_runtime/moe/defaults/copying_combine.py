# moe_combine / triton: the experts' ranks push rows into the memory of the tokens' ranks, which
# add them up with their weights.
# AWAIT=programs, BUFFERING=double, COPY=push, RECEIVE_PROGRAMS=528, RECEIVE_TILE=1024,
# RECEIVE_WARPS=4, SEND_SPLIT=2, SEND_TILE=4096, SEND_WARPS=4, SIGNAL=add, STORE=plain,
# UNROLL=true
import torch
import triton
import triton.language as tl

BUFFERING = "double"
COPY = "push"


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
def is_last(done_ptr):
    """Return whether the other programs are done; what they wrote is visible then."""
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(done_ptr, 0)
    return last


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
def pointer_to_row(address, row, HIDDEN: tl.constexpr):
    """Return the pointer to a row of bfloat16 in some rank's memory."""
    address += tl.cast(row, tl.int64) * (2 * HIDDEN)
    return tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)


@triton.jit
def copy_row(from_ptr, to_ptr, HIDDEN: tl.constexpr):
    for start in range(0, HIDDEN, 4096):
        channel = start + tl.arange(0, 4096)
        values = tl.load(from_ptr + channel, mask=channel < HIDDEN)
        tl.store(
            to_ptr + channel,
            values,
            mask=channel < HIDDEN,
        )


@triton.jit
def range_of(ranges_ptr, expert, peer, RANKS: tl.constexpr):
    """Return the first row and the number of rows that an expert got from a peer."""
    packed = tl.load(ranges_ptr + expert * RANKS + peer)
    return (packed >> 32).to(tl.int32), packed.to(tl.int32)


@triton.jit(do_not_specialize=["rank", "max_polls"])
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
    x_ptr,  # [LOCAL, RANKS * MAX_TOKENS, HIDDEN]
    source_ptr,  # [LOCAL, RANKS * MAX_TOKENS] int32: token * TOPK + choice at the source
    ranges_ptr,  # [LOCAL, RANKS] int64: rows and, 32 bits higher, the first row
    RANKS: tl.constexpr,
    LOCAL: tl.constexpr,  # experts per rank
    BLOCK_LOCAL: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,  # where [MAX_TOKENS, TOPK, HIDDEN] begin: what the experts send
):
    """Push each row to the rank of its token; the last program signals the peers."""
    expert = tl.program_id(0)
    lane = tl.program_id(1)
    # where a peer is behind nothing is written: it may still read what that would overwrite
    late = tl.load(status_ptr)
    for step in range(1, RANKS + 1):  # this rank itself comes last
        peer = (rank + step) % RANKS
        begin, count = range_of(ranges_ptr, expert, peer, RANKS)
        buffer = tl.load(buffers + peer)
        if (buffer != 0) & (late == 0):
            for number in range(lane, count, 2):
                row = expert * (RANKS * MAX_TOKENS) + begin + number
                from_ptr = x_ptr + tl.cast(row, tl.int64) * HIDDEN
                to_ptr = pointer_to_row(buffer + ROWS, tl.load(source_ptr + row), HIDDEN)
                copy_row(from_ptr, to_ptr, HIDDEN)
    if (expert == LOCAL - 1) & (lane == 1):
        # peers signal into this only after they have this round's signal, which comes later
        lower_signals(tl.load(next_signals + rank), RANKS)
    if is_last(done_ptr):
        raise_signals(signals, rank, late, RANKS)


@triton.jit(do_not_specialize=["rank", "max_polls", "T"])
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
    y_ptr,  # [T, HIDDEN]
    topk_ptr,  # [T, TOPK]
    weights_ptr,  # [T, TOPK] fp32
    slots_ptr,  # [T, TOPK] int32
    views,  # [RANKS] int64: address of each rank's view
    T,
    RANKS: tl.constexpr,
    LOCAL: tl.constexpr,  # experts per rank
    BLOCK_LOCAL: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,  # where [MAX_TOKENS, TOPK, HIDDEN] begin: what the experts send
):
    """Add up each token's rows in the order of its choices."""
    TILES: tl.constexpr = (HIDDEN + 1023) // 1024
    program = tl.program_id(0)
    if (program == 0) | (program < T * TILES):  # a round ends when all peers were heard
        for source in range(RANKS):
            has_sent(signals, status_ptr, report_ptr, rank, source, max_polls, 1)
    complete = tl.load(status_ptr) == 0  # else what is here may be of another round
    mine = tl.load(buffers + rank)
    choice = tl.arange(0, CHOICES)
    for item in range(program, T * TILES, tl.num_programs(0)):
        token = item // TILES
        channel = item % TILES * 1024 + tl.arange(0, 1024)
        total = tl.zeros([1024], tl.float32)
        pairs = token * TOPK + choice
        named = tl.load(topk_ptr + pairs, mask=choice < TOPK, other=-1).to(tl.int32)
        for k in tl.static_range(TOPK):
            pair = token * TOPK + k
            expert = tl.load(topk_ptr + pair).to(tl.int32)
            peer = tl.maximum(expert, 0) // LOCAL
            there = complete & (expert >= 0) & (tl.load(buffers + peer) != 0)
            # an expert that is named twice sends one row, for the first of its names
            first = tl.min(tl.where(named == expert, choice, CHOICES), axis=0)
            from_ptr = pointer_to_row(mine + ROWS, token * TOPK + first, HIDDEN)
            values = tl.load(from_ptr + channel, mask=there & (channel < HIDDEN), other=0.0)
            weight = tl.load(weights_ptr + pair, mask=there, other=0.0)
            total += weight * values.to(tl.float32)
        y_row = y_ptr + tl.cast(token, tl.int64) * HIDDEN
        tl.store(y_row + channel, total.to(tl.bfloat16), mask=channel < HIDDEN)


def layout(
    ranks: int, experts: int, max_tokens: int, *, hidden: int, topk: int
) -> tuple[dict[str, int], int, int]:
    """Return the kernels' constants, where the view begins in a buffer, and its bytes.

    Args:
        ranks: Number of ranks.
        experts: Experts of all ranks together.
        max_tokens: The most tokens of a rank.
        hidden: Channels of a row.
        topk: Experts that a token names.
    """
    local = experts // ranks
    places = {"ROWS": 0}
    view = 2 * max_tokens * topk * hidden
    constants = {
        **{"RANKS": ranks, "LOCAL": local, "BLOCK_LOCAL": triton.next_power_of_2(local)},
        **{"MAX_TOKENS": max_tokens, "HIDDEN": hidden},
        **{"TOPK": topk, "CHOICES": triton.next_power_of_2(topk)},
    }
    return constants | places, view, view + 2 * local * ranks * max_tokens * hidden


def send(
    place: tuple,
    x: torch.Tensor | None,
    source: torch.Tensor,
    ranges: torch.Tensor,
    views: torch.Tensor,
    arrived: tuple,
    **constants: int,
) -> None:
    """Send the experts' rows back, or say that they can be fetched.

    Args:
        place: The rank's place in the round.
        x: [local, ranks * max_tokens, hidden].
        source: [local, ranks * max_tokens], as dispatch returned it.
        ranges: [local, ranks], as dispatch returned it.
        views: [ranks] addresses of the views.
        arrived: places, weights and tokens, as dispatch returned them; not needed.
        constants: What `layout` returned.
    """
    del views, arrived
    grid = (constants["LOCAL"], 2)
    send_kernel[grid](*place, x, source, ranges, **constants, num_warps=4)


def receive(place: tuple, y: torch.Tensor, *others: torch.Tensor, **constants: int) -> None:
    """Write y [T, hidden]; the others: topk_idx, weights and slots [T, topk], views [ranks]."""
    arguments = (*place, y, *others, y.shape[0])
    receive_kernel[(528,)](*arguments, **constants, num_warps=4)


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


def moe_combine(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    slots: torch.Tensor,
    source: torch.Tensor,
    ranges: torch.Tensor,
    places: torch.Tensor,
    weights: torch.Tensor,
    tokens: torch.Tensor,
    y: torch.Tensor,
    *,
    zero_copy: bool,
) -> None:
    """Combine the rows of ranks that share a device: all send, then all receive.

    x is [experts, ranks, tokens, hidden], y [ranks, tokens, hidden]. With `zero_copy`, x itself
    is the view that rows are fetched from.
    """
    experts, ranks, max_tokens, hidden = x.shape
    topk = topk_idx.shape[2]
    constants, view, size = layout(ranks, experts, max_tokens, hidden=hidden, topk=topk)
    memory, ranks_places = simulated_ranks(ranks, size, x.device)
    local = constants["LOCAL"]
    views = ranks_places[0][3] + view
    for rank, place in enumerate(ranks_places):
        mine = slice(rank * local, (rank + 1) * local)
        arrived = (places[rank], weights[rank], tokens[rank])
        send(place, x[mine], source[mine], ranges[mine], views, arrived, **constants)
    for rank, place in enumerate(ranks_places):
        mine = (y[rank], topk_idx[rank], topk_weights[rank], slots[rank])
        receive(place, *mine, views, **constants)
    del memory  # held until everything was launched
