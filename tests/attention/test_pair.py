"""A batch split between two backends against the whole batch in one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.batches import make_batch, outputs, random_kv
from mizzen.attention import registry
from mizzen.attention.base import Batch, KVTensors
from mizzen.attention.pair import PairBackend
from mizzen.attention.sdpa import SdpaBackend
from mizzen.llm import LLM
from mizzen.sampling_params import SamplingParams
from tiny import make_tiny_model

CPU = torch.device("cpu")
MIXED = [(50, 1), (7, 1), (200, 1), (0, 33), (64, 16), (12, 1)]  # the last token of a prompt is no decode row


class Recording(SdpaBackend):
    """Notes what it is given."""

    def __init__(self, kv: KVTensors) -> None:
        super().__init__(kv, num_heads=6, max_rows=16, max_tokens=256, device=CPU)
        self.planned: list[Batch] = []
        self.queries: list[Tensor] = []

    def plan(self, batch: Batch) -> None:
        self.planned.append(batch)
        super().plan(batch)

    def forward(self, q: Tensor, layer: int) -> Tensor:
        self.queries.append(q)
        return super().forward(q, layer)


@pytest.fixture
def generator() -> torch.Generator:
    torch.set_num_threads(1)
    return torch.Generator().manual_seed(0)


def make_mixed(rows: list[tuple[int, int]], generator: torch.Generator) -> tuple[Batch, KVTensors, Tensor]:
    batch, num_pages = make_batch(rows, 16, generator)
    batch.num_decode_rows = next((i for i, (_, new) in enumerate(rows) if new > 1), len(rows))
    q = torch.randn(batch.query_start_host[-1], 6, 16, generator=generator)
    return batch, random_kv(num_pages, 16, 2, 16, torch.float32, CPU), q


@pytest.mark.parametrize("rows", [MIXED, MIXED[:3], MIXED[3:]], ids=["mixed", "decode", "prefill"])
def test_a_pair_of_sdpa_equals_sdpa(rows: list[tuple[int, int]], generator: torch.Generator) -> None:
    batch, kv, q = make_mixed(rows, generator)
    pair = PairBackend(Recording(kv), Recording(kv))
    for got, expected in zip(outputs(pair, batch, q), outputs(Recording(kv), batch, q), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_each_of_a_pair_sees_its_rows_alone(generator: torch.Generator) -> None:
    batch, kv, q = make_mixed(MIXED, generator)
    prefill, decode = Recording(kv), Recording(kv)
    outputs(PairBackend(prefill, decode), batch, q)
    (first,), (rest,) = decode.planned, prefill.planned
    assert (first.num_decode_rows, rest.num_decode_rows) == (3, 0)
    assert (first.seq_lens_host, rest.seq_lens_host) == ([51, 8, 201], [33, 80, 13])
    assert (first.query_start_host, rest.query_start_host) == ([0, 1, 2, 3], [0, 33, 49, 50])
    for part in (first, rest):
        assert part.seq_lens.tolist() == part.seq_lens_host
        assert part.query_start.tolist() == part.query_start_host
        assert len(part.row_slots) == len(part.seq_lens_host)
        assert len(part.positions) == len(part.token_ids) == len(part.kv_slots) == part.query_start_host[-1]
    assert torch.equal(torch.cat([first.kv_slots, rest.kv_slots]), batch.kv_slots)
    assert [len(q) for q in decode.queries] == [3, 3]
    assert [len(q) for q in prefill.queries] == [50, 50]


def test_rows_of_a_batch_end_to_end_are_the_batch(generator: torch.Generator) -> None:
    batch, _, _ = make_mixed(MIXED, generator)
    whole = batch.rows(0, len(MIXED))
    assert whole.query_start_host == batch.query_start_host
    assert whole.num_decode_rows == batch.num_decode_rows
    assert [batch.rows(2, 4).num_decode_rows, batch.rows(4, 6).num_decode_rows] == [1, 0]
    parts = [batch.rows(row, row + 1) for row in range(len(MIXED))]
    assert torch.equal(torch.cat([part.positions for part in parts]), batch.positions)


def test_key_start_and_row_tables_are_by_row(generator: torch.Generator) -> None:
    batch, _, _ = make_mixed(MIXED, generator)
    batch.row_slots = batch.row_slots.flip(0)
    assert batch.key_start().tolist() == [0, 51, 59, 260, 293, 373, 386]
    assert torch.equal(batch.row_tables(2), batch.page_table.flip(0)[:, :2])


def test_an_engine_with_a_pair_answers_as_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside decode rows, so that steps are mixed."""
    torch.set_num_threads(1)
    monkeypatch.setitem(registry.BACKENDS, "sdpa2", (f"{__name__}:{SdpaTwice.__name__}",) * 2)
    model = make_tiny_model(tmp_path / "tiny")
    prompts = [[3 + (37 * number + token) % 250 for token in range(9 + 11 * number)] for number in range(6)]
    answers = {}
    for backend in ("sdpa", "sdpa,sdpa2", "sdpa2,sdpa"):
        SdpaTwice.batches = 0
        with LLM(model, attention_backend=backend, max_batch_tokens=24, max_running_requests=4, threads=1) as llm:
            params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
            done = llm.generate(prompts, params, use_tqdm=False)
        answers[backend] = [output.choices[0].token_ids for output in done]
        assert (SdpaTwice.batches > 0) == (backend != "sdpa")
    assert answers["sdpa,sdpa2"] == answers["sdpa2,sdpa"] == answers["sdpa"]


class SdpaTwice(SdpaBackend):
    """A second name for the same thing, so that a pair is a pair."""

    batches = 0

    def plan(self, batch: Batch) -> None:
        SdpaTwice.batches += 1
        super().plan(batch)
