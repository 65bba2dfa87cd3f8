# attention_backward / triton: one kernel for dk and dv, one for dq, both read through pointers.
# KV_BLOCK_M=32, KV_BLOCK_N=64, KV_STAGES=2, KV_WARPS=4, LOADS=pointers, MASKING=split,
# ORDER=tiles, Q_BLOCK_M=64, Q_BLOCK_N=32, Q_STAGES=2, Q_WARPS=4
import torch
import triton
import triton.language as tl


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
    rows,
    D,
    BLOCK_D: tl.constexpr,
):
    """Write the sum of o * do over each row."""
    BLOCK_M: tl.constexpr = 4096 // BLOCK_D
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    offsets = places.to(tl.int64)[:, None] * D + columns[None, :]  # [BLOCK_M, BLOCK_D]
    mask = (places < rows)[:, None] & (columns < D)[None, :]
    o = tl.load(o_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + places, tl.sum(o * do, axis=1), mask=places < rows)


@triton.jit
def add_queries(
    dk,  # [BLOCK_N, BLOCK_D]
    dv,  # [BLOCK_N, BLOCK_D]
    k_block,  # [BLOCK_N, BLOCK_D]
    v_block,  # [BLOCK_N, BLOCK_D]
    q,
    do,
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
        p = tl.where(keys[:, None] <= rows[None, :] + (T - S), p, 0.0)
    do_block = load_rows(do, head, off_m, S, D, BLOCK_M, BLOCK_D, EVEN_D)
    delta = tl.load(delta_ptr + stats, mask=rows < S, other=0.0)
    dp = tl.dot(v_block, do_block.T)
    dv = tl.dot(p.to(do_block.dtype), do_block, dv)
    ds = (p * (dp - delta[None, :])).to(q_block.dtype)
    dk = tl.dot(ds, q_block, dk)
    return dk, dv


@triton.jit
def key_kernel(
    q,  # [B * H, S, D]
    k,  # [B * KV, T, D]
    v,  # [B * KV, T, D]
    do,  # [B * H, S, D]
    dk,  # [B * KV, T, D]
    dv,  # [B * KV, T, D]
    lse_ptr,  # [B * H, S]
    delta_ptr,  # [B * H, S]
    kv_heads,
    group,
    S,
    T,
    D,
    scale,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr,
):
    """Write dk and dv of BLOCK_N keys."""
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
        unmasked = first
        if CAUSAL:
            unmasked = tl.cdiv(tl.maximum(off_n + BLOCK_N - 1 - (T - S), 0), BLOCK_M) * BLOCK_M
            for off_m in tl.range(first, tl.minimum(unmasked, S), BLOCK_M):
                dk_sum, dv_sum = add_queries(
                    *(dk_sum, dv_sum, k_block, v_block, q, do, lse_ptr, delta_ptr),
                    *(head, off_m, off_n, S, T, D, scale * LOG2E),
                    *(BLOCK_M, BLOCK_N, BLOCK_D, True, EVEN_D),
                )
        for off_m in tl.range(unmasked, S, BLOCK_M):
            dk_sum, dv_sum = add_queries(
                *(dk_sum, dv_sum, k_block, v_block, q, do, lse_ptr, delta_ptr),
                *(head, off_m, off_n, S, T, D, scale * LOG2E),
                *(BLOCK_M, BLOCK_N, BLOCK_D, False, EVEN_D),
            )
    store_rows(dk, dk_sum * scale, kv_head, off_n, T, D, EVEN_D)
    store_rows(dv, dv_sum, kv_head, off_n, T, D, EVEN_D)


@triton.jit
def add_keys(
    dq,  # [BLOCK_M, BLOCK_D]
    q_block,  # [BLOCK_M, BLOCK_D]
    do_block,  # [BLOCK_M, BLOCK_D]
    lse,  # [BLOCK_M], in units of log 2
    delta,  # [BLOCK_M]
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
    """Add what BLOCK_N keys contribute; `scale` is in units of log 2."""
    k_block = load_rows(k, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, EVEN_D)
    scores = tl.dot(q_block, k_block.T)  # [BLOCK_M, BLOCK_N]
    p = tl.exp2(scores * scale - lse[:, None])
    if MASKED:
        keys = off_n + tl.arange(0, BLOCK_N)
        p = tl.where(keys[None, :] <= last_key[:, None], p, 0.0)
    v_block = load_rows(v, kv_head, off_n, T, D, BLOCK_N, BLOCK_D, EVEN_D)
    dp = tl.dot(do_block, v_block.T)
    ds = (p * (dp - delta[:, None])).to(k_block.dtype)
    return tl.dot(ds, k_block, dq)


@triton.jit
def query_kernel(
    q,  # [B * H, S, D]
    k,  # [B * KV, T, D]
    v,  # [B * KV, T, D]
    do,  # [B * H, S, D]
    dq,  # [B * H, S, D]
    lse_ptr,  # [B * H, S]
    delta_ptr,  # [B * H, S]
    heads,
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
    """Write dq of BLOCK_M queries."""
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0) // tl.cdiv(S, BLOCK_M)
    tile = tl.program_id(0) % tl.cdiv(S, BLOCK_M)
    if CAUSAL:
        tile = tl.cdiv(S, BLOCK_M) - 1 - tile  # the longest first
    kv_head = head // group
    off_m = tile * BLOCK_M
    rows = off_m + tl.arange(0, BLOCK_M)
    stats = head.to(tl.int64) * S + rows
    q_block = load_rows(q, head, off_m, S, D, BLOCK_M, BLOCK_D, EVEN_D)
    do_block = load_rows(do, head, off_m, S, D, BLOCK_M, BLOCK_D, EVEN_D)
    lse = tl.load(lse_ptr + stats, mask=rows < S, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + stats, mask=rows < S, other=0.0)
    dq_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if CAUSAL:
        # bottom-right aligned: the last query sees all keys
        last_key = tl.minimum(rows + (T - S), T - 1)
        end = tl.minimum(off_m + BLOCK_M + (T - S), T)
        seen_by_all = tl.maximum(tl.minimum(off_m + (T - S) + 1, T), 0)
    else:
        last_key = tl.full([BLOCK_M], T - 1, tl.int32)
        end = T
        seen_by_all = T
    unmasked = seen_by_all // BLOCK_N * BLOCK_N
    for off_n in tl.range(0, unmasked, BLOCK_N):
        dq_sum = add_keys(
            *(dq_sum, q_block, do_block, lse, delta, k, v, kv_head, off_n, last_key),
            *(T, D, scale * LOG2E, BLOCK_N, BLOCK_D, False, EVEN_D),
        )
    if HAS_TAIL:
        for off_n in tl.range(unmasked, end, BLOCK_N):
            dq_sum = add_keys(
                *(dq_sum, q_block, do_block, lse, delta, k, v, kv_head, off_n, last_key),
                *(T, D, scale * LOG2E, BLOCK_N, BLOCK_D, True, EVEN_D),
            )
    store_rows(dq, dq_sum * scale, head, off_m, S, D, EVEN_D)


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
    block_d = max(16, 1 << (D - 1).bit_length())
    shrink = max(1, block_d // 128)  # wider heads take smaller blocks of about the same bytes
    rows = B * H * S
    delta = torch.empty_like(lse)
    delta_kernel[(rows // (4096 // block_d) + 1,)](o, do, delta, rows, D, BLOCK_D=block_d)

    m, n = max(16, 32 // shrink), max(16, 64 // shrink)
    key_kernel[((T + n - 1) // n * B * KV,)](
        *(q, k, v, do, dk, dv, lse, delta, B * KV, H // KV, S, T, D, scale),
        CAUSAL=causal,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_D=block_d,
        EVEN_D=D == block_d,
        num_warps=4,
        num_stages=2,
    )

    m, n = max(16, 64 // shrink), max(16, 32 // shrink)
    query_kernel[((S + m - 1) // m * B * H,)](
        *(q, k, v, do, dq, lse, delta, B * H, H // KV, S, T, D, scale),
        CAUSAL=causal,
        HAS_TAIL=causal or T % n != 0,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_D=block_d,
        EVEN_D=D == block_d,
        num_warps=4,
        num_stages=2,
    )
