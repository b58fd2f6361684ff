"""SDPA over pages against attention written out, row by row."""

import pytest
import torch
from torch import Tensor

from attention.batches import make_batch
from mizzen.attention.base import Batch, KVTensors
from mizzen.attention.registry import make_attention
from mizzen.attention.sdpa import _MAX_PADDING, _group_by_length
from mizzen.kernels.reference import write_kv

CPU = torch.device("cpu")
HEAD_DIM = 16


def expected(q: Tensor, kv: KVTensors, batch: Batch, layer: int) -> Tensor:
    """Every token alone, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // kv.k[layer].shape[2]
    for row, length in enumerate(batch.seq_lens_host):
        pages = batch.page_table[row, : -(-length // kv.page_size)].long()
        k = kv.k[layer][pages].flatten(0, 1).double().repeat_interleave(group, 1)
        v = kv.v[layer][pages].flatten(0, 1).double().repeat_interleave(group, 1)
        start, stop = batch.query_start_host[row], batch.query_start_host[row + 1]
        for token in range(start, stop):
            visible = length - (stop - token) + 1
            scores = torch.einsum("hd,lhd->hl", q[token].double(), k[:visible]) / HEAD_DIM**0.5
            out[token] = torch.einsum("hl,lhd->hd", scores.softmax(-1), v[:visible])
    return out.flatten(1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 9)],
        [(17, 30)],
        [(4, 1)],
        [(0, 1), (15, 1), (16, 1), (200, 1), (31, 1)],
        [(50, 1), (7, 1), (0, 33), (64, 16), (3, 2)],
    ],
    ids=["whole prompt", "chunk", "decode", "decodes of many lengths", "mixed"],
)
def test_equals_attention_written_out(rows: list[tuple[int, int]], page_size: int, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, num_pages = make_batch(rows, page_size, generator)
    kv = KVTensors.allocate(2, num_pages, page_size, kv_heads, HEAD_DIM, torch.float32, CPU)
    for cache in (*kv.k, *kv.v):
        cache.normal_(generator=generator)
    tokens = batch.query_start_host[-1]
    q, k, v = (torch.randn(tokens, count, HEAD_DIM, generator=generator) for count in (heads, kv_heads, kv_heads))
    attention = make_attention("sdpa", kv, num_heads=heads, device=CPU)
    write_kv(k, v, kv.k[1], kv.v[1], batch.kv_slots)
    attention.plan(batch)
    out = attention.forward(q, 1)
    torch.testing.assert_close(out.double(), expected(q, kv, batch, 1), atol=1e-5, rtol=1e-5)


def test_what_lies_beyond_a_sequence_is_not_read() -> None:
    generator = torch.Generator().manual_seed(0)
    batch, num_pages = make_batch([(2, 1), (20, 1), (0, 3)], 16, generator)
    kv = KVTensors.allocate(1, num_pages, 16, 1, HEAD_DIM, torch.float32, CPU)
    attention = make_attention("auto", kv, num_heads=2, device=CPU)
    q, k, v = (torch.randn(5, count, HEAD_DIM, generator=generator) for count in (2, 1, 1))
    write_kv(k, v, kv.k[0], kv.v[0], batch.kv_slots)
    attention.plan(batch)
    clean = attention.forward(q, 0)
    written = torch.zeros(kv.k[0].shape[0] * 16, dtype=torch.bool)
    for row, length in enumerate(batch.seq_lens_host):
        at = torch.arange(length)
        written[batch.page_table[row, at // 16].long() * 16 + at % 16] = True
    for cache in (kv.k[0], kv.v[0]):
        cache.flatten(0, 1)[~written] = 1e4
    assert torch.equal(attention.forward(q, 0), clean)


def test_buckets_hold_each_row_once_within_their_limits() -> None:
    lengths = torch.randint(1, 3000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    buckets = _group_by_length(lengths, page_size=16, max_pages=400)
    assert sorted(row for bucket in buckets for row in bucket) == list(range(200))
    assert len(buckets) < 100
    for bucket in buckets:
        pages = [-(-lengths[row] // 16) for row in bucket]
        padded = max(pages) * len(pages)
        assert padded <= _MAX_PADDING * sum(pages)
        assert len(pages) == 1 or padded <= 400
