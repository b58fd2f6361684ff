"""TensorRT-LLM's paged attention for sm100 (B200), by way of FlashInfer. Not run by us yet: we have had no such GPU.

The kernels read lengths and page tables on the device and take upper bounds from the host, so decode steps are captured
with the bounds of the page table; there is no plan. Mixed steps run eagerly: how many rows prefill is the host's to
say. FlashInfer fetches these kernels when first used, or finds them in its package flashinfer-cubin.
"""

import numpy as np
import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, DecodeGraph, DevicePlan, GraphSupport, KVTensors
from mizzen.errors import ConfigError

PAGE_SIZES = (16, 32, 64)
WORKSPACE_BYTES = 256 << 20


def _workspace(kv: KVTensors, device: torch.device) -> Tensor:
    """Zeros, as the kernels ask for. Raises ConfigError for a page size that they do not know."""
    if kv.page_size not in PAGE_SIZES:
        raise ConfigError(
            f"attention backend 'flashinfer' takes pages of 16, 32 or 64 tokens on this GPU, not {kv.page_size}; "
            "MIZZEN_ATTENTION_BACKEND=triton takes others",
            setting="MIZZEN_PAGE_SIZE",
        )
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class TrtllmPrefill(AttentionBackend):
    """Rows of any number of tokens."""

    graph_support = GraphSupport.NONE

    def __init__(self, kv: KVTensors, *, device: torch.device) -> None:
        self.kv = kv
        self._scale = kv.k[0].shape[-1] ** -0.5
        self._workspace = _workspace(kv, device)
        self._batch: Batch
        self._page_table: Tensor  # [R, P] int32
        self._key_start: Tensor  # [R + 1] int32
        self._max_tokens = self._max_length = 0

    def plan(self, batch: Batch) -> None:
        self._batch = batch
        self._max_tokens = int(np.diff(batch.query_start_host).max())
        self._max_length = max(batch.seq_lens_host)
        self._page_table = batch.row_tables(-(-self._max_length // self.kv.page_size))
        self._key_start = batch.key_start()

    def forward(self, q: Tensor, layer: int) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        trtllm_batch_context_with_kv_cache(
            q.contiguous(),
            (self.kv.k[layer], self.kv.v[layer]),
            self._workspace,
            self._page_table,
            self._batch.seq_lens,
            self._max_tokens,
            self._max_length,
            bmm1_scale=self._scale,
            bmm2_scale=1.0,
            batch_size=len(self._batch.row_slots),
            cum_seq_lens_q=self._batch.query_start,
            cum_seq_lens_kv=self._key_start,
            kv_layout="NHD",
            out=out,
        )
        return out.flatten(1)


class TrtllmDecode(AttentionBackend):
    """Rows of one token each."""

    graph_support = GraphSupport.DECODE

    def __init__(self, kv: KVTensors, *, device: torch.device) -> None:
        self.kv = kv
        self._scale = kv.k[0].shape[-1] ** -0.5
        self._workspace = _workspace(kv, device)
        self._page_table: Tensor  # [R, P] int32
        self._seq_lens: Tensor
        self._max_length = 0

    def plan(self, batch: Batch) -> None:
        self._plan(batch, -(-max(batch.seq_lens_host) // self.kv.page_size))

    def _plan(self, batch: Batch, max_pages: int) -> None:
        self._seq_lens, self._max_length = batch.seq_lens, max_pages * self.kv.page_size
        self._page_table = batch.row_tables(max_pages)

    def forward(self, q: Tensor, layer: int) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        trtllm_batch_decode_with_kv_cache(
            q.contiguous(),
            (self.kv.k[layer], self.kv.v[layer]),
            self._workspace,
            self._page_table,
            self._seq_lens,
            self._max_length,
            bmm1_scale=self._scale,
            bmm2_scale=1.0,
            kv_layout="NHD",
            backend="trtllm-gen",
            out=out,
        )
        return out.flatten(1)

    def decode_graph(self, batch: Batch) -> DecodeGraph:
        return DevicePlan(lambda batch: self._plan(batch, batch.page_table.shape[1]))
