"""Every metric, once: name, kind, HELP, labels, buckets and the process that feeds it. All others read it from here.

A counter's name ends in ``_total`` and a histogram's bounds are upper ones, inclusive. What is counted by request is
counted by choice: a request for n answers is n requests to the engine. ``model_name`` and ``engine`` are on every
metric: "engine" is "0" (one engine a service), and a replica is told by the scraper's own labels.

The ``vllm:`` metrics are the same numbers under the names, labels and meanings that vLLM gives them. They are made from
their source when scraped, so they cost nothing before; a source's bounds therefore contain the alias's.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Feeder = Literal["api", "engine", "supervisor", "metrics"]

COMMON_LABELS = ("model_name", "engine")
MAX_KEYS = 32  # API keys with series of their own; the rest share "other"


@dataclass(frozen=True, slots=True)
class Metric:
    """``labels`` come after COMMON_LABELS. ``values``: what the last label may be; those are exposed from the start."""

    name: str
    kind: Kind
    help: str
    feeder: Feeder
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VllmMetric:
    """``labels`` in full; ``source`` is summed over those that this one lacks. ``rename`` maps values of labels."""

    name: str
    kind: Kind
    help: str
    source: str
    labels: tuple[str, ...] = COMMON_LABELS
    buckets: tuple[float, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()


# ---- buckets, in seconds or tokens ----

_VLLM_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
              80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_VLLM_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0)  # fmt: skip
_VLLM_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
                 960.0, 1920.0, 7680.0)  # fmt: skip
_VLLM_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


def _with(base: tuple[float, ...], *more: float) -> tuple[float, ...]:
    return tuple(sorted({*base, *more}))


TTFT_BUCKETS = _with(_VLLM_TTFT, 0.002, 0.003, 0.0075, 0.015, 0.03, 0.15, 0.2, 0.35, 1.5, 2.0)
TOKEN_BUCKETS = _with(
    _VLLM_TOKEN, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.0125, 0.015, 0.02, 0.03, 0.04, 0.06
)
REQUEST_BUCKETS = _with(_VLLM_REQUEST, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.4, 3.0, 7.5)
# 1-2-5 to a million tokens
LENGTH_BUCKETS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
STEP_TOKENS_BUCKETS = _VLLM_STEP_TOKENS
STEP_BUCKETS = (0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075,
                0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)  # fmt: skip
# The host's part of a step is bounded at half a millisecond by design: below 1 ms is where it lives.
HOST_BUCKETS = (0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05,
                0.1, 0.5, 1.0)  # fmt: skip

FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
WAITING_REASONS = ("slots", "kv_pages", "batch_tokens", "preempted")
PHASES = ("start", "download", "load", "profile", "compile", "capture", "serve", "drain")
EXECUTORS = ("decode_graph", "mixed_graph", "eager")
KV_STATES = ("used", "cached", "free")

METRICS: tuple[Metric, ...] = (
    # ---- latency ----
    Metric("mizzen_time_to_first_token_seconds", "histogram",
           "From a request's arrival at the api to its first token there, tokenizing and queueing included.",
           "api", buckets=TTFT_BUCKETS),
    Metric("mizzen_inter_token_latency_seconds", "histogram",
           "Between the tokens of an answer as the api writes them; tokens written together share their gap evenly.",
           "api", buckets=TOKEN_BUCKETS),
    Metric("mizzen_time_per_output_token_seconds", "histogram",
           "Of a finished answer: time from its first to its last token, by token after the first.",
           "api", buckets=TOKEN_BUCKETS),
    Metric("mizzen_request_duration_seconds", "histogram",
           "From arrival at the api to the end, of answers that finished (stop or length).",
           "api", buckets=REQUEST_BUCKETS),
    Metric("mizzen_request_queue_time_seconds", "histogram",
           "Waiting in the engine until first scheduled, of answers that finished.", "api", buckets=REQUEST_BUCKETS),
    Metric("mizzen_request_prefill_time_seconds", "histogram",
           "From first scheduled to the first token, of answers that finished.", "api", buckets=REQUEST_BUCKETS),
    Metric("mizzen_request_decode_time_seconds", "histogram",
           "From the first to the last token, of answers that finished.", "api", buckets=REQUEST_BUCKETS),
    # ---- tokens ----
    Metric("mizzen_prompt_tokens_total", "counter", "Tokens of prompts that got a first token, cached ones included.",
           "api"),
    Metric("mizzen_generation_tokens_total", "counter", "Tokens generated for answers.", "api"),
    Metric("mizzen_cached_prompt_tokens_total", "counter",
           "Tokens of finished answers' prompts that were found in the prefix cache.", "api"),
    Metric("mizzen_request_prompt_tokens", "histogram", "Prompt lengths of answers that finished, in tokens.", "api",
           buckets=LENGTH_BUCKETS),
    Metric("mizzen_request_generation_tokens", "histogram", "Lengths of answers that finished, in tokens.", "api",
           buckets=LENGTH_BUCKETS),
    # ---- requests ----
    Metric("mizzen_requests_running", "gauge", "Requests in the running batch.", "supervisor"),
    Metric("mizzen_requests_waiting", "gauge",
           "Requests that wait in the engine, by what the first of them waits for: a slot, KV pages, the step's token"
           " budget; or preempted ones.", "supervisor", ("reason",), values=WAITING_REASONS),
    Metric("mizzen_preemptions_total", "counter",
           "Requests that lost their KV pages and are computed again.", "engine"),
    Metric("mizzen_requests_finished_total", "counter",
           "Answers that ended after they were accepted; abort: the client left.", "api", ("reason",),
           values=FINISH_REASONS),
    Metric("mizzen_requests_aborted_total", "counter", "Answers whose client left before their end.", "api"),
    Metric("mizzen_requests_rejected_total", "counter",
           "HTTP requests that were refused before any work, by the error's code.", "api", ("reason",),
           values=("rate_limit_exceeded", "service_not_ready", "context_length_exceeded", "invalid_api_key")),
    Metric("mizzen_http_responses_total", "counter", "HTTP responses of the api port, by route and status.", "api",
           ("route", "status")),
    Metric("mizzen_key_requests_total", "counter",
           f"Inference requests by API key: its short hash, 'none' without keys, 'other' beyond {MAX_KEYS} keys.",
           "api", ("key",)),
    Metric("mizzen_key_tokens_total", "counter",
           "Tokens by API key (as in mizzen_key_requests_total) and type: prompt or generation.", "api",
           ("key", "type")),
    # ---- engine ----
    Metric("mizzen_kv_cache_pages", "gauge",
           "Pages of the KV cache: used (held by requests), cached (evictable), free.", "supervisor", ("state",),
           values=KV_STATES),
    Metric("mizzen_kv_cache_capacity_pages", "gauge", "All pages of the KV cache; 0 until it is allocated.",
           "supervisor"),
    Metric("mizzen_kv_cache_usage_ratio", "gauge",
           "Share of the KV cache's pages held by requests, 0 to 1; what is only cached does not count.",
           "supervisor"),
    Metric("mizzen_prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.", "engine"),
    Metric("mizzen_prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", "engine"),
    Metric("mizzen_steps_total", "counter",
           "Steps of the engine, by what ran them: a CUDA graph of decode steps or of mixed ones, or op by op (eager).",
           "engine", ("executor",), values=EXECUTORS),
    Metric("mizzen_device_busy_seconds_total", "counter",
           "Time that rank 0's device spent in steps, by its own clock, gaps between a step's kernels included. Its"
           " rate is the share of time in which the device is busy.", "engine"),
    Metric("mizzen_step_tokens", "histogram", "Tokens computed in a step, of prefill and decode together.", "engine",
           buckets=STEP_TOKENS_BUCKETS),
    Metric("mizzen_step_duration_seconds", "histogram",
           "From when the device could begin a step (enqueued, and the step before done) to its result.", "engine",
           buckets=STEP_BUCKETS),
    Metric("mizzen_step_host_time_seconds", "histogram",
           "The engine loop's own work a step: scheduling, preparing, results, messages; waiting is not in it.",
           "engine", buckets=HOST_BUCKETS),
    # ---- processes ----
    Metric("mizzen_ready", "gauge", "1 if every process serves, as /health/ready says.", "supervisor"),
    Metric("mizzen_live", "gauge", "1 unless the service has given up, as /health/live says.", "supervisor"),
    Metric("mizzen_draining", "gauge", "1 while the service ends: nothing new is accepted.", "supervisor"),
    Metric("mizzen_phase", "gauge", "1 for the phase that the service is in.", "supervisor", ("phase",), values=PHASES),
    Metric("mizzen_phase_duration_seconds", "gauge", "How long the current phase has lasted.", "supervisor"),
    Metric("mizzen_engine_load_duration_seconds", "gauge", "What the engine's last start took; 0 until it has started.",
           "supervisor"),
    Metric("mizzen_process_ready", "gauge", "1 if the process serves.", "supervisor", ("process",)),
    Metric("mizzen_process_restarts_total", "counter", "Restarts, by process (all ranks of an engine are one).",
           "supervisor", ("process",)),
    Metric("mizzen_process_heartbeat_age_seconds", "gauge", "Time since the process's main loop last said it is alive.",
           "supervisor", ("process",)),
    # ---- GPUs, by rank: only where NVML is ----
    Metric("mizzen_gpu_memory_used_bytes", "gauge",
           "Memory of a rank's GPU that is in use, by whatever process, as NVML says; gpu is NVML's number of it.",
           "metrics", ("rank", "gpu")),
    Metric("mizzen_gpu_memory_capacity_bytes", "gauge", "All memory of a rank's GPU, as NVML says.", "metrics",
           ("rank", "gpu")),
    Metric("mizzen_gpu_utilization_ratio", "gauge",
           "Share of NVML's last sampling period (up to 1 s) in which any kernel ran on a rank's GPU, 0 to 1; not how"
           " much of the GPU was used.", "metrics", ("rank", "gpu")),
    # ---- information ----
    Metric("mizzen_build_info", "gauge", "1; what is running.", "metrics", ("version", "python")),
    Metric("mizzen_config_info", "gauge", "1; the settings that matter most to performance.", "metrics",
           ("device", "tensor_parallel_size", "attention_backend", "page_size", "prefix_cache", "scheduling_policy",
            "max_running_requests", "max_batch_tokens", "overlap_depth", "api_workers", "tokenizer_workers")),
)  # fmt: skip

VLLM_METRICS: tuple[VllmMetric, ...] = (
    VllmMetric("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.",
               "mizzen_requests_running"),
    VllmMetric("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.",
               "mizzen_requests_waiting"),
    VllmMetric("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.",
               "mizzen_kv_cache_usage_ratio"),
    VllmMetric("vllm:prefix_cache_queries_total", "counter",
               "Prefix cache queries, in terms of number of queried tokens.", "mizzen_prefix_cache_queries_total"),
    VllmMetric("vllm:prefix_cache_hits_total", "counter", "Prefix cache hits, in terms of number of cached tokens.",
               "mizzen_prefix_cache_hits_total"),
    VllmMetric("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.",
               "mizzen_prompt_tokens_total"),
    VllmMetric("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.",
               "mizzen_generation_tokens_total"),
    VllmMetric("vllm:num_preemptions_total", "counter", "Cumulative number of preemption from the engine.",
               "mizzen_preemptions_total"),
    VllmMetric("vllm:request_success_total", "counter", "Count of successfully processed requests.",
               "mizzen_requests_finished_total", (*COMMON_LABELS, "finished_reason"), rename=(("timeout", "error"),)),
    VllmMetric("vllm:time_to_first_token_seconds", "histogram", "Histogram of time to first token in seconds.",
               "mizzen_time_to_first_token_seconds", buckets=_VLLM_TTFT),
    VllmMetric("vllm:inter_token_latency_seconds", "histogram", "Histogram of inter-token latency in seconds.",
               "mizzen_inter_token_latency_seconds", buckets=_VLLM_TOKEN),
    VllmMetric("vllm:request_time_per_output_token_seconds", "histogram",
               "Histogram of time_per_output_token_seconds per request.", "mizzen_time_per_output_token_seconds",
               buckets=_VLLM_TOKEN),
    VllmMetric("vllm:e2e_request_latency_seconds", "histogram", "Histogram of e2e request latency in seconds.",
               "mizzen_request_duration_seconds", buckets=_VLLM_REQUEST),
    VllmMetric("vllm:request_queue_time_seconds", "histogram",
               "Histogram of time spent in WAITING phase for request.", "mizzen_request_queue_time_seconds",
               buckets=_VLLM_REQUEST),
    VllmMetric("vllm:request_prefill_time_seconds", "histogram",
               "Histogram of time spent in PREFILL phase for request.", "mizzen_request_prefill_time_seconds",
               buckets=_VLLM_REQUEST),
    VllmMetric("vllm:request_decode_time_seconds", "histogram",
               "Histogram of time spent in DECODE phase for request.", "mizzen_request_decode_time_seconds",
               buckets=_VLLM_REQUEST),
    VllmMetric("vllm:request_prompt_tokens", "histogram", "Number of prefill tokens processed.",
               "mizzen_request_prompt_tokens", buckets=LENGTH_BUCKETS),
    VllmMetric("vllm:request_generation_tokens", "histogram", "Number of generation tokens processed.",
               "mizzen_request_generation_tokens", buckets=LENGTH_BUCKETS),
    VllmMetric("vllm:iteration_tokens_total", "histogram", "Histogram of number of tokens per engine_step.",
               "mizzen_step_tokens", buckets=_VLLM_STEP_TOKENS),
    VllmMetric("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig",
               "mizzen_kv_cache_capacity_pages",
               ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks",
                "engine")),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}
