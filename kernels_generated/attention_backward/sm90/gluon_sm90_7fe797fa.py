# attention_backward / gluon_sm90: dK and dV of a block of keys by two warpgroups that share dS,
# fed by a producer warp through TMA; dQ is added in float32 by a writer warp, in the order of
# registers, and finished by two warps, persistent.
# ARRIVALS=grouped, BLOCK_M=128, BLOCK_N=128, DO_STAGES=2, DQ_MODE=linear_finisher, DQ_SPLIT=1,
# DQ_STAGES=1, DQ_SWIZZLE=128, DS_ORDER=queries, DS_STAGES=2, MASKING=skip, ORDER=groups,
# P_ROUNDED=false, PERSISTENT=true, PRODUCTS=dq_first, PROGRAMS=1, Q_STAGES=2, SCHEDULE=paired,
# STATS=tma_late, WORKER_REGISTERS=24
import functools

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gluon_core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

if hasattr(tma, "async_atomic_add"):
    tma_add = tma.async_atomic_add
else:  # triton 3.6 and 3.7: the compiler has the operation, but its language does not name it

    @gluon_core.builtin
    def tma_add(descriptor, place, block, _semantic=None):
        """Add a block of shared memory to global memory."""
        place = _semantic._convert_to_ir_values(place, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, place, block.handle)


@gluon.jit
def tma_sum_wait(pendings: gl.constexpr):
    """Wait until all but the last additions, 0 or 2, are in global memory."""
    if pendings == 0:
        instruction: gl.constexpr = "cp.async.bulk.wait_group 0; // $0"
    else:
        instruction: gl.constexpr = "cp.async.bulk.wait_group 2; // $0"
    gl.inline_asm_elementwise(instruction, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def tile_layout(rows, columns, num_warps):
    """Return the layout of a float32 accumulator, at least 16 of its rows to a warp."""
    warps_m = min(num_warps, rows // 16)
    warps_n = num_warps // warps_m
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[warps_m, warps_n],
        instr_shape=[16, min(columns // warps_n, 256), 16],
    )


@gluon.jit
def queries_of(
    off_n,
    S,
    T,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Return the first query that sees a tile of keys, how many blocks of queries need a mask, and
    how many there are."""
    if CAUSAL:
        # bottom-right aligned: query i sees key i + T - S as its last
        first = gl.maximum(off_n - (T - S), 0) // BLOCK_M * BLOCK_M
        blocks = gl.cdiv(S - first, BLOCK_M)
        seen_by_all = gl.maximum(off_n + BLOCK_N - 1 - (T - S), 0)
        masked = gl.minimum(gl.cdiv(seen_by_all - first, BLOCK_M), blocks)
    else:
        first = 0
        blocks = gl.cdiv(S, BLOCK_M)
        masked = gl.where(off_n + BLOCK_N > T, blocks, 0)
    return first, masked, blocks


@gluon.jit
def tile_at(number, columns, heads, units):
    """Return the head and the column of a tile: as many heads at a time as keep all units busy and
    the caches warm, their first columns first, which are the longest if causal."""
    most = gl.maximum(units // columns, 1)
    turn = number // (most * columns)
    together = gl.minimum(most, heads - turn * most)
    place = number % (most * columns)
    return turn * most + place % together, place // together


@gluon.jit
def take_tile(
    taken_ptr,
    tile_ring,
    tile_ready,
    tile_free,
    number,  # of the tile among those of this program
    columns,
    heads,
    units,
):
    """Take a tile that no program has taken, and tell the others of this one where it is: the head
    in the upper half, the column in the lower, or less than 0 if none is left."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = number % 2
    tile = gl.atomic_add(taken_ptr, 1, sem="relaxed")
    last = columns * heads - 1
    head, column = tile_at(gl.minimum(tile, last), columns, heads, units)
    place = gl.where(tile <= last, (head.to(gl.int64) << 32) + column, -1)
    mbarrier.wait(tile_free.index(slot), ((number // 2) & 1) ^ 1)
    tile_ring.index(slot).store(gl.full([1], place, gl.int64, layout))
    mbarrier.arrive(tile_ready.index(slot), count=1)
    return place


@gluon.jit
def next_tile(tile_ring, tile_ready, tile_free, number):
    """Return where the tile is that the producer has taken."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = number % 2
    mbarrier.wait(tile_ready.index(slot), (number // 2) & 1)
    place = gl.max(tile_ring.index(slot).load(layout), 0)
    mbarrier.arrive(tile_free.index(slot), count=1)
    return place


@gluon.jit
def arrive(bar, pred=True):
    """Arrive by one thread, without the barrier that `mbarrier.arrive` puts in front of it."""
    mbarrier.expect(bar, 0, pred)


@gluon.jit
def produce(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    k_tile,
    v_tile,
    taken_ptr,
    tile_ring,
    tile_ready,
    tile_free,
    q_ring,
    do_ring,
    lse_ring,
    delta_ring,
    kv_ready,
    k_free,
    v_free,
    q_ready,
    q_free,
    do_ready,
    do_free,
    kv_heads,
    group,
    S,
    T,
    padded,
    units,
    CAUSAL: gl.constexpr,
):
    """Keep the rings full: one warp that does nothing else."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = 2 * k_desc.block_type.shape[1]
    KV_BYTES: gl.constexpr = 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    BLOCK_BYTES: gl.constexpr = q_desc.block_type.nbytes + 4 * BLOCK_M
    bar_kv = kv_ready.index(0)
    taken = 0
    columns = gl.cdiv(T, BLOCK_N)
    tiles_taken = 0
    tile = take_tile(
        taken_ptr, tile_ring, tile_ready, tile_free, tiles_taken, columns, kv_heads, units
    )
    while tile >= 0:
        kv_head, off_n = (tile >> 32).to(gl.int32), tile.to(gl.int32) * BLOCK_N
        first, masked, blocks = queries_of(off_n, S, T, BLOCK_M, BLOCK_N, CAUSAL)
        for member in range(group):
            head = kv_head * group + member
            for block in range(blocks):
                number = taken + block
                off_m = first + block * BLOCK_M
                slot = number % 2
                mbarrier.wait(q_free.index(slot), ((number // 2) & 1) ^ 1)
                bar = q_ready.index(slot)
                mbarrier.expect(bar, BLOCK_BYTES)
                tma_load(q_desc, [head, off_m, 0], bar, q_ring.index(slot))
                tma_load(lse_desc, [head * padded + off_m], bar, lse_ring.index(slot))
                slot = number % 2
                mbarrier.wait(do_free.index(slot), ((number // 2) & 1) ^ 1)
                bar = do_ready.index(slot)
                mbarrier.expect(bar, BLOCK_BYTES)
                tma_load(do_desc, [head, off_m, 0], bar, do_ring.index(slot))
                tma_load(delta_desc, [head * padded + off_m], bar, delta_ring.index(slot))
                if member + block == 0:
                    # the first queries come while the tile before needs its keys and values
                    mbarrier.wait(v_free.index(0), (tiles_taken & 1) ^ 1)
                    mbarrier.expect(bar_kv, KV_BYTES)
                    for part in gl.static_range(2):
                        off_part = off_n + part * k_desc.block_type.shape[1]
                        tma_load(v_desc, [kv_head, off_part, 0], bar_kv, v_tile.index(part))
                    mbarrier.wait(k_free.index(0), (tiles_taken & 1) ^ 1)
                    for part in gl.static_range(2):
                        off_part = off_n + part * k_desc.block_type.shape[1]
                        tma_load(k_desc, [kv_head, off_part, 0], bar_kv, k_tile.index(part))
            taken += blocks
        tiles_taken += 1
        tile = take_tile(
            taken_ptr, tile_ring, tile_ready, tile_free, tiles_taken, columns, kv_heads, units
        )


@gluon.jit
def write_dq(
    dq_desc,
    dq_ring,
    dq_ready,
    dq_free,
    counts_ptr,  # [heads * padded // BLOCK_M], how many tiles have added to a block
    tile_ring,
    tile_ready,
    tile_free,
    kv_heads,
    group,
    S,
    T,
    padded,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Add the blocks of dQ to global memory as they come: one warp that does nothing else."""
    ROWS: gl.constexpr = dq_desc.block_type.shape[0]  # of 32 numbers in a block
    taken = 0
    before = -1  # the block before
    tiles_taken = 0
    tile = next_tile(tile_ring, tile_ready, tile_free, tiles_taken)
    while tile >= 0:
        kv_head, off_n = (tile >> 32).to(gl.int32), tile.to(gl.int32) * BLOCK_N
        first, masked, blocks = queries_of(off_n, S, T, BLOCK_M, BLOCK_N, CAUSAL)
        for member in range(group):
            row = (kv_head * group + member) * padded + first
            for block in range(blocks):
                number = taken + block
                place = (row // BLOCK_M + block) * 2
                for part in gl.static_range(2):
                    # the other part's block may be on its way, this part's has left
                    tma.store_wait(1)
                    mbarrier.arrive(dq_free.index(part), count=1)
                    mbarrier.wait(dq_ready.index(part), number & 1)
                    tma_add(dq_desc, [(place + part) * ROWS, 0], dq_ring.index(part))
                # the block before is in the sums, this one is on its way
                tma_sum_wait(2)
                cta_barrier()
                gl.atomic_add(counts_ptr + before, 1, mask=before >= 0, sem="release")
                before = row // BLOCK_M + block
            taken += blocks
        tiles_taken += 1
        tile = next_tile(tile_ring, tile_ready, tile_free, tiles_taken)
    tma_sum_wait(0)
    cta_barrier()
    gl.atomic_add(counts_ptr + before, 1, mask=before >= 0, sem="release")


@gluon.jit
def finish_dq(
    dq_ptr,  # [heads, S, D]
    dq_sum_ptr,  # [heads * padded, BLOCK_D], each block in the order of registers
    counts_ptr,  # [heads * padded // BLOCK_M], how many tiles have added to a block
    kv_heads,
    group,
    S,
    T,
    padded,
    D,
    scale,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Write dq, `scale` times the sums, block after block as all tiles have added to it: two warps
    that do nothing else."""
    STEP: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [2, 1], [1, 0])
    blocks = padded // BLOCK_M
    for place in range(gl.program_id(0), kv_heads * group * blocks, gl.num_programs(0)):
        head = place // blocks
        off_m = place % blocks * BLOCK_M
        if CAUSAL:
            keys = gl.minimum(gl.maximum(off_m + BLOCK_M + T - S, 0), T)
        else:
            keys = T
        while gl.atomic_add(counts_ptr + place, 0, sem="acquire") < gl.cdiv(keys, BLOCK_N):
            pass
        sums = dq_sum_ptr + (head.to(gl.int64) * padded + off_m) * BLOCK_D
        rows = dq_ptr + (head.to(gl.int64) * S + off_m) * D
        for start in range(0, BLOCK_M * BLOCK_D // 4, STEP):
            # four numbers of a lane: two pairs, of rows that are 8 apart
            quad = start + gl.arange(0, STEP, gl.SliceLayout(1, layout))
            member = gl.arange(0, 4, gl.SliceLayout(0, layout))
            dq = gl.load(sums + gl.expand_dims(quad * 4, 1) + gl.expand_dims(member, 0))
            # in the order of: half, warp, block of 8 columns, row and column of a lane
            row = quad // 256 % 4 * 16 + quad // 4 % 8
            column = quad // 32 % 8 * 8 + quad % 4 * 2
            if BLOCK_M == 64:
                column += quad // 1024 * 64
            else:
                row += quad // 1024 * 64
            row = gl.expand_dims(row, 1) + gl.expand_dims(member // 2 * 8, 0)
            column = gl.expand_dims(column, 1) + gl.expand_dims(member % 2, 0)
            mask = (off_m + row < S) & (column < D)
            gl.store(rows + row * D + column, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def take_queries(
    dk,  # [BLOCK_N, BLOCK_D]
    dv,  # [BLOCK_N, BLOCK_D]
    k,  # [BLOCK_N, BLOCK_D]
    v,  # [BLOCK_N, BLOCK_D]
    k_tile,  # of both warpgroups
    q_ring,
    do_ring,
    lse_ring,
    delta_ring,
    q_ready,
    q_free,
    do_ready,
    do_free,
    ds_ready,
    others_ready,
    ds_ring,
    dq_ring,
    dq_ready,
    dq_free,
    v_free,
    last,  # whether no other block of the tile follows
    number,  # of this block of queries among those that the program takes
    row,  # of the head among the padded rows
    off_m,
    seen,  # how many of the tile's keys the first of the queries sees
    scale_2,
    PART: gl.constexpr,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Add what a block of queries contributes; `scale_2` is in units of log 2."""
    BLOCK_M: gl.constexpr = q_ring.shape[2]
    BLOCK_N: gl.constexpr = k.shape[0]
    BLOCK_D: gl.constexpr = k.shape[1]
    layout: gl.constexpr = tile_layout(BLOCK_N, BLOCK_M, 4)
    operand: gl.constexpr = gl.DotOperandLayout(0, tile_layout(BLOCK_N, BLOCK_D, 4), 2)
    # the warpgroups divide the queries of dq, or the columns if there are 64 queries
    dq_layout: gl.constexpr = tile_layout(64, 64, 4)
    query: gl.constexpr = gl.SliceLayout(0, layout)
    q_slot = number % 2
    do_slot = number % 2
    q = q_ring.index(q_slot).reshape([BLOCK_M, BLOCK_D])
    do = do_ring.index(do_slot).reshape([BLOCK_M, BLOCK_D])
    nothing = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout)
    mbarrier.wait(q_ready.index(q_slot), (number // 2) & 1)
    scores = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(do_ready.index(do_slot), (number // 2) & 1)
    dp = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    lse = lse_ring.index(q_slot).load(query)
    p = gl.exp2(scores * scale_2 - gl.expand_dims(lse, 0))
    if MASKED:
        keys = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout)), 1)
        if CAUSAL:
            mask = keys - seen < gl.expand_dims(gl.arange(0, BLOCK_M, query), 0)
        else:
            mask = keys < seen
        p = gl.where(mask, p, 0.0)
    p_operand = gl.convert_layout(p.to(q.dtype), operand)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = delta_ring.index(do_slot).load(query)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    ds_slot = number % 2
    ds_ring.index(2 * ds_slot + PART).store(ds)
    ds_operand = gl.convert_layout(ds, operand)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    fence_async_shared()
    # a slot of ds is free when both warpgroups have come to the next one
    cta_barrier()
    arrive(ds_ready.index(ds_slot))
    arrive(v_free.index(0), last)
    mbarrier.wait(others_ready.index(ds_slot), (number // 2) & 1)
    dq = gl.zeros([64, 64], gl.float32, dq_layout)
    for half in gl.static_range(2):
        ds_half = ds_ring.index(2 * ds_slot + half)
        k_half = k_tile.index(half).reshape([BLOCK_N, BLOCK_D])
        if BLOCK_M == 64:
            k_half = k_half.slice(PART * 64, 64, dim=1)
        else:
            ds_half = ds_half.slice(PART * 64, 64, dim=1)
        dq = warpgroup_mma(ds_half.permute((1, 0)), k_half, dq, use_acc=half == 1, is_async=True)
    dv, p_operand = warpgroup_mma_wait(2, deps=(dv, p_operand))
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    mbarrier.wait(dq_free.index(PART), number & 1)
    # as registers hold it, for stores of 16 bytes: warp, block of 8 columns, row and column of a
    # lane, upper or lower rows, pair
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([128, 32])
    dq_ring.index(PART).store(dq)
    fence_async_shared()
    cta_barrier()
    arrive(dq_ready.index(PART))
    arrive(do_free.index(do_slot))
    dk, ds_operand = warpgroup_mma_wait(0, deps=(dk, ds_operand))
    cta_barrier()
    arrive(q_free.index(q_slot))
    return dk, dv


@gluon.jit
def skip_queries(
    k_tile,  # of both warpgroups
    q_ring,
    do_ring,
    q_ready,
    q_free,
    do_ready,
    do_free,
    ds_ready,
    others_ready,
    ds_ring,
    dq_ring,
    dq_ready,
    dq_free,
    v_free,
    last,
    number,  # of this block of queries among those that the program takes
    PART: gl.constexpr,
):
    """Do the part in dq of a block of queries that sees none of this warpgroup's keys."""
    BLOCK_M: gl.constexpr = q_ring.shape[2]
    BLOCK_N: gl.constexpr = k_tile.shape[2]
    BLOCK_D: gl.constexpr = q_ring.shape[3]
    dq_layout: gl.constexpr = tile_layout(64, 64, 4)
    q_slot = number % 2
    do_slot = number % 2
    ds_slot = number % 2
    # what is waited for is not read, but was not to be given back before
    mbarrier.wait(q_ready.index(q_slot), (number // 2) & 1)
    mbarrier.wait(do_ready.index(do_slot), (number // 2) & 1)
    nothing = gl.zeros([BLOCK_N, BLOCK_M], q_ring.dtype, tile_layout(BLOCK_N, BLOCK_M, 4))
    ds_ring.index(2 * ds_slot + PART).store(nothing)
    fence_async_shared()
    cta_barrier()
    arrive(ds_ready.index(ds_slot))
    arrive(v_free.index(0), last)
    mbarrier.wait(others_ready.index(ds_slot), (number // 2) & 1)
    ds_half = ds_ring.index(2 * ds_slot + 1 - PART)
    k_half = k_tile.index(1 - PART).reshape([BLOCK_N, BLOCK_D])
    if BLOCK_M == 64:
        k_half = k_half.slice(PART * 64, 64, dim=1)
    else:
        ds_half = ds_half.slice(PART * 64, 64, dim=1)
    dq = gl.zeros([64, 64], gl.float32, dq_layout)
    dq = warpgroup_mma(ds_half.permute((1, 0)), k_half, dq, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    mbarrier.wait(dq_free.index(PART), number & 1)
    # as registers hold it, for stores of 16 bytes: warp, block of 8 columns, row and column of a
    # lane, upper or lower rows, pair
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([128, 32])
    dq_ring.index(PART).store(dq)
    fence_async_shared()
    cta_barrier()
    arrive(dq_ready.index(PART))
    arrive(do_free.index(do_slot))
    arrive(q_free.index(q_slot))
@gluon.jit
def consume(
    dk_desc,
    dv_desc,
    k_tile,
    v_tile,
    out_tile,
    tile_ring,
    tile_ready,
    tile_free,
    q_ring,
    do_ring,
    lse_ring,
    delta_ring,
    kv_ready,
    k_free,
    v_free,
    q_ready,
    q_free,
    do_ready,
    do_free,
    ds_ready,
    others_ready,
    ds_ring,
    dq_ring,
    dq_ready,
    dq_free,
    kv_heads,
    group,
    S,
    T,
    padded,
    scale,
    scale_2,  # in units of log 2
    PART: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):
    """Write dk and dv of half a tile of keys, and add to dq."""
    BLOCK_M: gl.constexpr = q_ring.shape[2]
    BLOCK_D: gl.constexpr = q_ring.shape[3]
    ROWS: gl.constexpr = k_tile.shape[2]
    BLOCK_N: gl.constexpr = 2 * ROWS
    MORE_SEEN: gl.constexpr = BLOCK_M if CAUSAL else 0
    layout: gl.constexpr = tile_layout(ROWS, BLOCK_D, 4)
    own_k = k_tile.index(PART)
    own_v = v_tile.index(PART)
    own_out = out_tile.index(PART)
    k = own_k.reshape([ROWS, BLOCK_D])
    v = own_v.reshape([ROWS, BLOCK_D])
    out = own_out.reshape([ROWS, BLOCK_D])
    taken = 0
    tiles_taken = 0
    tile = next_tile(tile_ring, tile_ready, tile_free, tiles_taken)
    while tile >= 0:
        kv_head, off_n = (tile >> 32).to(gl.int32), tile.to(gl.int32) * BLOCK_N
        first, masked, blocks = queries_of(off_n, S, T, BLOCK_M, BLOCK_N, CAUSAL)
        off_n += PART * ROWS
        seen = T - off_n
        if CAUSAL:
            seen += first + 1 - S
        dk = gl.zeros([ROWS, BLOCK_D], gl.float32, layout)
        dv = gl.zeros([ROWS, BLOCK_D], gl.float32, layout)
        mbarrier.wait(kv_ready.index(0), tiles_taken & 1)
        for member in range(group):
            row = (kv_head * group + member) * padded
            unseen = 0
            if CAUSAL and PART == 1:
                if seen + BLOCK_M <= 1:
                    skip_queries(
                        *(k_tile, q_ring, do_ring, q_ready, q_free, do_ready, do_free),
                        *(ds_ready, others_ready, ds_ring, dq_ring, dq_ready, dq_free),
                        *(v_free, (member == group - 1) & (blocks == 1)),
                        *(taken, PART),
                    )
                    unseen = 1
            for block in range(unseen, blocks):
                dk, dv = take_queries(
                    *(dk, dv, k, v, k_tile, q_ring, do_ring, lse_ring, delta_ring),
                    *(q_ready, q_free, do_ready, do_free),
                    *(ds_ready, others_ready, ds_ring, dq_ring, dq_ready, dq_free, v_free),
                    *((member == group - 1) & (block == blocks - 1),),
                    *(taken + block, row, first + block * BLOCK_M),
                    *(seen + block * MORE_SEEN, scale_2),
                    *(PART, CAUSAL or HAS_TAIL, CAUSAL),
                )
            taken += blocks
        mbarrier.arrive(k_free.index(0), count=1)
        # dk and dv leave one after the other, while the next keys and values come
        tma.store_wait(0)
        out.store(dv.to(v.dtype))
        fence_async_shared()
        tma_store(dv_desc, [kv_head, off_n, 0], own_out)
        tma.store_wait(0)
        out.store((dk * scale).to(v.dtype))
        fence_async_shared()
        tma_store(dk_desc, [kv_head, off_n, 0], own_out)
        tiles_taken += 1
        tile = next_tile(tile_ring, tile_ready, tile_free, tiles_taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["kv_heads", "S", "T"])
def gradient_kernel(
    q_desc,  # [B * H, S, D]
    k_desc,  # [B * KV, T, D]
    v_desc,  # [B * KV, T, D]
    do_desc,  # [B * H, S, D]
    dk_desc,  # [B * KV, T, D]
    dv_desc,  # [B * KV, T, D]
    dq_desc,  # the float32 sums
    dq_ptr,  # [B * H, S, D]
    dq_sum_ptr,  # [B * H * padded, BLOCK_D]
    counts_ptr,  # [B * H * padded // BLOCK_M], 0
    lse_desc,  # [B * H * padded], in units of log 2
    delta_desc,  # [B * H * padded]
    taken_ptr,  # [1], how many tiles programs have taken, 0
    kv_heads,
    group,
    S,
    T,
    padded,
    units,  # multiprocessors
    D,
    scale,
    scale_2,  # in units of log 2
    CAUSAL: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):
    """Write dk and dv of a block of keys, and dq."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK: gl.constexpr = q_desc.block_type.shape
    KEYS: gl.constexpr = k_desc.block_type.shape
    BLOCK_M: gl.constexpr = BLOCK[1]
    BLOCK_D: gl.constexpr = BLOCK[2]
    ROWS: gl.constexpr = KEYS[1]
    BLOCK_N: gl.constexpr = 2 * ROWS
    k_tile = gl.allocate_shared_memory(dtype, [2] + KEYS, k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [2] + KEYS, v_desc.layout)
    out_tile = gl.allocate_shared_memory(dtype, [2] + KEYS, dv_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [2] + BLOCK, q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [2] + BLOCK, do_desc.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], lse_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], delta_desc.layout)
    # dS is computed transposed: [keys, queries], with the queries contiguous
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    DS_RING: gl.constexpr = [4, ROWS, BLOCK_M]
    ds_ring = gl.allocate_shared_memory(dtype, DS_RING, ds_layout)
    dq_ring = gl.allocate_shared_memory(
        gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout
    )
    TILE_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    tile_ring = gl.allocate_shared_memory(gl.int64, [2, 1], TILE_LAYOUT)
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(tile_ready.index(slot), count=1)
    tile_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(tile_free.index(slot), count=3)

    kv_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(1):
        mbarrier.init(kv_ready.index(slot), count=1)
    k_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(1):
        mbarrier.init(k_free.index(slot), count=2)
    v_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(1):
        mbarrier.init(v_free.index(slot), count=2)
    low_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(low_ready.index(slot), count=1)
    high_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(high_ready.index(slot), count=1)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(q_ready.index(slot), count=1)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(q_free.index(slot), count=2)
    do_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(do_ready.index(slot), count=1)
    do_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(do_free.index(slot), count=2)
    dq_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(dq_ready.index(slot), count=1)
    dq_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(dq_free.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    dk_desc, dv_desc, k_tile, v_tile, out_tile, tile_ring, tile_ready,
                    tile_free, q_ring, do_ring, lse_ring, delta_ring, kv_ready, k_free, v_free,
                    q_ready, q_free, do_ready, do_free, low_ready, high_ready, ds_ring, dq_ring,
                    dq_ready, dq_free, kv_heads, group, S, T, padded, scale, scale_2, 0, CAUSAL,
                    HAS_TAIL,
                ),
            ),
            (
                consume,
                (
                    dk_desc, dv_desc, k_tile, v_tile, out_tile, tile_ring, tile_ready,
                    tile_free, q_ring, do_ring, lse_ring, delta_ring, kv_ready, k_free, v_free,
                    q_ready, q_free, do_ready, do_free, high_ready, low_ready, ds_ring, dq_ring,
                    dq_ready, dq_free, kv_heads, group, S, T, padded, scale, scale_2, 1, CAUSAL,
                    HAS_TAIL,
                ),
            ),
            (
                produce,
                (
                    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, k_tile, v_tile,
                    taken_ptr, tile_ring, tile_ready, tile_free, q_ring, do_ring, lse_ring,
                    delta_ring, kv_ready, k_free, v_free, q_ready, q_free, do_ready, do_free,
                    kv_heads, group, S, T, padded, units, CAUSAL,
                ),
            ),
            (
                write_dq,
                (
                    dq_desc, dq_ring, dq_ready, dq_free, counts_ptr, tile_ring, tile_ready,
                    tile_free, kv_heads, group, S, T, padded, BLOCK_M, BLOCK_N, CAUSAL,
                ),
            ),
            (
                finish_dq,
                (
                    dq_ptr, dq_sum_ptr, counts_ptr, kv_heads, group, S, T, padded, D, scale,
                    BLOCK_M, BLOCK_N, BLOCK_D, CAUSAL,
                ),
            ),
        ],
        [4, 1, 1, 2],
        [240, 24, 24, 24],
    )


@triton.jit
def prepare_kernel(
    o_ptr,  # [heads, S, D]
    do_ptr,  # [heads, S, D]
    lse_ptr,  # [heads, S]
    delta_ptr,  # [heads * padded]
    lse_2_ptr,  # [heads * padded]
    dq_sum_ptr,  # [heads * padded, BLOCK_D]
    counts_ptr,  # [heads * padded // QUERIES]
    taken_ptr,  # [1]
    S,
    D,
    padded,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Write the sum of o * do over each row, lse in units of log 2, and zeros to all sums."""
    BLOCK_M: tl.constexpr = 4096 // BLOCK_D
    start = tl.program_id(0) * BLOCK_M
    head = start // padded
    rows = start % padded + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    sources = head.to(tl.int64) * S + rows
    offsets = sources[:, None] * D + columns[None, :]  # [BLOCK_M, BLOCK_D]
    mask = (rows < S)[:, None] & (columns < D)[None, :]
    o = tl.load(o_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    # exp2(score - inf) = 0: for rows beyond the last, and for those that see no key
    lse = tl.load(lse_ptr + sources, mask=rows < S, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    places = start.to(tl.int64) + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + places, tl.sum(o * do, axis=1))
    tl.store(lse_2_ptr + places, lse)
    zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    tl.store(dq_sum_ptr + places[:, None] * BLOCK_D + columns[None, :], zeros)
    tl.store(counts_ptr + start // QUERIES, 0)
    tl.store(taken_ptr, 0, mask=start == 0)


@triton.jit
def load_rows(
    source,  # pointer to [heads, length, D]
    head,
    start,
    length,
    D,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """Return [ROWS, BLOCK_D]; what lies outside is 0."""
    rows = start + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    offsets = (head.to(tl.int64) * length + rows) * D + columns
    mask = rows < length
    if not EVEN_D:
        mask = mask & (columns < D)
    return tl.load(source + offsets, mask=mask, other=0.0)


@triton.jit
def store_rows(
    target,  # like load_rows' source
    block,  # [ROWS, BLOCK_D]
    head,
    start,
    length,
    D,
    EVEN_D: tl.constexpr,
):
    """Write the rows that lie inside."""
    ROWS: tl.constexpr = block.shape[0]
    BLOCK_D: tl.constexpr = block.shape[1]
    rows = start + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    offsets = (head.to(tl.int64) * length + rows) * D + columns
    mask = rows < length
    if not EVEN_D:
        mask = mask & (columns < D)
    tl.store(target + offsets, block.to(target.dtype.element_ty), mask=mask)


@triton.jit
def delta_kernel(
    o_ptr,  # [rows, D]
    do_ptr,  # [rows, D]
    delta_ptr,  # [rows]
    dq_sum_ptr,  # [rows, D]
    rows,
    D,
    BLOCK_D: tl.constexpr,
):
    """Write the sum of o * do over each row, and zeros to dq_sum."""
    BLOCK_M: tl.constexpr = 4096 // BLOCK_D
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    offsets = places.to(tl.int64)[:, None] * D + columns[None, :]  # [BLOCK_M, BLOCK_D]
    mask = (places < rows)[:, None] & (columns < D)[None, :]
    o = tl.load(o_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + places, tl.sum(o * do, axis=1), mask=places < rows)
    tl.store(dq_sum_ptr + offsets, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), mask=mask)


@triton.jit
def add_queries(
    dk,  # [BLOCK_N, BLOCK_D]
    dv,  # [BLOCK_N, BLOCK_D]
    k_block,  # [BLOCK_N, BLOCK_D]
    v_block,  # [BLOCK_N, BLOCK_D]
    q,
    do,
    dq_sum,
    lse_ptr,
    delta_ptr,
    head,
    off_m,
    off_n,
    S,
    T,
    D,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """Add what BLOCK_M queries contribute; `scale` is in units of log 2."""
    rows = off_m + tl.arange(0, BLOCK_M)
    stats = head.to(tl.int64) * S + rows
    q_block = load_rows(q, head, off_m, S, D, BLOCK_M, BLOCK_D, EVEN_D)
    # queries beyond the last one get p = exp2(-inf) = 0
    lse = tl.load(lse_ptr + stats, mask=rows < S, other=float("inf")) * 1.4426950408889634
    scores = tl.dot(k_block, q_block.T)  # [BLOCK_N, BLOCK_M]
    p = tl.exp2(scores * scale - lse[None, :])
    if MASKED:
        keys = off_n + tl.arange(0, BLOCK_N)
        if CAUSAL:
            seen = keys[:, None] <= rows[None, :] + (T - S)
        else:
            seen = (keys < T)[:, None]
        p = tl.where(seen, p, 0.0)
    do_block = load_rows(do, head, off_m, S, D, BLOCK_M, BLOCK_D, EVEN_D)
    delta = tl.load(delta_ptr + stats, mask=rows < S, other=0.0)
    dp = tl.dot(v_block, do_block.T)
    dv = tl.dot(p.to(do_block.dtype), do_block, dv)
    ds = (p * (dp - delta[None, :])).to(q_block.dtype)
    dk = tl.dot(ds, q_block, dk)
    dq = tl.dot(ds.T, k_block)  # [BLOCK_M, BLOCK_D]
    columns = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < S)[:, None] & (columns < D)
    tl.atomic_add(dq_sum + stats[:, None] * D + columns, dq, mask=mask, sem="relaxed")
    return dk, dv


@triton.jit
def key_kernel(
    q,  # [B * H, S, D]
    k,  # [B * KV, T, D]
    v,  # [B * KV, T, D]
    do,  # [B * H, S, D]
    dk,  # [B * KV, T, D]
    dv,  # [B * KV, T, D]
    dq_sum,  # [B * H, S, D]
    lse_ptr,  # [B * H, S]
    delta_ptr,  # [B * H, S]
    kv_heads,
    group,
    S,
    T,
    D,
    scale,
    CAUSAL: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """Write dk and dv of BLOCK_N keys, and add to dq."""
    LOG2E: tl.constexpr = 1.4426950408889634
    kv_head = tl.program_id(0) // tl.cdiv(T, BLOCK_N)
    off_n = tl.program_id(0) % tl.cdiv(T, BLOCK_N) * BLOCK_N
    k_block = load_rows(k, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, EVEN_D)
    v_block = load_rows(v, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, EVEN_D)
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first = 0
    if CAUSAL:
        # bottom-right aligned: query i sees key i + T - S as its last
        first = tl.maximum(off_n - (T - S), 0) // BLOCK_M * BLOCK_M
    for member in range(group):
        head = kv_head * group + member
        for off_m in tl.range(first, S, BLOCK_M):
            dk_sum, dv_sum = add_queries(
                *(dk_sum, dv_sum, k_block, v_block, q, do, dq_sum, lse_ptr, delta_ptr),
                *(head, off_m, off_n, S, T, D, scale * LOG2E),
                *(BLOCK_M, BLOCK_N, BLOCK_D, CAUSAL or HAS_TAIL, CAUSAL, EVEN_D),
            )
    store_rows(dk, dk_sum * scale, kv_head, off_n, T, D, EVEN_D)
    store_rows(dv, dv_sum, kv_head, off_n, T, D, EVEN_D)


@triton.jit
def scale_kernel(
    dq_sum_ptr,  # [size]
    dq_ptr,  # [size]
    size,
    scale,
):
    BLOCK: tl.constexpr = 4096
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dq = tl.load(dq_sum_ptr + places, mask=places < size) * scale
    tl.store(dq_ptr + places, dq.to(dq_ptr.dtype.element_ty), mask=places < size)


@functools.cache
def compute_units(device: torch.device) -> int:
    """Return the number of multiprocessors, over which a persistent grid is spread."""
    if device.type == "cpu":  # Triton's interpreter
        return 2
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["multiprocessor_count"]


def describe(tensor: torch.Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Return a descriptor of [heads, length, D], moved in blocks of rows of one head."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor.from_tensor(tensor.flatten(0, 1), [1, rows, block_d], layout)


STATS_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
DQ_LAYOUT = gl.NVMMASharedLayout(
    swizzle_byte_width=128, element_bitwidth=32, rank=2
)


def differentiate_by_pointers(*tensors: torch.Tensor, causal: bool, scale: float) -> None:
    """Do the same with pointers, for heads wider than 128 and tensors that TMA cannot reach."""
    q, k, v, o, lse, do, dq, dk, dv = tensors
    B, H, S, D = q.shape
    KV, T = k.shape[1:3]
    block_d = max(16, 1 << (D - 1).bit_length())
    shrink = max(1, block_d // 128)  # wider heads take smaller blocks of about the same bytes
    rows = B * H * S
    delta = torch.empty_like(lse)
    dq_sum = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    grid = (rows // (4096 // block_d) + 1,)
    delta_kernel[grid](o, do, delta, dq_sum, rows, D, BLOCK_D=block_d)
    m, n = max(16, 32 // shrink), max(16, 64 // shrink)
    key_kernel[((T + n - 1) // n * B * KV,)](
        *(q, k, v, do, dk, dv, dq_sum, lse, delta, B * KV, H // KV, S, T, D, scale),
        CAUSAL=causal,
        HAS_TAIL=T % n != 0,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_D=block_d,
        EVEN_D=D == block_d,
        num_warps=4,
        num_stages=2,
    )
    scale_kernel[((q.numel() + 4095) // 4096,)](dq_sum, dq, q.numel(), scale)


def attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> None:
    """Write the gradients of q, k and v, with the probabilities computed anew from lse.

    Args:
        q: [B, H, S, D].
        k: [B, KV, T, D]; KV divides H.
        v: [B, KV, T, D].
        o: [B, H, S, D], the forward pass's output.
        lse: [B, H, S] float32, the log-sum-exp of the scores' rows.
        do: [B, H, S, D], the gradient of o.
        dq: [B, H, S, D].
        dk: [B, KV, T, D].
        dv: [B, KV, T, D].
        causal: Whether query i sees the keys up to i + T - S only.
        scale: Factor of the scores.
    """
    B, H, S, D = q.shape
    KV, T = k.shape[1:3]
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    # a descriptor's rows start at multiples of 16 bytes
    moved = (q, k, v, do, dk, dv)
    described = D <= 128 and D % 8 == 0 and not any(tensor.data_ptr() % 16 for tensor in moved)
    if not described:
        tensors = (q, k, v, o, lse, do, dq, dk, dv)
        differentiate_by_pointers(*tensors, causal=causal, scale=scale)
        return
    # wider heads take fewer queries at a time, of the same bytes
    block_d, m, n = (64, 128, 128) if D <= 64 else (128, 64, 128)
    padded = (S + m - 1) // m * m
    rows = B * H * padded
    lse_2, delta = torch.empty((2, rows), dtype=torch.float32, device=q.device)
    dq_sum = torch.empty((rows, block_d), dtype=torch.float32, device=q.device)
    counts = torch.empty(rows // m, dtype=torch.int32, device=q.device)
    taken = torch.empty(1, dtype=torch.int32, device=q.device)
    prepare_kernel[(rows // (4096 // block_d),)](
        *(o, do, lse, delta, lse_2, dq_sum, counts, taken, S, D, padded),
        BLOCK_D=block_d,
        QUERIES=m,
    )

    tiles = (T + n - 1) // n * B * KV
    units = compute_units(q.device)
    grid = (min(tiles, units),)
    gradient_kernel[grid](
        describe(q, m, block_d),
        describe(k, n // 2, block_d),
        describe(v, n // 2, block_d),
        describe(do, m, block_d),
        describe(dk, n // 2, block_d),
        describe(dv, n // 2, block_d),
        TensorDescriptor.from_tensor(dq_sum.view(-1, 32), [m * block_d // 64, 32], DQ_LAYOUT),
        *(dq, dq_sum, counts),
        TensorDescriptor.from_tensor(lse_2, [m], STATS_LAYOUT),
        TensorDescriptor.from_tensor(delta, [m], STATS_LAYOUT),
        *(taken, B * KV, H // KV, S, T, padded, units, D, scale, scale * 1.4426950408889634),
        CAUSAL=causal,
        HAS_TAIL=not causal and T % n != 0,
        num_warps=4,
    )
