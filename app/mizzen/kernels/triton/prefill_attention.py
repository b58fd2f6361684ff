"""Paged, causal attention of rows with several new tokens; its grid follows from the number of tokens and rows alone.

A tile is BLOCK_M (token, query head) pairs of one row and KV head, so that the query heads of a group read keys and
values once, and a chunk of a few tokens fills the tensor cores. ``plan`` (once a step) numbers the tiles of the rows
that have any, one after the other, and writes down each tile's row, so that no layer has to look for it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options
from mizzen.kernels.triton.paging import pages_of

_PLAN_TILES = 16  # that one program of the plan describes


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Measured on an H200: docs/performance.md, "Prefill attention"."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    pdl: bool = True  # launch while the kernel before still runs (sm90)

    @classmethod
    def default(cls, head_dim: int) -> "PrefillConfig":
        return cls(num_stages=3 if head_dim <= 128 else 2)  # as shared memory allows


class PagedPrefill:
    """Row r's tokens [query_start[r], query_start[r + 1]) are the last of its seq_lens[r] keys. q, out: [T, heads, D]
    bf16 or fp16; caches: [pages, page_size, KV heads, D]. Page sizes are powers of two."""

    def __init__(
        self,
        *,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        max_tokens: int,
        max_rows: int,
        device: torch.device,
        config: PrefillConfig | None = None,
    ) -> None:
        assert num_heads % kv_heads == 0
        assert page_size & (page_size - 1) == 0
        self._kv_heads, self._head_dim, self._page_size = kv_heads, head_dim, page_size
        self._group = num_heads // kv_heads
        self._scale = head_dim**-0.5 * 1.4426950408889634  # exp(x) = exp2(x * log2(e))
        self._config = config or PrefillConfig.default(head_dim)
        self._page_table: Tensor
        self._padded_rows = max(16, triton.next_power_of_2(max_rows))  # for steps of any size: each is compiled anew
        self._num_tiles = 0
        # Of each tile: number in its row (-1: no tile), first token and number of tokens of the row, length, slot.
        self._tiles = torch.zeros((self._tiles_of(max_tokens, max_rows), 8), dtype=torch.int32, device=device)

    def _tiles_of(self, tokens: int, rows: int) -> int:
        """Enough for any split of the tokens over so many rows: each row rounds up once."""
        return tokens * self._group // self._config.block_m + rows

    def plan(
        self,
        num_tokens: int,
        page_table: Tensor,
        row_slots: Tensor,
        seq_lens: Tensor,
        query_start: Tensor,
        *,
        min_tokens: int = 1,
        max_rows: int | None = None,
    ) -> None:
        """page_table [slots, max_pages], row_slots [R], seq_lens [R], query_start [R + 1], all int32; ``num_tokens``:
        at least query_start[R] - query_start[0]. Rows with fewer than ``min_tokens`` tokens are left to other kernels;
        of the others there are at most ``max_rows`` (all, if None), which bounds the grid.

        With PDL, the plan must not be the launch just ahead of the first ``forward``.
        """
        rows = len(seq_lens)
        assert rows <= self._padded_rows
        self._page_table = page_table
        self._num_tiles = self._tiles_of(num_tokens, rows if max_rows is None else max_rows)
        assert self._num_tiles <= len(self._tiles)
        _plan_kernel[(triton.cdiv(self._num_tiles, _PLAN_TILES),)](
            row_slots,
            seq_lens,
            query_start,
            self._tiles,
            rows,
            self._num_tiles,
            min_tokens,
            GROUP=self._group,
            BLOCK_M=self._config.block_m,
            ROWS=self._padded_rows,
            TILES=_PLAN_TILES,
            num_warps=8,
        )

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Writes out's planned tokens; others are left alone."""
        assert k_cache.stride() == v_cache.stride()
        assert q.stride(2) == out.stride(2) == k_cache.stride(3) == 1
        assert k_cache.shape[1:] == (self._page_size, self._kv_heads, self._head_dim)
        config = self._config
        _prefill_kernel[(self._kv_heads, self._num_tiles)](
            q,
            k_cache,
            v_cache,
            out,
            self._page_table,
            self._tiles,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            self._page_table.stride(0),
            self._scale,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            HEAD_DIM_PAD=triton.next_power_of_2(self._head_dim),
            PAGE_SIZE=self._page_size,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **pdl_options(q.device, config.pdl),
        )


@triton.jit(
    do_not_specialize=["num_rows", "num_tiles", "min_tokens"],
    do_not_specialize_on_alignment=["seq_lens", "query_start"],
)
def _plan_kernel(
    row_slots,
    seq_lens,
    query_start,
    tiles_out,
    num_rows,
    num_tiles,
    min_tokens,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    rows = tl.arange(0, ROWS)
    exists = rows < num_rows
    tokens = tl.load(query_start + 1 + rows, mask=exists, other=0) - tl.load(query_start + rows, mask=exists, other=0)
    counts = tl.where(tokens < min_tokens, 0, tl.cdiv(tokens * GROUP, BLOCK_M))
    ends = tl.cumsum(counts, 0)  # of each row's tiles
    before = ends[None, :] <= tile[:, None]
    row = tl.minimum(tl.sum(before.to(tl.int32), 1), num_rows - 1)
    row_end = tl.max(tl.where(rows[None, :] == row[:, None], ends[None, :], 0), 1)
    begin = tl.load(query_start + row)
    num_tokens = tl.load(query_start + row + 1) - begin
    # The last tile of a row has the most keys: it goes first.
    place = row_end - 1 - tile
    here = tile < num_tiles
    record = tiles_out + tile * 8
    tl.store(record, tl.where(tile < tl.sum(counts, 0), place, -1), mask=here)
    tl.store(record + 1, begin, mask=here)
    tl.store(record + 2, num_tokens, mask=here)
    tl.store(record + 3, tl.load(seq_lens + row), mask=here)
    tl.store(record + 4, tl.load(row_slots + row), mask=here)


@triton.jit
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    page_table,
    tiles,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    record = tiles + tl.program_id(1) * 8
    tile = tl.load(record)
    begin = tl.load(record + 1)
    num_tokens = tl.load(record + 2)
    length = tl.load(record + 3)
    slot = tl.load(record + 4)
    if PDL:
        # What is read above was written before the kernel before this one started. Programs without a tile wait too:
        # that all have waited is what decode attention, let in here, relies on.
        gdc_wait()
        gdc_launch_dependents()
    if tile < 0:
        return
    table = page_table + slot.to(tl.int64) * table_stride
    member = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = member // GROUP
    query_head = head * GROUP + member % GROUP
    position = length - num_tokens + token
    dim = tl.arange(0, HEAD_DIM_PAD)
    column = tl.arange(0, BLOCK_N)
    tile_mask = token[:, None] < num_tokens
    if HEAD_DIM != HEAD_DIM_PAD:
        tile_mask = tile_mask & (dim < HEAD_DIM)[None, :]
    row_token = (begin + token).to(tl.int64)[:, None]
    queries = tl.load(
        q + row_token * q_token_stride + query_head[:, None] * q_head_stride + dim[None, :], mask=tile_mask, other=0.0
    )
    k_head = k_cache + head * kv_head_stride
    v_head = v_cache + head * kv_head_stride

    # Keys that the tile's first token sees need no mask; those that its last does not see are not read.
    first_position = length - num_tokens + tile * BLOCK_M // GROUP
    last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_tokens - 1)
    num_keys = length - num_tokens + last_token + 1
    plain_end = (first_position + 1) // BLOCK_N * BLOCK_N

    maximum = tl.full([BLOCK_M], -1e30, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    next_page = pages_of(table, 0, num_keys, column, PAGE_SIZE, BLOCK_N)
    for first in tl.range(0, num_keys, BLOCK_N):
        # A block's pages are read one block ahead, so that its keys need not wait for them.
        page = next_page
        next_page = pages_of(table, first + BLOCK_N, num_keys, column, PAGE_SIZE, BLOCK_N)
        offset = page.to(tl.int64) * page_stride + ((first + column) % PAGE_SIZE) * slot_stride
        offset = offset[:, None] + dim[None, :]
        mask = (first + column < num_keys)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_head + offset, mask=mask, other=0.0)
        v = tl.load(v_head + offset, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(k))
        # In the same loop: one of its own for the blocks that need the mask filled the pipeline twice (7% slower).
        if first >= plain_end:
            scores = tl.where((first + column)[None, :] <= position[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_maximum[:, None])
        shrink = tl.exp2(maximum - new_maximum)
        weight = weight * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        maximum = new_maximum
    result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(
        out + row_token * out_token_stride + query_head[:, None] * out_head_stride + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=tile_mask,
    )
