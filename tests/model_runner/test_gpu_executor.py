"""CUDA graphs against eager steps: the same tokens for every kind of row, all in one batch."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mizzen.model_runner.runner import EagerExecutor, Executor, ModelRunner
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import SampledTokens
from model_runner.every_kind import KINDS, KINDS_OF_259, PAGE, PLAIN, Bigrams, NoAttention, Requests, make_state
from tiny import make_tiny_model

pytestmark = pytest.mark.gpu

STEPS = 12
BATCHES = {
    "kinds, one": tuple(KINDS)[:10],  # a graph has room for 16 prompts
    "kinds, two": tuple(KINDS)[6:],
    "plain": PLAIN,
    "plain, logprobs": (*PLAIN, "logprobs", "logprobs, greedy"),
    "min_p": ("min_p", *PLAIN),
    "filters": ("top_k", "top_p", "large top_k", *PLAIN),
    "filters, min_p": ("top_k, top_p, min_p", "top_p, min_p", "top_k", "greedy"),
    "changed alone": ("penalties", "bias", "all"),
}


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def run(kinds: tuple[str, ...], dtype: torch.dtype, *, graphs: bool) -> list[SampledTokens]:
    """A step of prompts, which is mixed, then decode steps."""
    runner, requests = make_runner(kinds, dtype, graphs=graphs), Requests(kinds)
    handles = [runner.enqueue(requests.next_step()) for _ in range(STEPS)]
    return [handle.result() for handle in handles]


def make_runner(kinds: tuple[str, ...], dtype: torch.dtype, *, graphs: bool) -> ModelRunner:
    from mizzen.model_runner.graphs import GraphExecutor, GraphLimits
    from mizzen.platform.cuda import CudaPlatform

    platform = CudaPlatform(0)
    state = make_state(platform, len(kinds))
    model, attention = Bigrams(dtype, platform.device), NoAttention()
    executor: Executor = EagerExecutor(model, attention, state)
    if graphs:
        limits = GraphLimits(decode_rows=len(kinds), mixed_tokens=64, rows=len(kinds))
        made = GraphExecutor(model, attention, state, NoEager(), page_size=PAGE, limits=limits)
        made.capture(lambda fraction, detail: None)
        executor = made
    return ModelRunner(state, executor, platform.make_stream())


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_are_counted_by_what_ran_them_and_their_time_on_the_device_is_known(graphs: bool) -> None:
    runner, requests = make_runner(PLAIN, torch.bfloat16, graphs=graphs), Requests(PLAIN)
    assert (sum(runner.steps.values()), runner.busy_s) == (0, 0.0)  # warm-ups and captures are no steps
    begun_s = time.perf_counter()
    handles = [runner.enqueue(requests.next_step()) for _ in range(STEPS)]
    for handle in handles:
        handle.result()
    assert 0 < runner.busy_s <= time.perf_counter() - begun_s
    expected = {"mixed_graph": 1, "decode_graph": STEPS - 1, "eager": 0} if graphs else {"eager": STEPS}
    assert runner.steps == expected


class NoEager(EagerExecutor):
    """Every step must fit a graph."""

    def __init__(self) -> None:
        self.steps = {"eager": 0}

    def run(self, step: object) -> Any:
        raise AssertionError("a step that fits no graph")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", BATCHES)
def test_graphs_draw_what_eager_steps_draw(name: str, dtype: torch.dtype) -> None:
    expected, got = (run(BATCHES[name], dtype, graphs=graphs) for graphs in (False, True))
    assert len({tuple(step.token_ids.tolist()) for step in expected}) > STEPS // 2, "the rows repeat themselves"
    for number, (eager, graph) in enumerate(zip(expected, got, strict=True)):
        assert graph.token_ids.tolist() == eager.token_ids.tolist(), f"step {number}"
        if eager.logprob_rows is None:
            assert graph.logprob_rows is None
            continue
        assert graph.logprob_rows is not None
        assert graph.logprob_rows.tolist() == eager.logprob_rows.tolist()
        for mine, reference in (
            (graph.chosen_logprobs, eager.chosen_logprobs),
            (graph.top_logprobs, eager.top_logprobs),
        ):
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(reference), atol=1e-4, rtol=0)


@pytest.mark.parametrize("gpus", [1, 2])
def test_an_engine_with_graphs_answers_as_one_without(gpus: int, tmp_path: Path) -> None:
    """Prompts in chunks, then decode steps of rows that end at different times; float32, so that nothing but the order
    of sums differs. The vocabulary of two GPUs is split."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    model = make_tiny_model(tmp_path / "tiny", "qwen3", head_dim=64)
    params = [
        SamplingParams(**{**options, "seed": seed, "max_tokens": 10 + seed})
        for seed in range(4)
        for options in KINDS_OF_259.values()
    ]
    prompts = [[3 + (37 * number + token) % 250 for token in range(20 + number)] for number in range(len(params))]
    assert answers(model, prompts, params, 256, gpus) == answers(model, prompts, params, 0, 1)


def answers(
    model: Path, prompts: list[list[int]], params: list[SamplingParams], graph_rows: int, gpus: int
) -> list[list[int]]:
    from mizzen.llm import LLM

    llm = LLM(
        model,
        dtype="float32",
        tensor_parallel_size=gpus,
        cuda_graph_rows=graph_rows,
        cuda_graph_mixed_tokens=256 if graph_rows else 0,
        max_batch_tokens=256,
        kv_cache_bytes=2**26,
    )
    try:
        return [output.choices[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.close()
