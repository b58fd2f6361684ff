"""The seam between models and attention: ``plan(batch)`` once a step, ``forward(q, layer)`` once a layer."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt
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

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows [start, stop) as a batch of their own, for attention: their tokens are [query_start_host[start],
        query_start_host[stop]) of this one. It samples nothing."""
        first, last = self.query_start_host[start], self.query_start_host[stop]
        query_start = self.query_start[start : stop + 1]
        return Batch(
            token_ids=self.token_ids[first:last],
            positions=self.positions[first:last],
            kv_slots=self.kv_slots[first:last],
            page_table=self.page_table,
            row_slots=self.row_slots[start:stop],
            seq_lens=self.seq_lens[start:stop],
            query_start=query_start - first if first else query_start,
            sample_tokens=self.sample_tokens[:0],
            num_decode_rows=min(max(self.num_decode_rows - start, 0), stop - start),
            seq_lens_host=self.seq_lens_host[start:stop],
            query_start_host=[token - first for token in self.query_start_host[start : stop + 1]],
        )

    def row_tables(self, max_pages: int) -> Tensor:
        """Each row's page table, its first ``max_pages`` columns: [R, max_pages] int32."""
        return self.page_table[:, :max_pages].index_select(0, self.row_slots)

    def key_start(self) -> Tensor:
        """Where each row's keys would start if all lay end to end: [R + 1] int32."""
        starts = torch.zeros(len(self.seq_lens) + 1, dtype=torch.int32, device=self.seq_lens.device)
        torch.cumsum(self.seq_lens, 0, out=starts[1:])
        return starts


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


class GraphSupport(Enum):
    """What of a backend a CUDA graph can hold."""

    NONE = "none"  # nothing: the host takes part in every call
    DECODE = "decode"  # decode steps, planned through ``decode_graph``; mixed steps run eagerly
    ALL = "all"  # every step: ``plan`` reads no ``*_host`` of the batch, so it is captured with the rest


class DecodeGraph(Protocol):
    """Planning for a captured decode step of a fixed number of rows: a part in the graph, a part before each replay."""

    def plan_on_device(self, batch: Batch) -> None:
        """Takes ``plan``'s place in the capture, ahead of ``forward``. Reads no ``*_host`` of the batch."""

    def plan_on_host(self, seq_lens: npt.NDArray[np.int32]) -> None:
        """Called once before the capture, then before each replay, on the replay's stream. seq_lens [R]; rows that only
        fill up have length 1."""


class DevicePlan(DecodeGraph):
    """Of a backend whose plan, for decode rows, takes nothing from the host."""

    def __init__(self, plan: Callable[[Batch], None]) -> None:
        self._plan = plan

    def plan_on_device(self, batch: Batch) -> None:
        self._plan(batch)

    def plan_on_host(self, seq_lens: npt.NDArray[np.int32]) -> None:
        """Nothing to do."""


class AttentionBackend(Protocol):
    kv: KVTensors
    """Where a layer writes the batch's keys and values, at its kv_slots, before it calls ``forward``."""

    graph_support: GraphSupport

    def plan(self, batch: Batch) -> None:
        """Prepares whatever all layers of this step share."""

    def forward(self, q: Tensor, layer: int) -> Tensor:
        """Attends, causally, over the layer's pages. q [T, heads, head_dim]; returns [T, heads * head_dim]."""

    def decode_graph(self, batch: Batch) -> DecodeGraph:
        """For a decode step of the batch's rows, whose tensors every replay reads. Only with GraphSupport.DECODE."""
        backend = type(self).__name__
        raise NotImplementedError(f"{backend} has no decode graphs: {self.graph_support}")
