"""Attention through torch's scaled_dot_product_attention: what the CPU runs, and the reference for other backends.

Pages are gathered into contiguous keys and values, as few bytes at a time as keeps the call efficient. The query heads
that share a KV head are never given copies of it: for decode rows they take the place of query positions, for prefill
rows the KV head is broadcast with stride 0.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, GraphSupport, KVTensors

# Padding a bucket of decode rows to its longest may add this share of work; below it, one call is cheaper than two.
_MAX_PADDING = 1.25
# Gathered keys of one call stay near a core's cache: of 0.25 to 16 MiB, 2 was fastest (batch 64, 3 KV heads of 64).
_MAX_BUCKET_BYTES = 2 << 20


@dataclass(slots=True)
class _Bucket:
    """Decode rows of similar length, attended in one call."""

    rows: Tensor  # [B] int64, indices into the batch's rows (= tokens, for decode rows)
    pages: Tensor  # [B * pages] int64
    mask: Tensor | None  # [B, 1, 1, L]: 0 or -inf; None if no row is padded


@dataclass(slots=True)
class _Prefill:
    """A row of several tokens, or of one whose sequence is attended alone."""

    start: int  # its tokens are [start, stop) of the batch
    stop: int
    length: int  # of its sequence
    pages: Tensor  # [pages] int64
    mask: Tensor | None  # [stop - start, length]: 0 or -inf; None if the row is its whole sequence: plainly causal


class SdpaBackend(AttentionBackend):
    graph_support = GraphSupport.NONE  # buckets of rows by length: another shape each step

    def __init__(self, kv: KVTensors, *, num_heads: int, max_rows: int, max_tokens: int, device: torch.device) -> None:
        _, self._page_size, self._kv_heads, self._head_dim = kv.k[0].shape
        self.kv = kv
        self._heads = num_heads
        self._group = num_heads // self._kv_heads
        self._scale = self._head_dim**-0.5
        self._max_bucket_pages = max(1, _MAX_BUCKET_BYTES // kv.k[0][0].nbytes)
        self._buckets: list[_Bucket] = []
        self._prefills: list[_Prefill] = []

    def plan(self, batch: Batch) -> None:
        longest = -(-max(batch.seq_lens_host) // self._page_size)
        page_table = batch.page_table[:, :longest].index_select(0, batch.row_slots).long()
        self._buckets = [
            self._plan_bucket(rows, batch, page_table)
            for rows in _group_by_length(
                batch.seq_lens_host[: batch.num_decode_rows], self._page_size, self._max_bucket_pages
            )
        ]
        self._prefills = [
            self._plan_prefill(row, batch, page_table) for row in range(batch.num_decode_rows, len(batch.seq_lens_host))
        ]

    def _plan_bucket(self, rows: list[int], batch: Batch, page_table: Tensor) -> _Bucket:
        lengths = [batch.seq_lens_host[row] for row in rows]
        width = -(-max(lengths) // self._page_size)
        index = torch.tensor(rows, device=page_table.device)
        slots = width * self._page_size
        mask = None
        if min(lengths) < slots:
            valid = torch.arange(slots, device=index.device) < batch.seq_lens[index].unsqueeze(-1)  # [B, L]
            mask = self._additive(valid)[:, None, None, :]
        return _Bucket(index, page_table[index, :width].flatten(), mask)

    def _plan_prefill(self, row: int, batch: Batch, page_table: Tensor) -> _Prefill:
        start, stop = batch.query_start_host[row], batch.query_start_host[row + 1]
        length = batch.seq_lens_host[row]
        pages = page_table[row, : -(-length // self._page_size)]
        mask = None
        if stop - start < length:
            keys = torch.arange(length, device=pages.device)
            mask = self._additive(keys <= keys[length - (stop - start) :].unsqueeze(-1))
        return _Prefill(start, stop, length, pages, mask)

    def _additive(self, visible: Tensor) -> Tensor:
        """What torch would otherwise make of a bool mask in every layer."""
        mask = torch.zeros(visible.shape, dtype=self.kv.k[0].dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf"))

    def forward(self, q: Tensor, layer: int) -> Tensor:
        k_cache, v_cache = self.kv.k[layer], self.kv.v[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [T, heads, D]
        for bucket in self._buckets:
            out.index_copy_(0, bucket.rows, self._decode(q, k_cache, v_cache, bucket))
        for prefill in self._prefills:
            out[prefill.start : prefill.stop] = self._prefill(q, k_cache, v_cache, prefill)
        return out.flatten(1)

    def _decode(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, bucket: _Bucket) -> Tensor:  # [B, heads, D]
        size = len(bucket.rows)
        shape = (size, -1, self._kv_heads, self._head_dim)
        k = k_cache.index_select(0, bucket.pages).view(shape).transpose(1, 2)  # [B, kv_heads, L, D]
        v = v_cache.index_select(0, bucket.pages).view(shape).transpose(1, 2)
        queries = q.index_select(0, bucket.rows).view(size, self._kv_heads, self._group, self._head_dim)
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=bucket.mask, scale=self._scale)
        return out.reshape(size, self._heads, self._head_dim)

    def _prefill(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, row: _Prefill) -> Tensor:  # [n, heads, D]
        def gather(cache: Tensor) -> Tensor:  # [kv_heads, group, L, D], the group being one head seen many times
            tokens = cache.index_select(0, row.pages).flatten(0, 1)[: row.length]
            return tokens.transpose(0, 1).unsqueeze(1).expand(-1, self._group, -1, -1)

        queries = q[row.start : row.stop].view(
            -1, self._kv_heads, self._group, self._head_dim
        )  # [n, kv_heads, group, D]
        out = F.scaled_dot_product_attention(
            queries.permute(1, 2, 0, 3),
            gather(k_cache),
            gather(v_cache),
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=self._scale,
        )  # [kv_heads, group, n, D]
        return out.permute(2, 0, 1, 3).flatten(1, 2)


def _group_by_length(lengths: list[int], page_size: int, max_pages: int) -> list[list[int]]:
    """Rows in buckets: the padding to a bucket's longest row stays within _MAX_PADDING, its pages within max_pages."""
    buckets: list[list[int]] = []
    used = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        pages = -(-lengths[row] // page_size)
        if buckets:
            padded = pages * (len(buckets[-1]) + 1)
            if padded <= max_pages and padded <= _MAX_PADDING * (used + pages):
                buckets[-1].append(row)
                used += pages
                continue
        buckets.append([row])
        used = pages
    return buckets
