"""The KV pool leaves room for what the largest steps and the graphs were seen to take."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.harness import engine_config
from mizzen.config.config import EngineConfig
from mizzen.distributed.group import SingleGroup
from mizzen.engine.build import Rank, build_rank
from mizzen.engine.largest_steps import largest_steps, prompt_lengths
from mizzen.errors import ConfigError
from mizzen.ipc.messages import ModelInfo
from mizzen.models.config import parse_architecture
from mizzen.platform.cpu import CpuPlatform
from mizzen.sampling_params import MAX_LOGPROBS
from tiny import make_tiny_model

PAGE_BYTES = 2 * 2 * 16 * 2 * 32 * 4  # K and V, layers, tokens, KV heads, head_dim, float32


class MeasuredPlatform(CpuPlatform):
    """A CPU that has so much memory and, as a GPU does, measures what steps take."""

    def __init__(self, total: int, peak: int, slack: int = 0) -> None:
        super().__init__(threads=1)
        self._total, self._peak = total, peak
        self.allocation_slack_bytes, self.graph_rows = slack, 0
        self.held: object = None

    def kv_budget_bytes(self, memory_fraction: float) -> int:
        return int(self._total * memory_fraction)

    def free_memory_bytes(self) -> int:
        return self._total

    def peak_bytes(self, work: Callable[[], object]) -> int:
        self.held = work()
        return self._peak


class FullPlatform(MeasuredPlatform):
    def peak_bytes(self, work: Callable[[], object]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


def build(folder: Path, platform: CpuPlatform, config: EngineConfig) -> Rank:
    info = ModelInfo(str(folder), str(folder), "tiny", "Qwen3ForCausalLM", 259, 512, (0,))
    assert parse_architecture(folder).context_length == 512
    rank = build_rank(config, info, platform, SingleGroup(), lambda *_: None)
    rank.runner.close()
    return rank


def test_pages_take_what_the_fraction_leaves_beside_the_steps(model: Path) -> None:
    config = engine_config(model, memory_fraction=0.5, kv_cache_bytes="auto")
    platform = MeasuredPlatform(total=200 * PAGE_BYTES, peak=40 * PAGE_BYTES - 1)
    rank = build(model, platform, config)
    assert rank.info.num_pages == 100 - 40 - 1, "one more is the dummy page"
    assert platform.held is not None, "what a runner holds was there when memory was measured"


def test_pages_leave_room_for_tensors_that_the_allocator_rounds_up(model: Path) -> None:
    config = engine_config(model, memory_fraction=0.5, kv_cache_bytes="auto")
    rank = build(model, MeasuredPlatform(200 * PAGE_BYTES, 0, slack=PAGE_BYTES), config)
    assert rank.info.num_pages == 100 - 2 * 2 - 1, "K and V of two layers"


def test_a_size_that_was_asked_for_is_refused_if_steps_need_the_memory(model: Path) -> None:
    config = engine_config(model, kv_cache_bytes=170 * PAGE_BYTES)
    assert build(model, MeasuredPlatform(200 * PAGE_BYTES, 30 * PAGE_BYTES), config).info.num_pages == 169
    with pytest.raises(ConfigError, match="MIZZEN_KV_CACHE_BYTES"):
        build(model, MeasuredPlatform(200 * PAGE_BYTES, 30 * PAGE_BYTES + 1), config)


def test_steps_that_do_not_fit_name_the_settings_to_lower(model: Path) -> None:
    config = engine_config(model, max_batch_tokens=128, max_running_requests=32)
    with pytest.raises(ConfigError, match=r"lower MIZZEN_MAX_BATCH_TOKENS \(now 128\).*\(now 32\)") as caught:
        build(model, FullPlatform(200 * PAGE_BYTES, 0), config)
    assert caught.value.setting == "MIZZEN_MAX_BATCH_TOKENS"


@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "lengths"),
    [
        (10, 4, 100, [7, 1, 1, 1]),
        (10, 4, 4, [4, 4, 1, 1]),
        (100, 4, 4, [4, 4, 4, 4]),
        (4, 4, 100, [1, 1, 1, 1]),
        (9, 1, 100, [9]),
    ],
)
def test_prompts_spend_the_budget_on_all_rows(tokens: int, rows: int, longest: int, lengths: list[int]) -> None:
    assert prompt_lengths(tokens, rows, longest) == lengths


def test_the_largest_steps_ask_the_sampler_for_everything_in_every_row() -> None:
    prefill, decode = largest_steps(max_batch_tokens=64, max_running_requests=8, max_model_len=100)
    assert (prefill.num_tokens, prefill.num_rows, prefill.num_decode_rows) == (64, 8, 0)
    assert (decode.num_tokens, decode.num_rows, decode.num_decode_rows) == (8, 8, 8)
    assert int((decode.num_computed + decode.num_scheduled).max()) == 100
    for step in (prefill, decode):
        assert step.samples.all()
        for start in step.started:
            sampling = start.sampling
            assert sampling.logprobs == MAX_LOGPROBS
            assert sampling.temperature > 0
            assert sampling.top_p < 1
            assert sampling.min_p > 0
            assert sampling.repetition_penalty != 1
