"""Our own Triton kernels: scheduled on the device, so that whole steps, mixed ones too, go into CUDA graphs."""

import torch
from torch import Tensor

from mizzen.attention.base import Batch, KVTensors
from mizzen.kernels.triton.decode_attention import PagedDecode
from mizzen.kernels.triton.prefill_attention import PagedPrefill


class TritonBackend:
    """Rows with one token go through the decode kernel, rows with more through the prefill kernel."""

    def __init__(self, kv: KVTensors, *, num_heads: int, max_rows: int, max_tokens: int, device: torch.device) -> None:
        _, page_size, kv_heads, head_dim = kv.k[0].shape
        self.kv = kv
        self._has_prefill = False
        self._decode = PagedDecode(
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            max_rows=max_rows,
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
        self._has_prefill = batch.num_decode_rows < len(batch.row_slots)
        self._decode.plan(batch.page_table, batch.row_slots, batch.seq_lens, batch.query_start)
        if self._has_prefill:
            self._prefill.plan(
                len(batch.token_ids),
                batch.page_table,
                batch.row_slots,
                batch.seq_lens,
                batch.query_start,
                min_tokens=2,
                max_rows=len(batch.row_slots) - batch.num_decode_rows,
            )

    def forward(self, q: Tensor, layer: int) -> Tensor:
        k_cache, v_cache = self.kv.k[layer], self.kv.v[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._decode.forward(q, k_cache, v_cache, out)
        if self._has_prefill:
            self._prefill.forward(q, k_cache, v_cache, out)
        return out.flatten(1)
