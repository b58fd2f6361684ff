"""Every backend against the reference in float32, eager and in CUDA graphs of decode steps.

Shapes stay within the FlashInfer kernels that are at hand compiled: bf16, head size 128.
"""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.batches import error, exact_outputs, make_batch, outputs, random_kv, to_device
from mizzen.attention import flash_attn
from mizzen.attention.base import AttentionBackend, Batch, GraphSupport
from mizzen.attention.registry import is_installed, make_attention
from mizzen.sampling_params import SamplingParams
from tiny import make_tiny_model

pytestmark = pytest.mark.gpu

HEAD_DIM, KV_HEADS, TOLERANCE = 128, 8, 1e-2
CLOSE_CALL = 0.25  # between logits of about 8 in bf16: a few of their last digits
FLASHINFER = ["flashinfer", "flashinfer,triton", "triton,flashinfer"] if is_installed("flashinfer") else []
FLASH_ATTN = (
    ["flash_attn"] if any(flash_attn.is_installed(module) for module, _ in flash_attn.VERSIONS.values()) else []
)
HOST_PLANNED = [*FLASHINFER, *FLASH_ATTN]


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)


class Problem:
    """``rows``: (tokens computed before, new tokens), decode rows first."""

    def __init__(self, rows: list[tuple[int, int]], heads: int, page_size: int) -> None:
        device = torch.device("cuda")
        batch, num_pages = make_batch(rows, page_size, torch.Generator().manual_seed(len(rows)))
        self.batch = to_device(batch, device)
        self.batch.num_decode_rows = next((i for i, (_, new) in enumerate(rows) if new > 1), len(rows))
        self.kv = random_kv(num_pages, page_size, KV_HEADS, HEAD_DIM, torch.bfloat16, device)
        tokens = self.batch.query_start_host[-1]
        wide = torch.randn(tokens, heads + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.q = wide[:, :heads]  # a view, as models make it

    def make(self, name: str) -> AttentionBackend:
        return make_attention(name, self.kv, num_heads=self.q.shape[1], device=self.q.device)


def draw_rows(decode: int, prefill: int) -> list[tuple[int, int]]:
    draw = random.Random(decode * 100 + prefill)
    rows = [(draw.randint(0, 900), 1) for _ in range(decode)]
    rows += [(draw.choice([0, draw.randint(1, 700)]), draw.randint(2, 300)) for _ in range(prefill)]
    return rows + [(draw.randint(0, 100), 1)] * (prefill > 0)  # the last token of a prompt is no decode row


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", ["triton", *HOST_PLANNED])
def test_a_backend_equals_the_reference(name: str, page_size: int, heads: int) -> None:
    for decode, prefill in ((5, 0), (100, 0), (0, 4), (20, 3), (70, 1)):
        problem = Problem(draw_rows(decode, prefill), heads, page_size)
        got = outputs(problem.make(name), problem.batch, problem.q)
        for mine, expected in zip(got, exact_outputs(problem.kv, problem.batch, problem.q), strict=True):
            assert error(mine, expected) < TOLERANCE, f"{decode} decode rows, {prefill} prefill rows"


@pytest.mark.parametrize("name", HOST_PLANNED)
def test_a_plan_holds_for_its_step_alone(name: str) -> None:
    """Steps enqueued faster than the device runs them: no plan may overwrite one that is still to be read."""
    problems = [Problem(draw_rows(*counts), 16, 16) for counts in ((30, 2), (3, 0), (80, 0), (1, 3), (64, 1), (10, 0))]
    kv = max((problem.kv for problem in problems), key=lambda kv: len(kv.k[0]))  # has all pages of the others
    attention = make_attention(name, kv, num_heads=16, device=torch.device("cuda"))
    for problem in problems:
        outputs(attention, problem.batch, problem.q)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    got = [outputs(attention, problem.batch, problem.q) for problem in problems]
    for problem, mine in zip(problems, got, strict=True):
        for layer, expected in enumerate(exact_outputs(kv, problem.batch, problem.q)):
            assert error(mine[layer], expected) < TOLERANCE


@pytest.mark.parametrize("heads", [16, 40])
@pytest.mark.parametrize("name", HOST_PLANNED)
def test_a_captured_decode_step_follows_its_rows(name: str, heads: int) -> None:
    """Lengths, slots and pages change between replays, and rows that fill up are planned as of length 1."""
    for size in (8, 96):
        draw = random.Random(size)
        problem = Problem(draw_rows(size, 0), heads, 16)
        batch, q, lengths = problem.batch, problem.q, list(problem.batch.seq_lens_host)
        attention = problem.make(name)
        assert attention.graph_support == GraphSupport.DECODE
        graph, out = capture(attention, batch, q)
        for rows in (size, size // 2 + 1, 1, size):
            live = [draw.randint(1, length) for length in lengths[:rows]]
            batch.seq_lens_host = live + [1] * (size - rows)
            host = torch.tensor(batch.seq_lens_host, dtype=torch.int32)
            batch.seq_lens.copy_(host)
            # rows keep to tables that are long enough for them: any slot's pages do for its own length
            graph.planning.plan_on_host(host.numpy())
            q.copy_(torch.randn_like(q))
            graph.graph.replay()
            expected = exact_outputs(problem.kv, batch, q)
            for layer in range(2):
                assert error(out[layer][:rows], expected[layer][:rows]) < TOLERANCE, f"{rows} of {size} rows"
            order = torch.tensor(draw.sample(range(size), size), device="cuda")
            batch.row_slots.copy_(batch.row_slots[order])
            lengths = [lengths[row] for row in order.tolist()]


class Captured:
    def __init__(self, attention: AttentionBackend, batch: Batch) -> None:
        self.planning = attention.decode_graph(batch)
        self.graph = torch.cuda.CUDAGraph()


def capture(attention: AttentionBackend, batch: Batch, q: Tensor) -> tuple[Captured, list[Tensor]]:
    """As GraphExecutor does: the host sees lengths of 1, and none in the batch."""
    ones = torch.ones(len(batch.row_slots), dtype=torch.int32)
    batch.seq_lens.copy_(ones)
    batch.seq_lens_host = []
    captured = Captured(attention, batch)
    captured.planning.plan_on_host(ones.numpy())

    def run() -> list[Tensor]:
        captured.planning.plan_on_device(batch)
        return [attention.forward(q, layer) for layer in range(2)]

    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(captured.graph):
        out = run()
    return captured, out


@pytest.mark.parametrize("name", FLASHINFER[:1])
def test_an_engine_with_decode_graphs_answers_as_one_without(name: str, tmp_path: Path) -> None:
    """Greedy tokens; where they part, the two best logits must have been about as good."""
    model = make_tiny_model(tmp_path / "tiny", "qwen3", head_dim=HEAD_DIM)
    prompts = [[3 + (37 * number + token) % 250 for token in range(5 + 9 * number)] for number in range(20)]
    eager, graphs = (answers(model, name, prompts, rows) for rows in (0, 16))
    assert len({tuple(ids) for ids, _ in eager}) == len(prompts), "the answers do not depend on the prompts"
    for (expected, gaps), (got, _) in zip(eager, graphs, strict=True):
        assert len(got) == len(expected)
        parted = next((at for at, pair in enumerate(zip(expected, got, strict=True)) if len(set(pair)) > 1), None)
        assert parted is None or gaps[parted] < CLOSE_CALL


def answers(model: Path, name: str, prompts: list[list[int]], graph_rows: int) -> list[tuple[list[int], list[float]]]:
    """Of each prompt the tokens, and at each the distance between the two best."""
    from mizzen.llm import LLM

    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=2)
    llm = LLM(
        model,
        dtype="bfloat16",
        attention_backend=name,
        cuda_graph_rows=graph_rows,
        max_running_requests=16,
        max_batch_tokens=128,
        kv_cache_bytes=2**26,
    )
    try:
        choices = [output.choices[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.close()
    return [(choice.token_ids, [at.top[0][2] - at.top[1][2] for at in choice.logprobs or []]) for choice in choices]
