"""Our own Triton kernels: scheduled on the device, so that whole steps, mixed ones too, go into CUDA graphs."""

import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, GraphSupport, KVTensors
from mizzen.errors import ConfigError
from mizzen.kernels.triton.decode_attention import PagedDecode
from mizzen.kernels.triton.prefill_attention import PagedPrefill
from mizzen.kernels.triton.short_rows import ShortRows

# Rows of at most so many tokens are attended token by token, as decode rows are: docs/performance.md.
_SHORT_ROW = 16
_MAX_SPLIT = 256  # rows that this may add to a step


class TritonBackend(AttentionBackend):
    """Rows of a few tokens go through the decode kernel, rows of more through the prefill kernel.

    Raises ConfigError for a page size that the kernels do not know."""

    graph_support = GraphSupport.ALL

    def __init__(self, kv: KVTensors, *, num_heads: int, max_rows: int, max_tokens: int, device: torch.device) -> None:
        _, page_size, kv_heads, head_dim = kv.k[0].shape
        if page_size & (page_size - 1):
            raise ConfigError(
                f"attention backend 'triton' takes pages of a power of two of tokens, not {page_size}",
                setting="MIZZEN_PAGE_SIZE",
            )
        self.kv = kv
        self._has_prefill = False
        self._short_rows = ShortRows(max_rows + _MAX_SPLIT, device)
        self._decode = PagedDecode(
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            max_rows=max_rows + _MAX_SPLIT,
            device=device,
        )
        self._prefill = PagedPrefill(
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            max_rows=max_rows,
            max_tokens=max_tokens,
            device=device,
        )

    def plan(self, batch: Batch) -> None:
        rows = batch.row_slots, batch.seq_lens, batch.query_start
        prefill_rows = len(batch.row_slots) - batch.num_decode_rows
        self._has_prefill = prefill_rows > 0
        if not self._has_prefill:
            self._decode.plan(batch.page_table, *rows)
            return
        short = min(_SHORT_ROW, _MAX_SPLIT // prefill_rows + 1)
        num_rows = len(batch.row_slots) + prefill_rows * (short - 1)
        self._decode.plan(batch.page_table, *self._short_rows.split(*rows, max_tokens=short, num_rows=num_rows))
        self._prefill.plan(len(batch.token_ids), batch.page_table, *rows, min_tokens=short + 1, max_rows=prefill_rows)

    def forward(self, q: Tensor, layer: int) -> Tensor:
        k_cache, v_cache = self.kv.k[layer], self.kv.v[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._has_prefill:
            self._prefill.forward(q, k_cache, v_cache, out)
        self._decode.forward(q, k_cache, v_cache, out, beside_prefill=self._has_prefill)
        return out.flatten(1)
