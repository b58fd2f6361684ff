"""Paged, causal attention of rows with several new tokens, its grid known from the number of tokens and rows alone.

A tile is BLOCK_M (token, query head) pairs of one row and KV head, so that the query heads of a group read keys and
values once, and a chunk of a few tokens fills the tensor cores. Row r's tiles begin at number
query_start[r] * group // BLOCK_M + r: that leaves room for all of them and needs no prefix sum (the idea is vLLM's),
so a program finds its row with one look at query_start.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options
from mizzen.kernels.triton.paging import pages_of


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    block_m: int = 128
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    prefetch: bool = True
    pdl: bool = False


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_slots: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    out: Tensor,
    *,
    min_tokens: int = 1,
    config: PrefillConfig | None = None,
) -> None:
    """Row r's tokens [query_start[r], query_start[r + 1]) are the last of its seq_lens[r] keys.

    q, out: [T, heads, D] bf16 or fp16; caches: [pages, page_size, KV heads, D]; page_table [slots, max_pages],
    row_slots [R], seq_lens [R], query_start [R + 1], all int32. Rows with fewer than ``min_tokens`` tokens are left
    alone (2 leaves decode rows to another kernel). Page sizes are powers of two.
    """
    _, page_size, kv_heads, head_dim = k_cache.shape
    num_tokens, num_heads, _ = q.shape
    assert page_size & (page_size - 1) == 0
    assert k_cache.stride() == v_cache.stride()
    assert q.stride(2) == out.stride(2) == k_cache.stride(3) == 1
    group, rows = num_heads // kv_heads, len(seq_lens)
    config = config or PrefillConfig()
    _prefill_kernel[(kv_heads, num_tokens * group // config.block_m + rows)](
        q,
        k_cache,
        v_cache,
        out,
        page_table,
        row_slots,
        seq_lens,
        query_start,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        page_table.stride(0),
        head_dim**-0.5 * 1.4426950408889634,  # exp(x) = exp2(x * log2(e))
        rows,
        min_tokens,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        ROWS=max(16, triton.next_power_of_2(rows)),
        PREFETCH=config.prefetch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(q.device, config.pdl),
    )


@triton.jit(do_not_specialize=["num_rows", "min_tokens"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    page_table,
    row_slots,
    seq_lens,
    query_start,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    scale,
    num_rows,
    min_tokens,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    tile = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    base = tl.load(query_start)
    tiles_start = (tl.load(query_start + rows, mask=rows < num_rows, other=0) - base) * GROUP // BLOCK_M + rows
    row = tl.sum(((rows < num_rows) & (tiles_start <= tile)).to(tl.int32), 0) - 1
    begin = tl.load(query_start + row)
    num_tokens = tl.load(query_start + row + 1) - begin
    num_tiles = tl.cdiv(num_tokens * GROUP, BLOCK_M)
    # The last tile of a row has the most keys: it goes first.
    tile = num_tiles - 1 - (tile - row - (begin - base) * GROUP // BLOCK_M)
    if (tile < 0) | (num_tokens < min_tokens):
        return
    length = tl.load(seq_lens + row)
    table = page_table + tl.load(row_slots + row).to(tl.int64) * table_stride

    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = member // GROUP
    query_head = head * GROUP + member % GROUP
    position = length - num_tokens + token
    dim = tl.arange(0, HEAD_DIM_PAD)
    column = tl.arange(0, BLOCK_N)
    tile_mask = token[:, None] < num_tokens
    if HEAD_DIM != HEAD_DIM_PAD:
        tile_mask = tile_mask & (dim < HEAD_DIM)[None, :]
    if PDL:
        # What is read above was written before the kernel before this one started.
        gdc_wait()
        gdc_launch_dependents()
    rows_token = (begin + token).to(tl.int64)[:, None]
    queries = tl.load(
        q + rows_token * q_token_stride + query_head[:, None] * q_head_stride + dim[None, :], mask=tile_mask, other=0.0
    )
    k_head = k_cache + head * kv_head_stride
    v_head = v_cache + head * kv_head_stride

    # Keys that the tile's first token sees need no mask; those that its last does not are not read.
    first_position = length - num_tokens + tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_tokens - 1)
    num_keys = length - num_tokens + last_token + 1
    plain_end = (first_position + 1) // BLOCK_N * BLOCK_N

    maximum = tl.full([BLOCK_M], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    acc, weight, maximum = _attend(
        queries, k_head, v_head, table, acc, weight, maximum, position, 0, plain_end, num_keys, page_stride,
        slot_stride, scale, dim, column, HEAD_DIM, HEAD_DIM_PAD, PAGE_SIZE, BLOCK_N, PREFETCH, False,
    )  # fmt: skip
    acc, weight, maximum = _attend(
        queries, k_head, v_head, table, acc, weight, maximum, position, plain_end, num_keys, num_keys, page_stride,
        slot_stride, scale, dim, column, HEAD_DIM, HEAD_DIM_PAD, PAGE_SIZE, BLOCK_N, PREFETCH, True,
    )  # fmt: skip
    result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(
        out + rows_token * out_token_stride + query_head[:, None] * out_head_stride + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=tile_mask,
    )


@triton.jit
def _attend(
    queries,
    k_head,
    v_head,
    table,
    acc,
    weight,
    maximum,
    position,
    start,
    end,
    num_keys,
    page_stride,
    slot_stride,
    scale,
    dim,
    column,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFETCH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys [start, end) in blocks; only where MASKED may there be keys that some token does not see."""
    next_page = pages_of(table, start, num_keys, column, PAGE_SIZE, BLOCK_N)
    for first in tl.range(start, end, BLOCK_N):
        if PREFETCH:
            page = next_page
            next_page = pages_of(table, first + BLOCK_N, num_keys, column, PAGE_SIZE, BLOCK_N)
        else:
            page = pages_of(table, first, num_keys, column, PAGE_SIZE, BLOCK_N)
        offset = page.to(tl.int64) * page_stride + ((first + column) % PAGE_SIZE) * slot_stride
        offset = offset[:, None] + dim[None, :]
        if MASKED or HEAD_DIM != HEAD_DIM_PAD:
            mask = (first + column < num_keys)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(k_head + offset, mask=mask, other=0.0)
            v = tl.load(v_head + offset, mask=mask, other=0.0)
        else:
            k = tl.load(k_head + offset)
            v = tl.load(v_head + offset)
        scores = tl.dot(queries, tl.trans(k))
        if MASKED:
            scores = tl.where((first + column)[None, :] <= position[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        weight = weight * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        maximum = new_maximum
    return acc, weight, maximum
