"""What libraries of paged attention are called with, by stand-ins that compute from exactly that.

The stand-ins know no more than the call's arguments: a wrong page table, length, bound or start gives a wrong result.
The bounds must hold, as kernels take their grids from them.
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.batches import exact_outputs, make_batch, outputs, random_kv
from mizzen.attention.base import AttentionBackend, Batch, GraphSupport, KVTensors
from mizzen.attention.flash_attn import ADAPTERS, FlashAttnBackend
from mizzen.attention.pair import PairBackend
from mizzen.errors import ConfigError

CPU = torch.device("cpu")
MIXED = [(50, 1), (7, 1), (200, 1), (0, 33), (64, 16), (12, 1), (0, 1)]
DECODE = [(50, 1), (7, 1), (200, 1), (0, 1), (15, 1), (16, 1)]


def attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, seq_lens: Tensor, tables: Tensor, max_tokens: int, max_length: int
) -> Tensor:
    """Row r's queries are q[starts[r] : starts[r + 1]], the last of its seq_lens[r] keys in the pages of tables[r]."""
    assert starts.dtype == seq_lens.dtype == tables.dtype == torch.int32
    assert len(starts) == len(seq_lens) + 1 == len(tables) + 1
    assert starts[-1] == len(q)
    assert max_length <= tables.shape[1] * k.shape[1], "keys beyond the table"
    out = torch.empty_like(q)
    for row, (length, table) in enumerate(zip(seq_lens.tolist(), tables, strict=True)):
        start, stop = starts[row].item(), starts[row + 1].item()
        assert stop - start <= max_tokens
        assert length <= max_length
        keys, values = (cache[table.long()].flatten(0, 1)[:length] for cache in (k, v))
        group = q.shape[1] // k.shape[2]
        visible = torch.arange(length) <= torch.arange(length - (stop - start), length).unsqueeze(-1)
        out[start:stop] = torch.nn.functional.scaled_dot_product_attention(
            q[start:stop].transpose(0, 1),
            keys.transpose(0, 1).repeat_interleave(group, 0),
            values.transpose(0, 1).repeat_interleave(group, 0),
            attn_mask=visible,
        ).transpose(0, 1)
    return out


def fa4_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, max_seqlen_k: int, seqused_k: Tensor,
    page_table: Tensor, causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    assert causal
    return attend(q, k, v, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k), None


def fa3_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, causal: bool,
) -> Tensor:  # fmt: skip
    assert causal
    most = page_table.shape[1] * k_cache.shape[1]  # it takes no bound of its own
    return attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q, most)


def fa2_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, causal: bool, block_table: Tensor,
) -> Tensor:  # fmt: skip
    assert causal
    assert cu_seqlens_k.dtype == torch.int32
    return attend(q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, max_seqlen_q, max_seqlen_k)


def fa2_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, causal: bool
) -> Tensor:
    assert causal
    rows, tokens = q.shape[:2]
    assert tokens == 1
    starts, most = torch.arange(rows + 1, dtype=torch.int32), block_table.shape[1] * k_cache.shape[1]
    return attend(q[:, 0], k_cache, v_cache, starts, cache_seqlens, block_table, 1, most).unsqueeze(1)


FLASH_ATTENTION = {
    4: SimpleNamespace(flash_attn_varlen_func=fa4_varlen),
    3: SimpleNamespace(flash_attn_with_kvcache=fa3_with_kvcache),
    2: SimpleNamespace(flash_attn_varlen_func=fa2_varlen, flash_attn_with_kvcache=fa2_with_kvcache),
}


def trtllm_context(
    query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, *, bmm1_scale: float, bmm2_scale: float, batch_size: int, cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor, kv_layout: str, out: Tensor,
) -> Tensor:  # fmt: skip
    check_trtllm(query, kv_cache, workspace_buffer, bmm1_scale, bmm2_scale, kv_layout)
    assert batch_size == len(seq_lens)
    assert torch.equal(cum_seq_lens_kv.diff(), seq_lens)
    return out.copy_(attend(query, *kv_cache, cum_seq_lens_q, seq_lens, block_tables, max_q_len, max_kv_len))


def trtllm_decode(
    query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, *, bmm1_scale: float, bmm2_scale: float, kv_layout: str, backend: str, out: Tensor,
) -> Tensor:  # fmt: skip
    check_trtllm(query, kv_cache, workspace_buffer, bmm1_scale, bmm2_scale, kv_layout)
    assert backend == "trtllm-gen"
    starts = torch.arange(len(query) + 1, dtype=torch.int32)
    return out.copy_(attend(query, *kv_cache, starts, seq_lens, block_tables, 1, max_seq_len))


def check_trtllm(
    query: Tensor, kv_cache: tuple[Tensor, Tensor], workspace: Tensor, scale: float, scale2: float, layout: str
) -> None:
    assert query.is_contiguous()
    assert len(kv_cache) == 2
    assert not workspace.any()
    assert (scale, scale2, layout) == (query.shape[-1] ** -0.5, 1.0, "NHD")


@pytest.fixture
def trtllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over a FlashInfer of two functions."""
    decode, prefill = ModuleType("flashinfer.decode"), ModuleType("flashinfer.prefill")
    decode.trtllm_batch_decode_with_kv_cache = trtllm_decode  # type: ignore[attr-defined]
    prefill.trtllm_batch_context_with_kv_cache = trtllm_context  # type: ignore[attr-defined]
    for module in (ModuleType("flashinfer"), decode, prefill):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "mizzen.attention.trtllm", raising=False)
    loaded = importlib.import_module("mizzen.attention.trtllm")
    monkeypatch.delitem(sys.modules, "mizzen.attention.trtllm")
    monkeypatch.setattr(loaded, "WORKSPACE_BYTES", 1024)
    return loaded


Make = Callable[[KVTensors], AttentionBackend]


@pytest.fixture(params=[2, 3, 4, "trtllm"])
def make(request: pytest.FixtureRequest) -> Make:
    torch.set_num_threads(1)
    if request.param != "trtllm":
        version: int = request.param
        return lambda kv: FlashAttnBackend(kv, ADAPTERS[version](FLASH_ATTENTION[version]))
    module = request.getfixturevalue("trtllm")
    return lambda kv: PairBackend(module.TrtllmPrefill(kv, device=CPU), module.TrtllmDecode(kv, device=CPU))


def make_problem(rows: list[tuple[int, int]]) -> tuple[Batch, KVTensors, Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, num_pages = make_batch(rows, 16, generator)
    batch.num_decode_rows = next((i for i, (_, new) in enumerate(rows) if new > 1), len(rows))
    wide = torch.randn(batch.query_start_host[-1], 10, 64, generator=generator)
    return batch, random_kv(num_pages, 16, 2, 64, torch.float32, CPU), wide[:, :6]  # a view, as models make it


@pytest.mark.parametrize("rows", [MIXED, DECODE, MIXED[3:]], ids=["mixed", "decode", "prefill"])
def test_its_calls_describe_the_batch(make: Make, rows: list[tuple[int, int]]) -> None:
    batch, kv, q = make_problem(rows)
    for got, expected in zip(outputs(make(kv), batch, q), exact_outputs(kv, batch, q), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_captured_decode_step_is_planned_without_the_host(make: Make) -> None:
    """Its bounds hold for whatever lengths the tensors get later."""
    batch, kv, q = make_problem(DECODE)
    expected = exact_outputs(kv, batch, q)
    attention = make(kv)
    assert attention.graph_support == GraphSupport.DECODE
    batch.seq_lens_host = batch.query_start_host = []
    lengths = batch.seq_lens.clone()
    batch.seq_lens.fill_(1)
    graph = attention.decode_graph(batch)
    graph.plan_on_host(batch.seq_lens.numpy())
    batch.seq_lens.copy_(lengths)
    graph.plan_on_device(batch)
    for layer in range(2):
        torch.testing.assert_close(attention.forward(q, layer), expected[layer], atol=1e-5, rtol=1e-5)


def test_trtllm_refuses_page_sizes_that_it_does_not_know(trtllm: Any) -> None:
    kv = KVTensors.allocate(1, 1, 8, 1, 64, torch.float32, CPU)
    for backend in (trtllm.TrtllmPrefill, trtllm.TrtllmDecode):
        with pytest.raises(ConfigError, match="16, 32 or 64 tokens on this GPU, not 8") as caught:
            backend(kv, device=CPU)
        assert caught.value.setting == "MIZZEN_PAGE_SIZE"
