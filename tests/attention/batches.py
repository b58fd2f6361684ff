"""Batches of random rows over pages in random order, for tests of attention backends."""

import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, KVTensors
from mizzen.attention.registry import make_attention


def make_batch(rows: list[tuple[int, int]], page_size: int, generator: torch.Generator) -> tuple[Batch, int]:
    """``rows``: (tokens computed before, new tokens). Returns the batch and the number of pages."""
    pages = [-(-(before + new) // page_size) for before, new in rows]
    order = torch.randperm(sum(pages), generator=generator).int()
    table = torch.full((len(rows), max(pages)), -1, dtype=torch.int32)
    positions, slots, query_start, used = [], [], [0], 0
    for row, (before, new) in enumerate(rows):
        table[row, : pages[row]] = order[used : used + pages[row]]
        used += pages[row]
        at = torch.arange(before, before + new)
        positions.append(at)
        slots.append(table[row, at // page_size].long() * page_size + at % page_size)
        query_start.append(query_start[-1] + new)
    seq_lens = [before + new for before, new in rows]
    batch = Batch(
        token_ids=torch.zeros(query_start[-1], dtype=torch.long),
        positions=torch.cat(positions),
        kv_slots=torch.cat(slots),
        page_table=table.clamp(min=0),
        row_slots=torch.arange(len(rows), dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start=torch.tensor(query_start, dtype=torch.int32),
        sample_tokens=torch.zeros(0, dtype=torch.long),
        num_decode_rows=sum(new == 1 for _, new in rows),
        seq_lens_host=seq_lens,
        query_start_host=query_start,
    )
    return batch, sum(pages)


def random_kv(
    num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVTensors:
    """Two layers, no slot of which is zero: to read what no row owns spoils the result."""
    kv = KVTensors.allocate(2, num_pages, page_size, kv_heads, head_dim, dtype, device)
    for cache in (*kv.k, *kv.v):
        cache.normal_()
    return kv


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch with its tensors there."""
    for name in Batch.__slots__:
        value = getattr(batch, name)
        if isinstance(value, Tensor):
            setattr(batch, name, value.to(device))
    return batch


def outputs(attention: AttentionBackend, batch: Batch, q: Tensor) -> list[Tensor]:
    """Of both layers of ``random_kv``."""
    attention.plan(batch)
    return [attention.forward(q, layer) for layer in range(2)]


def exact_outputs(kv: KVTensors, batch: Batch, q: Tensor) -> list[Tensor]:
    """Float32, by the reference backend."""
    wide = KVTensors([cache.float() for cache in kv.k], [cache.float() for cache in kv.v])
    return outputs(make_attention("sdpa", wide, num_heads=q.shape[1], device=q.device), batch, q.float())


def error(got: Tensor, expected: Tensor) -> float:
    """The worst token's, relative to that token's output."""
    return ((got.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
