# attention_forward / gluon_sm90_narrow: one warpgroup of 64 queries each, fed by a producer warp
# through TMA; persistent; two programs share a multiprocessor.
# BLOCK_N=64, CONSUMERS=1, EPILOGUE=apart, KV_STAGES=4, MASKING=split, ORDER=groups,
# PERSISTENT=true, PINGPONG=false, PRODUCER_REGISTERS=24, PROGRAMS=2, Q_STAGES=2, TILES=dynamic
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
def keys_of(column, S, T, CAUSAL: gl.constexpr):
    """Return a tile's first query and how many blocks of keys it sees, of which how many need a
    mask. There is one of both at least."""
    BLOCK_M: gl.constexpr = 64
    BLOCK_N: gl.constexpr = 64
    if CAUSAL:
        # the longest first; bottom-right aligned: the last query sees all keys
        off_m = (gl.cdiv(S, BLOCK_M) - 1 - column) * BLOCK_M
        end = gl.minimum(off_m + BLOCK_M + (T - S), T)
        blocks = gl.maximum(gl.cdiv(end, BLOCK_N), 1)
        seen_by_all = gl.minimum(gl.maximum(off_m + (T - S) + 1, 0), T)
    else:
        off_m = column * BLOCK_M
        blocks = gl.cdiv(T, BLOCK_N)
        seen_by_all = T
    return off_m, blocks, gl.maximum(blocks - seen_by_all // BLOCK_N, 1)


@gluon.jit
def produce(
    q_desc,
    k_desc,
    v_desc,
    taken_ptr,
    tile_ring,
    tile_ready,
    tile_free,
    q_ring,
    k_ring,
    v_ring,
    q_ready,
    q_free,
    k_ready,
    k_free,
    v_ready,
    v_free,
    heads,
    group,
    S,
    T,
    units,
    CAUSAL: gl.constexpr,
):
    """Keep the rings full: one warp that does nothing else."""
    taken = 0
    tiles_taken = 0
    tile = take_tile(
        taken_ptr, tile_ring, tile_ready, tile_free, tiles_taken, gl.cdiv(S, 64), heads, units
    )
    while tile >= 0:
        head, column = (tile >> 32).to(gl.int32), tile.to(gl.int32)
        off_m, blocks, masked = keys_of(column, S, T, CAUSAL)
        kv_head = head // group
        for block in range(blocks):
            number = taken + block
            off_n = (blocks - 1 - block) * 64  # from the last keys, which may need a mask
            slot = number % 4
            parity = ((number // 4) & 1) ^ 1
            mbarrier.wait(k_free.index(slot), parity)
            mbarrier.expect(k_ready.index(slot), k_desc.block_type.nbytes)
            tma_load(k_desc, [kv_head, off_n, 0], k_ready.index(slot), k_ring.index(slot))
            if block == 0:
                # the first keys come while the tile before still needs its queries
                for part in gl.static_range(1):
                    q_slot = part + 1 * (tiles_taken % 2)
                    mbarrier.wait(q_free.index(q_slot), ((tiles_taken // 2) & 1) ^ 1)
                    bar = q_ready.index(q_slot)
                    mbarrier.expect(bar, q_desc.block_type.nbytes)
                    tma_load(q_desc, [head, off_m + part * 64, 0], bar, q_ring.index(q_slot))
            mbarrier.wait(v_free.index(slot), parity)
            mbarrier.expect(v_ready.index(slot), v_desc.block_type.nbytes)
            tma_load(v_desc, [kv_head, off_n, 0], v_ready.index(slot), v_ring.index(slot))
        taken += blocks
        tiles_taken += 1
        tile = take_tile(
            taken_ptr, tile_ring, tile_ready, tile_free, tiles_taken, gl.cdiv(S, 64), heads, units
        )


@gluon.jit
def soften(
    scores,  # [64, BLOCK_N]
    largest,  # [64]
    total,  # [64]
    off_n,
    off_m,
    S,
    T,
    scale,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
    layout: gl.constexpr,
):
    """Return the probabilities up to a factor, the maxima, the sums, and the factor of what was
    summed before; `scale` and `largest` are in units of log 2."""
    if MASKED:
        keys = off_n + gl.arange(0, 64, gl.SliceLayout(0, layout))
        if CAUSAL:
            last = off_m + (T - S) + gl.arange(0, 64, gl.SliceLayout(1, layout))
            seen = gl.expand_dims(keys, 0) <= gl.expand_dims(last, 1)
        else:
            seen = gl.expand_dims(keys < T, 0)
        scores = gl.where(seen, scores, float("-inf"))
    larger = gl.maximum(largest, gl.max(scores, 1) * scale)
    if MASKED:
        # as long as a query has seen no key, the difference to -inf is not a number
        shift = gl.where(larger == float("-inf"), 0.0, larger)
    else:
        shift = larger
    p = gl.exp2(scores * scale - gl.expand_dims(shift, 1))
    correction = gl.exp2(largest - shift)
    return p, larger, total * correction + gl.sum(p, 1), correction


@gluon.jit
def take_keys(
    accumulator,  # [64, BLOCK_D]
    p,  # [64, BLOCK_N], of the block before
    largest,  # [64]
    total,  # [64]
    q,  # [64, BLOCK_D]
    k_ring,
    v_ring,
    k_ready,
    k_free,
    v_ready,
    v_free,
    number,  # of this block of keys among those that the program takes
    off_n,
    off_m,
    S,
    T,
    scale,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Take in the values of the block before and the keys of this one."""
    BLOCK_D: gl.constexpr = q.shape[1]
    layout: gl.constexpr = tile_layout(64, 64, 4)
    o_layout: gl.constexpr = tile_layout(64, BLOCK_D, 4)
    k_slot = number % 4
    v_slot = (number - 1) % 4
    k = k_ring.index(k_slot).reshape([64, BLOCK_D])
    v = v_ring.index(v_slot).reshape([64, BLOCK_D])
    nothing = gl.zeros([64, 64], gl.float32, layout)
    mbarrier.wait(k_ready.index(k_slot), (number // 4) & 1)
    scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(v_slot), ((number - 1) // 4) & 1)
    accumulator = warpgroup_mma(p, v, accumulator, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(k_free.index(k_slot), count=1)
    next_p, largest, total, correction = soften(
        *(scores, largest, total, off_n, off_m, S, T, scale, MASKED, CAUSAL, layout)
    )
    accumulator, p = warpgroup_mma_wait(0, deps=(accumulator, p))
    mbarrier.arrive(v_free.index(v_slot), count=1)
    correction = gl.convert_layout(correction, gl.SliceLayout(1, o_layout))
    accumulator = accumulator * gl.expand_dims(correction, 1)
    p = gl.convert_layout(next_p.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2))
    return accumulator, p, largest, total


@gluon.jit
def consume(
    o_desc,
    lse_ptr,
    tile_ring,
    tile_ready,
    tile_free,
    q_ring,
    k_ring,
    v_ring,
    o_ring,
    q_ready,
    q_free,
    k_ready,
    k_free,
    v_ready,
    v_free,
    heads,
    group,
    S,
    T,
    scale,
    PART: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):
    """Write o and lse of 64 queries of each tile."""
    LOG2E: gl.constexpr = 1.4426950408889634
    BLOCK_D: gl.constexpr = q_ring.shape[3]
    layout: gl.constexpr = tile_layout(64, 64, 4)
    o_layout: gl.constexpr = tile_layout(64, BLOCK_D, 4)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    o_tile = o_ring.index(PART)
    taken = 0
    tiles_taken = 0
    tile = next_tile(tile_ring, tile_ready, tile_free, tiles_taken)
    while tile >= 0:
        head, column = (tile >> 32).to(gl.int32), tile.to(gl.int32)
        off_m, blocks, masked = keys_of(column, S, T, CAUSAL)
        off_m += PART * 64
        largest = gl.full([64], float("-inf"), gl.float32, row)
        total = gl.zeros([64], gl.float32, row)
        accumulator = gl.zeros([64, BLOCK_D], gl.float32, o_layout)
        nothing = gl.zeros([64, 64], gl.float32, layout)
        q_slot = PART + 1 * (tiles_taken % 2)
        q = q_ring.index(q_slot).reshape([64, BLOCK_D])
        mbarrier.wait(q_ready.index(q_slot), (tiles_taken // 2) & 1)
        slot = taken % 4
        mbarrier.wait(k_ready.index(slot), (taken // 4) & 1)
        k = k_ring.index(slot).reshape([64, BLOCK_D])
        scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(k_free.index(slot), count=1)
        off_n = (blocks - 1) * 64
        new_p, largest, total, correction = soften(
            *(scores, largest, total, off_n, off_m, S, T, scale * LOG2E),
            *(CAUSAL or HAS_TAIL, CAUSAL, layout),
        )
        p = gl.convert_layout(new_p.to(q.dtype), gl.DotOperandLayout(0, o_layout, 2))
        if CAUSAL:
            for block in range(1, masked):
                accumulator, p, largest, total = take_keys(
                    *(accumulator, p, largest, total, q, k_ring, v_ring),
                    *(k_ready, k_free, v_ready, v_free),
                    *(taken + block, (blocks - 1 - block) * 64, off_m, S, T, scale * LOG2E),
                    *(True, CAUSAL),
                )
            # else ptxas mixes up halves of registers, and swaps them at each turn of a loop
            p = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [p], q.dtype, True, 2)
        for block in range(masked, blocks):
            accumulator, p, largest, total = take_keys(
                *(accumulator, p, largest, total, q, k_ring, v_ring),
                *(k_ready, k_free, v_ready, v_free),
                *(taken + block, (blocks - 1 - block) * 64, off_m, S, T, scale * LOG2E),
                *(False, CAUSAL),
            )
        taken += blocks
        mbarrier.arrive(q_free.index(q_slot), count=1)
        slot = (taken - 1) % 4
        mbarrier.wait(v_ready.index(slot), ((taken - 1) // 4) & 1)
        v = v_ring.index(slot).reshape([64, BLOCK_D])
        accumulator = warpgroup_mma(p, v, accumulator, is_async=True)
        accumulator, p = warpgroup_mma_wait(0, deps=(accumulator, p))
        mbarrier.arrive(v_free.index(slot), count=1)
        # a query without keys gets zeros, and -inf for the logarithm of their sum
        divisor = gl.where(total == 0.0, 1.0, total)
        factor = gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, o_layout))
        o = accumulator * gl.expand_dims(factor, 1)
        lse = (largest + gl.log2(total)) * 0.6931471805599453
        rows = off_m + gl.arange(0, 64, row)
        gl.store(lse_ptr + head.to(gl.int64) * S + rows, lse, mask=rows < S)
        tma.store_wait(0)  # what was written before has left
        o_tile.reshape([64, BLOCK_D]).store(o.to(q.dtype))
        fence_async_shared()
        tma_store(o_desc, [head, off_m, 0], o_tile)
        tiles_taken += 1
        tile = next_tile(tile_ring, tile_ready, tile_free, tiles_taken)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "S", "T"])
def attention_kernel(
    q_desc,  # [B * H, S, D]
    k_desc,  # [B * KV, T, D]
    v_desc,  # [B * KV, T, D]
    o_desc,  # [B * H, S, D]
    lse_ptr,  # [B * H, S]
    taken_ptr,  # [1], how many tiles programs have taken, 0
    heads,
    group,
    S,
    T,
    units,  # multiprocessors
    scale,
    CAUSAL: gl.constexpr,
    HAS_TAIL: gl.constexpr,
):
    """Write o and lse of 64 queries at a time."""
    dtype: gl.constexpr = q_desc.dtype
    QUERIES: gl.constexpr = [2] + q_desc.block_type.shape
    KEYS: gl.constexpr = [4] + k_desc.block_type.shape
    q_ring = gl.allocate_shared_memory(dtype, QUERIES, q_desc.layout)
    o_ring = gl.allocate_shared_memory(dtype, [1] + o_desc.block_type.shape, o_desc.layout)
    k_ring = gl.allocate_shared_memory(dtype, KEYS, k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, KEYS, v_desc.layout)
    TILE_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    tile_ring = gl.allocate_shared_memory(gl.int64, [2, 1], TILE_LAYOUT)
    tile_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(tile_ready.index(slot), count=1)
    tile_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(tile_free.index(slot), count=1)

    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(q_ready.index(slot), count=1)
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(q_free.index(slot), count=1)
    k_ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(4):
        mbarrier.init(k_ready.index(slot), count=1)
    k_free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(4):
        mbarrier.init(k_free.index(slot), count=1)
    v_ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(4):
        mbarrier.init(v_ready.index(slot), count=1)
    v_free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(4):
        mbarrier.init(v_free.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                consume,
                (
                    o_desc, lse_ptr, tile_ring, tile_ready, tile_free, q_ring, k_ring, v_ring,
                    o_ring, q_ready, q_free, k_ready, k_free, v_ready, v_free, heads, group, S,
                    T, scale, 0, CAUSAL, HAS_TAIL,
                ),
            ),
            (
                produce,
                (
                    q_desc, k_desc, v_desc, taken_ptr, tile_ring, tile_ready, tile_free, q_ring,
                    k_ring, v_ring, q_ready, q_free, k_ready, k_free, v_ready, v_free, heads,
                    group, S, T, units, CAUSAL,
                ),
            ),
        ],
        [1],
        [24],
    )


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
def attend(
    accumulator,  # [BLOCK_M, BLOCK_D]
    total,  # [BLOCK_M]
    largest,  # [BLOCK_M]
    q,  # [BLOCK_M, BLOCK_D]
    k,
    v,
    kv_head,
    off_n,
    last_key,  # [BLOCK_M], the last key that each query sees
    T,
    D,
    scale,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """Take in BLOCK_N keys; `scale` and `largest` are in units of log 2."""
    k_block = load_rows(k, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, EVEN_D)
    scores = tl.dot(q, k_block.T)  # [BLOCK_M, BLOCK_N]
    if MASKED:
        keys = off_n + tl.arange(0, BLOCK_N)
        scores = tl.where(keys[None, :] <= last_key[:, None], scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    if MASKED:
        # as long as a query has seen no key, the difference to -inf is not a number
        shift = tl.where(larger == float("-inf"), 0.0, larger)
    else:
        shift = larger
    p = tl.exp2(scores * scale - shift[:, None])
    correction = tl.exp2(largest - shift)
    total = total * correction + tl.sum(p, axis=1)
    accumulator = accumulator * correction[:, None]
    v_block = load_rows(v, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, EVEN_D)
    accumulator = tl.dot(p.to(v_block.dtype), v_block, accumulator)
    return accumulator, total, larger


@triton.jit
def attention_forward_kernel(
    q,  # [B * H, S, D]
    k,  # [B * KV, T, D]
    v,  # [B * KV, T, D]
    o,  # [B * H, S, D]
    lse_ptr,  # [B * H, S]
    heads,
    group,
    S,
    T,
    D,
    scale,
    CAUSAL: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tiles = tl.cdiv(S, BLOCK_M)
    head = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tl.cdiv(S, BLOCK_M) - 1 - tile  # the longest first
    kv_head = head // group
    off_m = tile * BLOCK_M
    rows = off_m + tl.arange(0, BLOCK_M)
    q_block = load_rows(q, head, off_m, S, D, BLOCK_M, BLOCK_D, EVEN_D)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)

    if CAUSAL:
        # bottom-right aligned: the last query sees all keys
        last_key = tl.minimum(rows + (T - S), T - 1)
        end = tl.minimum(off_m + BLOCK_M + (T - S), T)
    else:
        last_key = tl.full([BLOCK_M], T - 1, tl.int32)
        end = T
    for off_n in tl.range(0, end, BLOCK_N):
        accumulator, total, largest = attend(
            *(accumulator, total, largest, q_block, k, v, kv_head, off_n, last_key),
            *(T, D, scale, BLOCK_N, BLOCK_D, HAS_TAIL, EVEN_D),
        )

    # a query without keys gets zeros, and -inf for the logarithm of their sum
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = (largest + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_ptr + head.to(tl.int64) * S + rows, lse, mask=rows < S)
    store_rows(o, result, head, off_m, S, D, EVEN_D)


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


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> None:
    """Write softmax(scale * q k^T) v to o and the log-sum-exp of the scores' rows to lse.

    Args:
        q: [B, H, S, D].
        k: [B, KV, T, D]; KV divides H.
        v: [B, KV, T, D].
        o: [B, H, S, D].
        lse: [B, H, S] float32.
        causal: Whether query i sees the keys up to i + T - S only.
        scale: Factor of the scores.
    """
    B, H, S, D = q.shape
    KV, T = k.shape[1:3]
    if B * H * S * D == 0:
        return
    if T == 0:
        o.zero_()
        lse.fill_(float("-inf"))
        return
    if scale <= 0.0:
        # the kernel takes the maximum before it scales
        q, scale = (-q, -scale) if scale < 0.0 else (torch.zeros_like(q), 1.0)
    tensors = (q, k, v, o)
    # a descriptor's rows start at multiples of 16 bytes
    if D > 64 or D % 8 or any(tensor.data_ptr() % 16 for tensor in tensors):
        block_d = max(16, 1 << (D - 1).bit_length())
        shrink = max(1, block_d // 128)  # wider heads take smaller blocks of about the same bytes
        block_m, block_n = max(16, 64 // shrink), max(16, 32 // shrink)
        attention_forward_kernel[((S + block_m - 1) // block_m * B * H,)](
            *(q, k, v, o, lse, B * H, H // KV, S, T, D, scale * 1.4426950408889634),
            CAUSAL=causal,
            HAS_TAIL=causal or T % block_n != 0,
            BLOCK_D=block_d,
            EVEN_D=D == block_d,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=4,
            num_stages=2,
        )
        return
    block_d = 64
    tiles = (S + 63) // 64 * B * H
    units = 2 * compute_units(q.device)
    taken = torch.zeros(1, dtype=torch.int32, device=q.device)
    grid = (min(tiles, units),)
    attention_kernel[grid](
        describe(q, 64, block_d),
        describe(k, 64, block_d),
        describe(v, 64, block_d),
        describe(o, 64, block_d),
        *(lse, taken, B * H, H // KV, S, T, units, scale),
        CAUSAL=causal,
        HAS_TAIL=T % 64 != 0,
        num_warps=4,
        maxnreg=128,
    )
