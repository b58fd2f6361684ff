"""Builds one rank: weights, KV pool, runner. Each phase reports, so that a slow one is not taken for a hang."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mizzen.attention.base import KVTensors
from mizzen.attention.registry import make_attention
from mizzen.config.config import EngineConfig
from mizzen.distributed.group import ProcessGroup
from mizzen.ipc.messages import EngineInfo, ModelInfo, Phase
from mizzen.kernels.key_compare import load_match_keys
from mizzen.kv_cache.cache import KVCache
from mizzen.model_runner.batch_state import BatchState
from mizzen.model_runner.memory import check_even, fit_model_len, kv_page_bytes, num_kv_pages
from mizzen.model_runner.runner import EagerExecutor, Executor, ModelRunner, NullExecutor
from mizzen.models.config import parse_architecture
from mizzen.models.loader import Model, load_model
from mizzen.platform.base import Platform
from mizzen.platform.cpu import CpuPlatform
from mizzen.sampling_params import MAX_LOGPROBS, SamplingParams
from mizzen.scheduler.output import SchedulerOutput, SlotStart
from mizzen.scheduler.scheduler import PREFILL_STEPS, Scheduler

NULL_MODEL_PAGES = 2**17  # its pages are nearly free: as many as a large GPU would have

Report = Callable[[Phase, float, str], None]  # phase, fraction done, detail


@dataclass(slots=True)
class Rank:
    """One rank, ready to run steps."""

    runner: ModelRunner
    info: EngineInfo
    model: ModelInfo


def make_platform(config: EngineConfig, rank: int) -> Platform:
    if config.device == "cuda":
        from mizzen.platform.cuda import CudaPlatform

        return CudaPlatform(rank)
    return CpuPlatform(config.threads)


def build_rank(config: EngineConfig, model: ModelInfo, platform: Platform, group: ProcessGroup, report: Report) -> Rank:
    """Loads the weights, runs the largest steps to see what memory they take, and sizes the KV pool by that: the
    smallest of all ranks' pools counts."""
    torch.set_grad_enabled(False)
    network = load_model(
        parse_architecture(model.path),
        model.weights,
        load_format=config.model.load_format,
        dtype=config.model.dtype,
        device=platform.device,
        group=group,
        progress=lambda fraction, detail: report("load", fraction, detail),
        kernels_off=config.kernels_off,
    )
    if config.device == "cuda":
        free_bytes = platform.free_memory_bytes()
        check_even(group.min_int(free_bytes), -group.min_int(-free_bytes))
    builder = _Builder(config, model, platform, network)
    report("profile", 0.0, "running the largest steps")
    peak_bytes = platform.peak_bytes(builder.run_largest_steps)
    report("profile", 0.5, "sizing the KV cache")
    pages = group.min_int(builder.num_pages(peak_bytes, group.size))
    max_model_len = fit_model_len(
        config.scheduler.max_model_len,
        context_length=model.context_length,
        num_pages=pages,
        page_size=config.cache.page_size,
    )
    report("profile", 1.0, "")
    runner = builder.runner(pages, max_model_len, report)
    return Rank(runner, builder.info(pages, max_model_len), model)


class _Builder:
    """Runners over pools of any size: a small one to profile with, then the real one."""

    def __init__(self, config: EngineConfig, model: ModelInfo, platform: Platform, network: Model) -> None:
        self._config = config
        self._model = model
        self._platform = platform
        self._network = network
        self._page_bytes = kv_page_bytes(
            num_layers=network.num_layers,
            page_size=config.cache.page_size,
            kv_heads=network.num_kv_heads,
            head_dim=network.head_dim,
            itemsize=network.dtype.itemsize,
        )

    def num_pages(self, peak_bytes: int, ranks: int) -> int:
        platform, cache = self._platform, self._config.cache
        share = ranks if self._config.device == "cpu" else 1  # ranks on one host share its memory
        pages = num_kv_pages(
            cache,
            page_bytes=self._page_bytes,
            budget_bytes=platform.kv_budget_bytes(cache.memory_fraction) // share - peak_bytes,
            free_bytes=platform.free_memory_bytes() // share - peak_bytes,
        )
        return min(pages, NULL_MODEL_PAGES) if self._network.is_null else pages

    def info(self, pages: int, max_model_len: int) -> EngineInfo:
        return EngineInfo(
            max_model_len=max_model_len,
            max_running_requests=self._config.scheduler.max_running_requests,
            num_pages=pages,
            page_size=self._config.cache.page_size,
            kv_bytes=self._page_bytes * pages,
        )

    def runner(self, pages: int, max_model_len: int, report: Report | None = None) -> ModelRunner:
        """With ``report``, steps run as CUDA graphs where the device and the settings allow."""
        config, platform = self._config, self._platform
        state = BatchState(
            platform,
            max_slots=config.scheduler.max_running_requests,
            max_model_len=max_model_len,
            page_size=config.cache.page_size,
            dummy_page=pages,
            eos_token_ids=self._model.eos_token_ids,
        )
        return ModelRunner(state, self._executor(pages, state, report), platform.make_stream())

    def _executor(self, pages: int, state: BatchState, report: Report | None) -> Executor:
        config, network, platform = self._config, self._network, self._platform
        if network.is_null:
            vocab_size = self._model.vocab_size
            return NullExecutor(state, first_token=1000 % vocab_size, num_tokens=min(1000, vocab_size // 2))
        kv = KVTensors.allocate(
            network.num_layers,
            pages,
            config.cache.page_size,
            network.num_kv_heads,
            network.head_dim,
            network.dtype,
            platform.device,
        )
        rows = config.scheduler.max_running_requests
        attention = make_attention(
            config.attention_backend,
            kv,
            num_heads=network.num_heads,
            device=platform.device,
            max_rows=rows,
            max_tokens=max(config.scheduler.max_batch_tokens, config.graph_mixed_tokens),
        )
        eager = EagerExecutor(network, attention, state)
        if report is None or not config.graph_rows:
            return eager
        from mizzen.model_runner.graphs import GraphExecutor, GraphLimits  # needs Triton

        limits = GraphLimits(min(config.graph_rows, rows), config.graph_mixed_tokens, rows)
        graphs = GraphExecutor(network, attention, state, eager, page_size=config.cache.page_size, limits=limits)
        graphs.capture(lambda fraction, detail: report("capture", fraction, detail))
        return graphs

    def run_largest_steps(self) -> None:
        """The longest prompt that the token budget admits, then as many rows as run at once, with all that a
        sampler can be asked. Their KV goes to the dummy page of a pool that has no other."""
        limits = self._config.scheduler
        longest = min(self._config.scheduler.max_model_len or self._model.context_length, self._model.context_length)
        prompt, rows = min(limits.max_batch_tokens, longest), min(limits.max_running_requests, limits.max_batch_tokens)
        runner = self.runner(0, longest)
        for step in (largest_step([prompt], self._config.cache.page_size), largest_step([1] * rows, 1)):
            runner.enqueue(step).result()
        runner.close()


def largest_step(lengths: list[int], page_size: int) -> SchedulerOutput:
    """A step that starts a request of each length, sampled in the most costly way, its pages all page 0."""
    rows = np.arange(len(lengths), dtype=np.int32)
    counts = np.array(lengths, np.int32)
    pages = -(-counts // page_size)
    params = SamplingParams(
        top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=MAX_LOGPROBS, seed=0
    )
    return SchedulerOutput(
        step=0,
        slots=rows,
        num_computed=np.zeros_like(rows),
        num_scheduled=counts,
        samples=np.ones(len(rows), np.bool_),
        num_decode_rows=0,
        started=[
            SlotStart(slot, slot, np.zeros(length, np.int32), length, 0, params, 0)
            for slot, length in enumerate(lengths)
        ],
        page_slots=np.repeat(rows, pages),
        page_columns=np.concatenate([np.arange(count, dtype=np.int32) for count in pages]),
        page_ids=np.zeros(pages.sum(), np.int32),
    )


def build_scheduler(engine: EngineConfig, rank: Rank) -> Scheduler:
    """Rank 0's scheduler over the pool that the ranks agreed on."""
    kv_cache = KVCache(
        rank.info.num_pages,
        rank.info.page_size,
        prefix_cache=engine.cache.prefix_cache,
        allocation=engine.cache.allocation,
        match_keys=load_match_keys(Path(engine.model.cache_dir) / "kernels"),
    )
    return Scheduler(
        kv_cache,
        policy=engine.scheduler.policy,
        max_running_requests=engine.scheduler.max_running_requests,
        max_batch_tokens=engine.scheduler.max_batch_tokens,
        max_model_len=rank.info.max_model_len,
        eos_token_ids=rank.model.eos_token_ids,
        prefill_steps=0 if engine.scheduler.mixed_batches else PREFILL_STEPS,
    )
