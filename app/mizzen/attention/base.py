"""The seam between models and attention: ``plan(batch)`` once a step, ``forward(q, k, v, layer)`` once a layer."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """One step as the device sees it: T tokens of R rows; decode rows (one token each) come first.

    Row r owns tokens [query_start[r], query_start[r + 1]) and attends to the first ``seq_lens[r]`` tokens of its
    sequence, its own included. ``*_host`` are the same numbers as Python ints, so that planning needs no device read.
    """

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64: page * page_size + offset where the token's K and V are written
    page_table: Tensor  # [slots, P] int32: the page tables of all slots
    row_slots: Tensor  # [R] int32: each row's slot
    seq_lens: Tensor  # [R] int32
    query_start: Tensor  # [R + 1] int32
    sample_tokens: Tensor  # [S] int64: the tokens (indices into T) whose logits are wanted
    num_decode_rows: int
    seq_lens_host: list[int]  # [R]
    query_start_host: list[int]  # [R + 1]


@dataclass(slots=True)
class KVTensors:
    """The KV cache of one rank: per layer, [num_pages, page_size, kv_heads, head_dim]. The last page is a dummy."""

    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVTensors":
        shape = (num_pages + 1, page_size, kv_heads, head_dim)

        def make() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

        return cls(make(), make())

    @property
    def page_size(self) -> int:
        return self.k[0].shape[1]


class AttentionBackend(Protocol):
    @property
    def kv(self) -> KVTensors:
        """Where a layer writes the batch's keys and values, at its kv_slots, before it calls ``forward``."""

    def plan(self, batch: Batch) -> None:
        """Prepares whatever all layers of this step share."""

    def forward(self, q: Tensor, layer: int) -> Tensor:
        """Attends, causally, over the layer's pages. q [T, heads, head_dim]; returns [T, heads * head_dim]."""
