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
from mizzen.errors import ConfigError
from mizzen.ipc.messages import EngineInfo, ModelInfo, Phase
from mizzen.kernels.key_compare import load_match_keys
from mizzen.kv_cache.cache import KVCache
from mizzen.model_runner.batch_state import BatchState
from mizzen.model_runner.memory import fit_model_len, kv_page_bytes, num_kv_pages
from mizzen.model_runner.runner import EagerExecutor, Executor, ModelRunner, NullExecutor
from mizzen.models.config import parse_architecture
from mizzen.models.loader import load_model
from mizzen.platform.base import Platform
from mizzen.platform.cpu import CpuPlatform
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import SchedulerOutput, SlotStart
from mizzen.scheduler.scheduler import Scheduler

NULL_MODEL_PAGES = 2**17  # its pages are nearly free: as many as a large GPU would have

Report = Callable[[Phase, float, str], None]  # phase, fraction done, detail


@dataclass(slots=True)
class Rank:
    """One rank, ready to run steps."""

    runner: ModelRunner
    info: EngineInfo
    model: ModelInfo


def make_platform(config: EngineConfig) -> Platform:
    if config.device == "cuda":
        raise ConfigError("this build runs on the CPU only", setting="MIZZEN_DEVICE")
    return CpuPlatform(config.threads)


def build_rank(config: EngineConfig, model: ModelInfo, platform: Platform, group: ProcessGroup, report: Report) -> Rank:
    """Loads the weights, sizes the KV pool (the smallest of all ranks) and runs one step of the largest size."""
    torch.set_grad_enabled(False)
    architecture = parse_architecture(model.path)
    network = load_model(
        architecture,
        model.weights,
        load_format=config.model.load_format,
        dtype=config.model.dtype,
        device=platform.device,
        group=group,
        progress=lambda fraction, detail: report("load", fraction, detail),
    )
    report("profile", 0.0, "sizing the KV cache")
    cache = config.cache
    page_bytes = kv_page_bytes(
        num_layers=network.num_layers,
        page_size=cache.page_size,
        kv_heads=network.num_kv_heads,
        head_dim=network.head_dim,
        itemsize=network.dtype.itemsize,
    )
    pages = group.min_int(
        num_kv_pages(
            cache,
            page_bytes=page_bytes,
            # ranks on one host share its memory
            free_bytes=platform.free_memory_bytes() // group.size,
            cap_bytes=platform.cap_kv_bytes(),
        )
    )
    if network.is_null:
        pages = min(pages, NULL_MODEL_PAGES)
    max_model_len = fit_model_len(
        config.scheduler.max_model_len,
        context_length=model.context_length,
        num_pages=pages,
        page_size=cache.page_size,
    )
    kv = KVTensors.allocate(
        network.num_layers,
        pages,
        cache.page_size,
        network.num_kv_heads,
        network.head_dim,
        network.dtype,
        platform.device,
    )
    executor: Executor
    if network.is_null:
        executor = NullExecutor(first_token=1000 % model.vocab_size, num_tokens=min(1000, model.vocab_size // 2))
    else:
        executor = EagerExecutor(
            network,
            make_attention(config.attention_backend, kv, num_heads=network.num_heads, device=platform.device),
        )
    state = BatchState(
        platform,
        max_slots=config.scheduler.max_running_requests,
        max_model_len=max_model_len,
        page_size=cache.page_size,
        eos_token_ids=model.eos_token_ids,
    )
    runner = ModelRunner(state, executor, platform.make_stream())
    info = EngineInfo(
        max_model_len=max_model_len,
        max_running_requests=config.scheduler.max_running_requests,
        num_pages=pages,
        page_size=cache.page_size,
        kv_bytes=page_bytes * pages,
    )
    report("profile", 0.5, "running the largest step")
    runner.enqueue(largest_step(config.scheduler.max_batch_tokens, info)).result()
    report("profile", 1.0, "")
    return Rank(runner, info, model)


def largest_step(max_batch_tokens: int, info: EngineInfo) -> SchedulerOutput:
    """One prompt of the whole token budget, whose KV goes to the dummy page: touches the memory a step needs."""
    length = min(max_batch_tokens, info.max_model_len)
    one = np.array([0], np.int32)
    columns = np.arange(-(-length // info.page_size), dtype=np.int32)
    return SchedulerOutput(
        step=0,
        slots=one,
        num_computed=one,
        num_scheduled=np.array([length], np.int32),
        samples=np.array([True]),
        num_decode_rows=0,
        started=[SlotStart(0, 0, np.zeros(length, np.int32), length, 0, SamplingParams(), 0)],
        page_slots=np.zeros(len(columns), np.int32),
        page_columns=columns,
        page_ids=np.full(len(columns), info.num_pages, np.int32),
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
    )
