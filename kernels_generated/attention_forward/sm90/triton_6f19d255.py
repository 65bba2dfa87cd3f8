# attention_forward / triton: a block of queries per program, keys and values read through
# descriptors.
# BLOCK_M=128, BLOCK_N=64, LOADS=descriptors, MASKING=always, NUM_STAGES=2, NUM_WARPS=4,
# ORDER=tiles, WARP_SPECIALIZE=false
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load_rows(
    source,  # descriptor of [heads, length, D], or pointer to it
    head,
    start,
    length,
    D,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """Return [ROWS, BLOCK_D]; what lies outside is 0."""
    if DESCRIBED:
        block = source.load([head, start, 0]).reshape(ROWS, BLOCK_D)
    else:
        rows = start + tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, BLOCK_D)[None, :]
        offsets = (head.to(tl.int64) * length + rows) * D + columns
        block = tl.load(source + offsets, mask=(rows < length) & (columns < D), other=0.0)
    return block


@triton.jit
def store_rows(
    target,  # like load_rows' source
    block,  # [ROWS, BLOCK_D]
    head,
    start,
    length,
    D,
    DESCRIBED: tl.constexpr,
):
    """Write the rows that lie inside."""
    ROWS: tl.constexpr = block.shape[0]
    BLOCK_D: tl.constexpr = block.shape[1]
    if DESCRIBED:
        target.store([head, start, 0], block.to(target.dtype).reshape(1, ROWS, BLOCK_D))
    else:
        rows = start + tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, BLOCK_D)[None, :]
        offsets = (head.to(tl.int64) * length + rows) * D + columns
        mask = (rows < length) & (columns < D)
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
    DESCRIBED: tl.constexpr,
):
    """Take in BLOCK_N keys; `scale` and `largest` are in units of log 2."""
    k_block = load_rows(k, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, DESCRIBED)
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
    v_block = load_rows(v, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, DESCRIBED)
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
    DESCRIBED: tl.constexpr,
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
    q_block = load_rows(q, head, off_m, S, D, BLOCK_M, BLOCK_D, DESCRIBED)
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
            *(T, D, scale, BLOCK_N, BLOCK_D, HAS_TAIL, DESCRIBED),
        )

    # a query without keys gets zeros, and -inf for the logarithm of their sum
    result = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    lse = (largest + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_ptr + head.to(tl.int64) * S + rows, lse, mask=rows < S)
    store_rows(o, result, head, off_m, S, D, DESCRIBED)


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
    block_d = max(16, 1 << (D - 1).bit_length())
    # wider heads take smaller blocks of about the same bytes
    shrink = max(1, block_d // 128)
    block_m, block_n = max(16, 128 // shrink), max(16, 64 // shrink)
    # a descriptor's rows start at multiples of 16 bytes
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | o.data_ptr()
    described = (D * q.element_size() | addresses) % 16 == 0
    arguments = (q, k, v, o)
    if described:
        arguments = (
            TensorDescriptor.from_tensor(q.view(-1, S, D), [1, block_m, block_d]),
            TensorDescriptor.from_tensor(k.view(-1, T, D), [1, block_n, block_d]),
            TensorDescriptor.from_tensor(v.view(-1, T, D), [1, block_n, block_d]),
            TensorDescriptor.from_tensor(o.view(-1, S, D), [1, block_m, block_d]),
        )
    attention_forward_kernel[((S + block_m - 1) // block_m * B * H,)](
        *(*arguments, lse, B * H, H // KV, S, T, D, scale * 1.4426950408889634),
        CAUSAL=causal,
        HAS_TAIL=causal or T % block_n != 0,
        BLOCK_D=block_d,
        DESCRIBED=described,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
        num_stages=2,
    )
