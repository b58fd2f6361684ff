"""FlashAttention over pages, through whichever of its versions is installed: 4 (CuTe DSL), 3 or 2.

All take page tables and lengths as tensors, and of the host only upper bounds: the lengths of this step, or for
captured decode steps the most that the page table holds. Mixed steps run eagerly.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, DecodeGraph, DevicePlan, GraphSupport, KVTensors
from mizzen.errors import ConfigError

VERSIONS = {  # module, package to install
    4: ("flash_attn.cute", "flash-attn-4"),
    3: ("flash_attn_interface", "flash-attn-3, built from the folder hopper of flash-attention's sources"),
    2: ("flash_attn.flash_attn_interface", "flash-attn"),
}
PREFERRED = {9: (3, 4, 2), 10: (4, 2)}  # by major compute capability; the others have paged kernels in version 2 alone
FA2_PAGE_MULTIPLE = 256


def is_installed(module: str) -> bool:
    parent, _, _ = module.rpartition(".")
    return (not parent or is_installed(parent)) and find_spec(module) is not None


def find_version(capability: tuple[int, int], installed: Callable[[str], bool] = is_installed) -> int:
    """The best that is installed for this GPU. Raises ConfigError if none is."""
    versions = PREFERRED.get(capability[0], (2,))
    for version in versions:
        if installed(VERSIONS[version][0]):
            return version
    packages = " or ".join(VERSIONS[version][1] for version in versions)
    raise ConfigError(
        f"attention backend 'flash_attn' finds no FlashAttention for a GPU of compute capability {capability[0]}."
        f"{capability[1]}: install {packages}, or choose another backend",
        setting="MIZZEN_ATTENTION_BACKEND",
    )


def make_flash_attn(
    kv: KVTensors, *, num_heads: int, max_rows: int, max_tokens: int, device: torch.device
) -> AttentionBackend:
    """Raises ConfigError for what FlashAttention does not do, or if it is not installed."""
    if device.type != "cuda" or kv.k[0].dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(
            f"attention backend 'flash_attn' needs a CUDA GPU and 16-bit floats, not {device.type} and {kv.k[0].dtype}",
            setting="MIZZEN_ATTENTION_BACKEND",
        )
    version = find_version(torch.cuda.get_device_capability(device))
    if version == 2 and kv.page_size % FA2_PAGE_MULTIPLE:
        raise ConfigError(
            f"FlashAttention 2 takes pages of {FA2_PAGE_MULTIPLE} tokens, not {kv.page_size}; "
            "MIZZEN_ATTENTION_BACKEND=triton takes others",
            setting="MIZZEN_PAGE_SIZE",
        )
    return FlashAttnBackend(kv, ADAPTERS[version](importlib.import_module(VERSIONS[version][0])))


@dataclass(slots=True)
class Rows:
    """What a call is told of its rows."""

    page_table: Tensor  # [R, P] int32
    seq_lens: Tensor  # [R] int32
    key_start: Tensor  # [R + 1] int32
    query_start: Tensor  # [R + 1] int32
    max_tokens: int
    max_length: int

    @classmethod
    def of(cls, batch: Batch, *, max_tokens: int, max_pages: int, page_size: int) -> "Rows":
        return cls(
            page_table=batch.row_tables(max_pages),
            seq_lens=batch.seq_lens,
            key_start=batch.key_start(),
            query_start=batch.query_start,
            max_tokens=max_tokens,
            max_length=max_pages * page_size,
        )


Call = Callable[[Tensor, Tensor, Tensor, Rows], Tensor]  # q, out [T, heads, D]; caches [pages, page_size, KV heads, D]


def adapt_4(module: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        out: Tensor
        out, _ = module.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=rows.query_start,
            max_seqlen_q=rows.max_tokens,
            max_seqlen_k=rows.max_length,
            seqused_k=rows.seq_lens,
            page_table=rows.page_table,
            causal=True,
        )
        return out

    return call


def adapt_3(module: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        out: Tensor = module.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=rows.seq_lens,
            page_table=rows.page_table,
            cu_seqlens_q=rows.query_start,
            max_seqlen_q=rows.max_tokens,
            causal=True,
        )
        return out

    return call


def adapt_2(module: Any) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
        out: Tensor
        if rows.max_tokens == 1:  # the call that splits keys among blocks
            out = module.flash_attn_with_kvcache(
                q.unsqueeze(1), k, v, cache_seqlens=rows.seq_lens, block_table=rows.page_table, causal=True
            )
            return out.squeeze(1)
        out = module.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=rows.query_start,
            cu_seqlens_k=rows.key_start,
            max_seqlen_q=rows.max_tokens,
            max_seqlen_k=rows.max_length,
            causal=True,
            block_table=rows.page_table,
        )
        return out

    return call


ADAPTERS: dict[int, Callable[[Any], Call]] = {4: adapt_4, 3: adapt_3, 2: adapt_2}


class FlashAttnBackend(AttentionBackend):
    """Decode rows are one call, the others a second: tiles of queries fit their rows."""

    graph_support = GraphSupport.DECODE

    def __init__(self, kv: KVTensors, call: Call) -> None:
        self.kv = kv
        self._call = call
        self._parts: list[tuple[int, int, Rows]] = []  # tokens [start, stop) of the batch

    def plan(self, batch: Batch) -> None:
        split, rows = batch.num_decode_rows, len(batch.seq_lens_host)
        self._parts = []
        for start, stop in ((0, split), (split, rows)):
            if start < stop:
                part = batch.rows(start, stop)
                planned = Rows.of(
                    part,
                    max_tokens=int(np.diff(part.query_start_host).max()),
                    max_pages=-(-max(part.seq_lens_host) // self.kv.page_size),
                    page_size=self.kv.page_size,
                )
                self._parts.append((batch.query_start_host[start], batch.query_start_host[stop], planned))

    def forward(self, q: Tensor, layer: int) -> Tensor:
        k, v = self.kv.k[layer], self.kv.v[layer]
        outs = [self._call(q[start:stop], k, v, rows) for start, stop, rows in self._parts]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)

    def decode_graph(self, batch: Batch) -> DecodeGraph:
        return DevicePlan(self._plan_bounded)

    def _plan_bounded(self, batch: Batch) -> None:
        """Decode rows, with what the page table holds for bound."""
        width, page_size = batch.page_table.shape[1], self.kv.page_size
        self._parts = [(0, len(batch.row_slots), Rows.of(batch, max_tokens=1, max_pages=width, page_size=page_size))]
