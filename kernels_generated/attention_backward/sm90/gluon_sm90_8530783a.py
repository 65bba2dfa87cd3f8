# attention_backward / gluon_sm90: dK and dV of a block of keys by two warpgroups together, fed
# by a producer warp through TMA; dQ is added in float32 by atomics, in the order of registers,
# persistent.
# ARRIVALS=grouped, BLOCK_M=128, BLOCK_N=128, DO_STAGES=2, DQ_MODE=linear_atomic, DQ_SPLIT=1,
# DQ_STAGES=1, DQ_SWIZZLE=128, DS_ORDER=queries, DS_STAGES=1, MASKING=split, ORDER=groups,
# P_ROUNDED=false, PERSISTENT=true, PRODUCTS=dq_first, PROGRAMS=1, Q_STAGES=2,
# SCHEDULE=cooperative, STATS=tma_late, WORKER_REGISTERS=24
import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    KV_BYTES: gl.constexpr = k_desc.block_type.nbytes + v_desc.block_type.nbytes
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
                    tma_load(v_desc, [kv_head, off_n, 0], bar_kv, v_tile)
                    mbarrier.wait(k_free.index(0), (tiles_taken & 1) ^ 1)
                    tma_load(k_desc, [kv_head, off_n, 0], bar_kv, k_tile)
            taken += blocks
        tiles_taken += 1
        tile = take_tile(
            taken_ptr, tile_ring, tile_ready, tile_free, tiles_taken, columns, kv_heads, units
        )


@gluon.jit
def take_queries(
    dk,  # [BLOCK_N, BLOCK_D]
    dv,  # [BLOCK_N, BLOCK_D]
    k,  # [BLOCK_N, BLOCK_D]
    v,  # [BLOCK_N, BLOCK_D]
    q_ring,
    do_ring,
    lse_ring,
    delta_ring,
    q_ready,
    q_free,
    do_ready,
    do_free,
    ds_ring,
    dq_sum_ptr,
    v_free,
    last,  # whether no other block of the tile follows
    number,  # of this block of queries among those that the program takes
    row,  # of the head among the padded rows
    off_m,
    seen,  # how many of the tile's keys the first of the queries sees
    scale_2,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Add what a block of queries contributes; `scale_2` is in units of log 2."""
    BLOCK_M: gl.constexpr = q_ring.shape[2]
    BLOCK_N: gl.constexpr = k.shape[0]
    BLOCK_D: gl.constexpr = k.shape[1]
    layout: gl.constexpr = tile_layout(BLOCK_N, BLOCK_M, 8)
    operand: gl.constexpr = gl.DotOperandLayout(0, tile_layout(BLOCK_N, BLOCK_D, 8), 2)
    DQ_COLUMNS: gl.constexpr = BLOCK_D
    dq_layout: gl.constexpr = tile_layout(BLOCK_M, DQ_COLUMNS, 8)
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
    ds_tile = ds_ring.index(0)
    ds_tile.store(ds)
    ds_operand = gl.convert_layout(ds, operand)
    ds_rows = ds_tile.permute((1, 0))  # [BLOCK_M, BLOCK_N]
    no_dq = gl.zeros([BLOCK_M, DQ_COLUMNS], gl.float32, dq_layout)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    fence_async_shared()
    cta_barrier()
    arrive(v_free.index(0), last)
    dq = warpgroup_mma(ds_rows, k, no_dq, use_acc=False, is_async=True)
    dv, p_operand = warpgroup_mma_wait(1, deps=(dv, p_operand))
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    # as registers hold it, for additions of 16 bytes: warp column, warp row, block of 8 columns,
    # row and column of a lane, upper or lower rows, pair
    WARPS_M: gl.constexpr = dq.shape[0] // 16
    WARPS_N: gl.constexpr = 8 // WARPS_M
    BLOCKS_D: gl.constexpr = dq.shape[1] // (8 * WARPS_N)
    linear: gl.constexpr = gl.BlockedLayout([BLOCKS_D, 4], [1, 32], [8, 1], [1, 0])
    dq = dq.reshape([WARPS_M, 2, 8, WARPS_N, BLOCKS_D, 4, 2])
    dq = dq.permute((3, 0, 4, 2, 5, 1, 6)).reshape([8 * BLOCKS_D, 128])
    dq = gl.convert_layout(dq, linear, assert_trivial=True)
    sums = dq_sum_ptr + (row + off_m).to(gl.int64) * BLOCK_D
    sums += gl.expand_dims(gl.arange(0, 8 * BLOCKS_D, gl.SliceLayout(1, linear)) * 128, 1)
    sums += gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, linear)), 0)
    gl.atomic_add(sums, dq, sem="relaxed")
    dk, ds_operand = warpgroup_mma_wait(0, deps=(dk, ds_operand))
    cta_barrier()
    arrive(do_free.index(do_slot))
    arrive(q_free.index(q_slot))
    return dk, dv


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
    ds_ring,
    dq_sum_ptr,
    kv_heads,
    group,
    S,
    T,
    padded,
    scale,
    scale_2,  # in units of log 2
    CAUSAL: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):
    """Write dk and dv of a tile of keys, and add to dq."""
    BLOCK_M: gl.constexpr = q_ring.shape[2]
    BLOCK_D: gl.constexpr = q_ring.shape[3]
    BLOCK_N: gl.constexpr = k_tile.shape[1]
    MORE_SEEN: gl.constexpr = BLOCK_M if CAUSAL else 0
    layout: gl.constexpr = tile_layout(BLOCK_N, BLOCK_D, 8)
    k = k_tile.reshape([BLOCK_N, BLOCK_D])
    v = v_tile.reshape([BLOCK_N, BLOCK_D])
    out = out_tile.reshape([BLOCK_N, BLOCK_D])
    taken = 0
    tiles_taken = 0
    tile = next_tile(tile_ring, tile_ready, tile_free, tiles_taken)
    while tile >= 0:
        kv_head, off_n = (tile >> 32).to(gl.int32), tile.to(gl.int32) * BLOCK_N
        first, masked, blocks = queries_of(off_n, S, T, BLOCK_M, BLOCK_N, CAUSAL)
        seen = T - off_n
        if CAUSAL:
            seen += first + 1 - S
        dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, layout)
        dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, layout)
        mbarrier.wait(kv_ready.index(0), tiles_taken & 1)
        for member in range(group):
            row = (kv_head * group + member) * padded
            unmasked = 0
            if CAUSAL or HAS_TAIL:
                for block in range(masked):
                    dk, dv = take_queries(
                        *(dk, dv, k, v, q_ring, do_ring, lse_ring, delta_ring),
                        *(q_ready, q_free, do_ready, do_free),
                        *(ds_ring, dq_sum_ptr, v_free),
                        *((member == group - 1) & (block == blocks - 1),),
                        *(taken + block, row, first + block * BLOCK_M),
                        *(seen + block * MORE_SEEN, scale_2),
                        *(True, CAUSAL),
                    )
                unmasked = masked
            for block in range(unmasked, blocks):
                dk, dv = take_queries(
                    *(dk, dv, k, v, q_ring, do_ring, lse_ring, delta_ring),
                    *(q_ready, q_free, do_ready, do_free),
                    *(ds_ring, dq_sum_ptr, v_free),
                    *((member == group - 1) & (block == blocks - 1),),
                    *(taken + block, row, first + block * BLOCK_M),
                    *(seen + block * MORE_SEEN, scale_2),
                    *(False, CAUSAL),
                )
            taken += blocks
        mbarrier.arrive(k_free.index(0), count=1)
        # dk and dv leave one after the other, while the next keys and values come
        tma.store_wait(0)
        out.store(dv.to(v.dtype))
        fence_async_shared()
        tma_store(dv_desc, [kv_head, off_n, 0], out_tile)
        tma.store_wait(0)
        out.store((dk * scale).to(v.dtype))
        fence_async_shared()
        tma_store(dk_desc, [kv_head, off_n, 0], out_tile)
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
    dq_sum_ptr,  # [B * H * padded, BLOCK_D]
    lse_desc,  # [B * H * padded], in units of log 2
    delta_desc,  # [B * H * padded]
    taken_ptr,  # [1], how many tiles programs have taken, 0
    kv_heads,
    group,
    S,
    T,
    padded,
    units,  # multiprocessors
    scale,
    scale_2,  # in units of log 2
    CAUSAL: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):
    """Write dk and dv of a block of keys, and add to dq."""
    dtype: gl.constexpr = q_desc.dtype
    BLOCK: gl.constexpr = q_desc.block_type.shape
    KEYS: gl.constexpr = k_desc.block_type.shape
    BLOCK_M: gl.constexpr = BLOCK[1]
    BLOCK_N: gl.constexpr = KEYS[1]
    k_tile = gl.allocate_shared_memory(dtype, KEYS, k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, KEYS, v_desc.layout)
    out_tile = gl.allocate_shared_memory(dtype, KEYS, dv_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [2] + BLOCK, q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [2] + BLOCK, do_desc.layout)
    lse_ring = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], lse_desc.layout)
    delta_ring = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], delta_desc.layout)
    # dS is computed transposed: [keys, queries], with the queries contiguous
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    DS_RING: gl.constexpr = [1, BLOCK_N, BLOCK_M]
    ds_ring = gl.allocate_shared_memory(dtype, DS_RING, ds_layout)
    TILE_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    tile_ring = gl.allocate_shared_memory(gl.int64, [2, 1], TILE_LAYOUT)
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(tile_ready.index(slot), count=1)
    tile_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(tile_free.index(slot), count=1)

    kv_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(1):
        mbarrier.init(kv_ready.index(slot), count=1)
    k_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(1):
        mbarrier.init(k_free.index(slot), count=1)
    v_free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(1):
        mbarrier.init(v_free.index(slot), count=1)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(q_ready.index(slot), count=1)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(q_free.index(slot), count=1)
    do_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(do_ready.index(slot), count=1)
    do_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(do_free.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    dk_desc, dv_desc, k_tile, v_tile, out_tile, tile_ring, tile_ready,
                    tile_free, q_ring, do_ring, lse_ring, delta_ring, kv_ready, k_free, v_free,
                    q_ready, q_free, do_ready, do_free, ds_ring, dq_sum_ptr, kv_heads, group, S,
                    T, padded, scale, scale_2, CAUSAL, HAS_TAIL,
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
        ],
        [1],
        [24],
    )


@triton.jit
def prepare_kernel(
    o_ptr,  # [heads, S, D]
    do_ptr,  # [heads, S, D]
    lse_ptr,  # [heads, S]
    delta_ptr,  # [heads * padded]
    lse_2_ptr,  # [heads * padded]
    dq_sum_ptr,  # [heads * padded, BLOCK_D]
    taken_ptr,  # [1]
    S,
    D,
    padded,
    BLOCK_D: tl.constexpr,
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
    tl.store(taken_ptr, 0, mask=start == 0)


@triton.jit
def finish_kernel(
    dq_sum_ptr,  # [heads * padded, BLOCK_D], each block in the order of registers
    dq_ptr,  # [heads, S, D]
    S,
    D,
    padded,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write dq, `scale` times the sums."""
    start = tl.program_id(0) * BLOCK_M
    columns = tl.arange(0, BLOCK_D)
    sums = tl.load(dq_sum_ptr + start.to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_M * BLOCK_D))
    dq = (sums * scale).to(dq_ptr.dtype.element_ty)
    # back from: warp column, warp row, block of 8 columns, row and column of a lane, upper or
    # lower rows, pair
    WARPS_N: tl.constexpr = 128 // BLOCK_M
    BLOCKS_D: tl.constexpr = BLOCK_D // (8 * WARPS_N)
    dq = dq.reshape([WARPS_N, BLOCK_M // 16, BLOCKS_D, 8, 4, 2, 2])
    dq = dq.permute((1, 5, 3, 0, 2, 4, 6)).reshape([BLOCK_M, BLOCK_D])
    head = start // padded
    rows = start % padded + tl.arange(0, BLOCK_M)
    offsets = (head.to(tl.int64) * S + rows)[:, None] * D + columns[None, :]
    tl.store(dq_ptr + offsets, dq, mask=(rows < S)[:, None] & (columns < D)[None, :])


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
    taken = torch.empty(1, dtype=torch.int32, device=q.device)
    prepare_kernel[(rows // (4096 // block_d),)](
        *(o, do, lse, delta, lse_2, dq_sum, taken, S, D, padded), BLOCK_D=block_d
    )

    tiles = (T + n - 1) // n * B * KV
    units = compute_units(q.device)
    grid = (min(tiles, units),)
    gradient_kernel[grid](
        describe(q, m, block_d),
        describe(k, n, block_d),
        describe(v, n, block_d),
        describe(do, m, block_d),
        describe(dk, n, block_d),
        describe(dv, n, block_d),
        dq_sum,
        TensorDescriptor.from_tensor(lse_2, [m], STATS_LAYOUT),
        TensorDescriptor.from_tensor(delta, [m], STATS_LAYOUT),
        *(taken, B * KV, H // KV, S, T, padded, units, scale, scale * 1.4426950408889634),
        CAUSAL=causal,
        HAS_TAIL=not causal and T % n != 0,
        num_warps=8,
    )
    finish_kernel[(rows // m,)](
        *(dq_sum, dq, S, D, padded, scale), BLOCK_M=m, BLOCK_D=block_d, num_warps=8
    )
