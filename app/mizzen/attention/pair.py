"""Two backends over one KV cache: a batch's decode rows go to one, the rest to the other.

Decode rows come first in a batch, so that each backend sees one slice of rows and of tokens. Where the slice ends is
known on the host only: mixed steps run eagerly.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, DecodeGraph, DevicePlan, GraphSupport


class PairBackend(AttentionBackend):
    """``prefill`` and ``decode`` share ``kv``; either takes any rows, with the batch's ``num_decode_rows`` for hint."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        assert prefill.kv is decode.kv
        self.kv = decode.kv
        self.graph_support = GraphSupport.DECODE if decode.graph_support != GraphSupport.NONE else GraphSupport.NONE
        self._prefill = prefill
        self._decode = decode
        self._decode_tokens = 0

    def plan(self, batch: Batch) -> None:
        self._decode_tokens, rows = batch.num_decode_rows, len(batch.seq_lens_host)
        if self._decode_tokens:
            self._decode.plan(batch.rows(0, self._decode_tokens))
        if self._decode_tokens < rows:
            self._prefill.plan(batch.rows(self._decode_tokens, rows))

    def forward(self, q: Tensor, layer: int) -> Tensor:
        split = self._decode_tokens
        if split == len(q):
            return self._decode.forward(q, layer)
        if split == 0:
            return self._prefill.forward(q, layer)
        return torch.cat([self._decode.forward(q[:split], layer), self._prefill.forward(q[split:], layer)])

    def decode_graph(self, batch: Batch) -> DecodeGraph:
        decode = self._decode
        inner = DevicePlan(decode.plan) if decode.graph_support == GraphSupport.ALL else decode.decode_graph(batch)
        return _PairDecodeGraph(self, inner)

    def expect_decode(self, num_rows: int) -> None:
        """``forward`` will be called for decode rows alone, which are planned already."""
        self._decode_tokens = num_rows


class _PairDecodeGraph(DecodeGraph):
    def __init__(self, pair: PairBackend, inner: DecodeGraph) -> None:
        self._pair = pair
        self._inner = inner

    def plan_on_device(self, batch: Batch) -> None:
        self._pair.expect_decode(len(batch.row_slots))
        self._inner.plan_on_device(batch)

    def plan_on_host(self, seq_lens: npt.NDArray[np.int32]) -> None:
        self._inner.plan_on_host(seq_lens)
