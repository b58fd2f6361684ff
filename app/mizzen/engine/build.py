"""Builds one rank: weights, KV pool, runner. Each phase reports, so that a slow one is not taken for a hang."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog
import torch

from mizzen.attention.base import KVTensors
from mizzen.attention.registry import chosen_for, make_attention
from mizzen.config.config import EngineConfig
from mizzen.distributed.group import ProcessGroup
from mizzen.engine.largest_steps import largest_steps
from mizzen.errors import ConfigError
from mizzen.ipc.messages import EngineInfo, ModelInfo, Phase
from mizzen.kernels.key_compare import load_match_keys
from mizzen.kv_cache.cache import KVCache
from mizzen.model_runner.annotate import annotate_attention, annotate_model
from mizzen.model_runner.batch_state import BatchState
from mizzen.model_runner.memory import check_even, fit_model_len, kv_page_bytes, num_kv_pages
from mizzen.model_runner.runner import EagerExecutor, Executor, ModelRunner, NullExecutor
from mizzen.models.config import Progress, parse_architecture
from mizzen.models.loader import Model, load_model
from mizzen.platform.base import Annotate, Platform, without_name
from mizzen.platform.cpu import CpuPlatform
from mizzen.scheduler.scheduler import PREFILL_STEPS, Scheduler

NULL_MODEL_PAGES = 2**17  # its pages are nearly free: as many as a large GPU would have

Report = Callable[[Phase, float, str], None]  # phase, fraction done, detail
log = structlog.get_logger()


@dataclass(slots=True)
class Rank:
    """One rank, ready to run steps."""

    runner: ModelRunner
    info: EngineInfo
    model: ModelInfo
    annotate: Annotate
    memory_bytes: dict[str, int]  # the KV pool, what steps and graphs take at the most, what is still free


def make_platform(config: EngineConfig, rank: int) -> Platform:
    if config.device == "cuda":
        from mizzen.platform.cuda import CudaPlatform

        return CudaPlatform(rank)
    return CpuPlatform(config.threads)


def build_rank(config: EngineConfig, model: ModelInfo, platform: Platform, group: ProcessGroup, report: Report) -> Rank:
    """Loads the weights, captures all graphs and runs the largest steps to see what memory they take, and sizes the KV
    pool by that: the smallest of all ranks' pools counts. Then captures the graphs anew, over that pool."""
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
        kernels_off=config.kernels_off,
    )
    if config.device == "cuda":
        free_bytes = platform.free_memory_bytes()
        check_even(group.min_int(free_bytes), -group.min_int(-free_bytes))
    if not network.is_null:
        prefill, decode = chosen_for(config.attention_backend, platform.device)
        log.info("attention backend", prefill=prefill, decode=decode)
        tokens = max(config.scheduler.max_batch_tokens, config.graph_mixed_tokens)  # of one step
        group.reserve_sums(tokens, architecture.hidden_size, network.dtype)
    builder = _Builder(config, model, platform, network)
    budget = builder.kv_budget(group.size)
    peak_bytes = builder.measure(report)
    report("profile", 0.5, "sizing the KV cache")
    pages = group.min_int(builder.num_pages(budget, peak_bytes))
    max_model_len = fit_model_len(
        config.scheduler.max_model_len,
        context_length=model.context_length,
        num_pages=pages,
        page_size=config.cache.page_size,
    )
    report("profile", 1.0, "")
    runner = builder.runner(pages, max_model_len, lambda fraction, detail: report("capture", fraction, detail))
    log_kernels(config)
    info = builder.info(pages, max_model_len)
    memory_bytes = {"kv": info.kv_bytes, "steps": peak_bytes, "free": platform.free_memory_bytes()}
    return Rank(runner, info, model, builder.annotate, memory_bytes)


def log_kernels(config: EngineConfig) -> None:
    """What runs as its torch twin, and why; and how many kernels were in no cache of Triton's: in an image, none."""
    if config.device == "cpu":
        log.info("kernels", torch_twins={"all": "no GPU"})
        return
    from mizzen.kernels.triton.launch import compiled  # needs Triton

    twins = dict.fromkeys(config.kernels_off, "MIZZEN_KERNELS_OFF")
    if config.graph_rows == 0:
        twins["sampler"] = "MIZZEN_CUDA_GRAPH_ROWS is 0"
    log.info("kernels", torch_twins=twins, compiled=len(compiled))


class KVBudget(NamedTuple):
    default_bytes: int  # what is left of MIZZEN_MEMORY_FRACTION
    free_bytes: int  # what MIZZEN_KV_CACHE_BYTES may take


class _Builder:
    """Runners over pools of any size: a small one to profile with, then the real one."""

    def __init__(self, config: EngineConfig, model: ModelInfo, platform: Platform, network: Model) -> None:
        self._config = config
        self._model = model
        self._platform = platform
        self._network = network
        self.annotate: Annotate = without_name
        if config.nvtx:
            self.annotate = platform.annotate
            annotate_model(network, platform.annotate)
        self._page_bytes = kv_page_bytes(
            num_layers=network.num_layers,
            page_size=config.cache.page_size,
            kv_heads=network.num_kv_heads,
            head_dim=network.head_dim,
            itemsize=network.dtype.itemsize,
        )

    def kv_budget(self, ranks: int) -> KVBudget:
        """What the KV pool may take, if steps took nothing; to be asked before they do."""
        platform = self._platform
        share = ranks if self._config.device == "cpu" else 1  # ranks on one host share its memory
        rounding = 2 * self._network.num_layers * platform.allocation_slack_bytes
        return KVBudget(
            platform.kv_budget_bytes(self._config.cache.memory_fraction) // share - rounding,
            platform.free_memory_bytes() // share - rounding,
        )

    def measure(self, report: Report) -> int:
        """Bytes that the largest steps take, and all else that a runner holds. Raises ConfigError if they are not
        there."""
        try:
            return self._platform.peak_bytes(lambda: self.run_largest_steps(report))
        except torch.OutOfMemoryError as error:
            limits = self._config.scheduler
            raise ConfigError(
                f"the largest steps do not fit into memory: lower MIZZEN_MAX_BATCH_TOKENS (now"
                f" {limits.max_batch_tokens}) or MIZZEN_MAX_RUNNING_REQUESTS (now {limits.max_running_requests}), or"
                f" raise MIZZEN_TENSOR_PARALLEL_SIZE (now {self._config.tensor_parallel_size})",
                setting="MIZZEN_MAX_BATCH_TOKENS",
            ) from error

    def num_pages(self, budget: KVBudget, peak_bytes: int) -> int:
        pages = num_kv_pages(
            self._config.cache,
            page_bytes=self._page_bytes,
            budget_bytes=budget.default_bytes - peak_bytes,
            free_bytes=budget.free_bytes - peak_bytes,
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

    def runner(self, pages: int, max_model_len: int, progress: Progress) -> ModelRunner:
        """Steps run as CUDA graphs where the device and the settings allow; ``progress`` hears of their capture."""
        config, platform = self._config, self._platform
        state = BatchState(
            platform,
            max_slots=config.scheduler.max_running_requests,
            max_model_len=max_model_len,
            page_size=config.cache.page_size,
            dummy_page=pages,
            eos_token_ids=self._model.eos_token_ids,
        )
        return ModelRunner(state, self._executor(pages, state, progress), platform.make_stream(), self.annotate)

    def _executor(self, pages: int, state: BatchState, progress: Progress) -> Executor:
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
        if config.nvtx:
            annotate_attention(attention, self.annotate)
        eager = EagerExecutor(network, attention, state, self.annotate)
        graph_rows = platform.graph_rows if config.graph_rows is None else config.graph_rows
        if not graph_rows:
            return eager
        from mizzen.model_runner.graphs import GraphExecutor, GraphLimits  # needs Triton

        limits = GraphLimits(min(graph_rows, rows), config.graph_mixed_tokens, rows)
        graphs = GraphExecutor(
            network,
            attention,
            state,
            eager,
            page_size=config.cache.page_size,
            limits=limits,
            annotate=self.annotate,
        )
        graphs.capture(progress)
        return graphs

    def run_largest_steps(self, report: Report) -> ModelRunner:
        """Makes a runner over a pool of one page, graphs included, and runs what needs most memory. Returns the
        runner: what it holds counts too."""
        limits, context = self._config.scheduler, self._model.context_length
        longest = min(limits.max_model_len or context, context)
        # Kernels compile at their first run, which is here.
        runner = self.runner(0, longest, lambda fraction, detail: report("compile", fraction, detail))
        report("profile", 0.0, "running the largest steps")
        for step in largest_steps(
            max_batch_tokens=limits.max_batch_tokens,
            max_running_requests=limits.max_running_requests,
            max_model_len=longest,
        ):
            runner.enqueue(step).result()
        runner.close()
        return runner


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
