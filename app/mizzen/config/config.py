"""The resolved configuration: frozen parts, made once by ``resolve`` and handed to each process as JSON."""

from typing import Literal

import msgspec

SchedulingPolicy = Literal["fcfs", "priority", "longest-prefix", "longest-output"]
LogLevel = Literal["debug", "info", "warning", "error"]
AllReduce = Literal["auto", "nccl"]
Otlp = Literal["grpc", "http/protobuf"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy", "null"]
ModelSource = Literal["huggingface", "modelscope"]


class ServerConfig(msgspec.Struct, frozen=True):
    host: str
    port: int
    health_host: str
    health_port: int
    api_workers: int
    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...]
    max_body_bytes: int
    request_timeout_s: float
    max_queued_requests: int
    chat_template: str | None


class SupervisorConfig(msgspec.Struct, frozen=True):
    drain_timeout_s: float
    heartbeat_timeout_s: float  # serve phase
    download_timeout_s: float  # without a beat, likewise below
    load_timeout_s: float
    profile_timeout_s: float
    compile_timeout_s: float
    capture_timeout_s: float
    max_restarts: int  # within restart_window_s; beyond: give up, exit 1
    restart_window_s: float
    termination_log: str | None


class ModelConfigSource(msgspec.Struct, frozen=True):
    """Where the model comes from. ``model`` is a folder, a .gguf file or a name on the hub that is its ``source``."""

    model: str
    revision: str | None
    load_format: LoadFormat
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    cache_dir: str
    source: ModelSource = "huggingface"


class CacheConfig(msgspec.Struct, frozen=True):
    page_size: int
    prefix_cache: Literal["radix", "none"]
    allocation: Literal["on-demand", "reserve"]
    memory_fraction: float
    kv_cache_bytes: int | None  # None: from memory_fraction and, on the CPU, at most 1 GiB


class SchedulerConfig(msgspec.Struct, frozen=True):
    policy: SchedulingPolicy
    max_running_requests: int
    max_batch_tokens: int
    max_model_len: int | None  # None: the model's context, or what the KV pool holds if that is less
    mixed_batches: bool = True  # False: a step prefills, or else decodes


class EngineConfig(msgspec.Struct, frozen=True):
    device: Literal["cpu", "cuda"]
    tensor_parallel_size: int
    overlap_depth: int
    attention_backend: str
    threads: int  # intra-op threads of each rank on the CPU
    seed: int
    cache: CacheConfig
    scheduler: SchedulerConfig
    model: ModelConfigSource
    graph_rows: int | None = 0  # the largest decode-only batch with a CUDA graph; 0: no graphs, None: as the GPU is
    graph_mixed_tokens: int = 0  # likewise of tokens in steps that prefill too
    kernels_off: tuple[str, ...] = ()  # fused kernels to replace by their torch twins
    all_reduce: AllReduce = "auto"  # auto: symmetric memory where the GPUs can map each other's
    nvlink_multicast: bool = False
    nvtx: bool = False  # names in profiles
    cpus: tuple[int, ...] = ()  # a core for each rank's main thread; empty: wherever the system puts it


class LogConfig(msgspec.Struct, frozen=True):
    level: LogLevel
    format: Literal["console", "json"]
    interval_s: float  # engine progress line
    access: bool = True  # a line a request


class TelemetryConfig(msgspec.Struct, frozen=True):
    """What OTEL_* variables turn on. Endpoints, headers, sampler and the rest are the SDK's to read."""

    traces: Otlp | None = None
    metrics: Otlp | None = None
    content: bool = False  # prompts may leave the service, in spans


class MetricsConfig(msgspec.Struct, frozen=True):
    enabled: bool = True
    vllm: bool = True  # the same numbers under vLLM's names too
    require_key: bool = False  # /metrics needs an API key


class Config(msgspec.Struct, frozen=True):
    server: ServerConfig
    supervisor: SupervisorConfig
    engine: EngineConfig
    log: LogConfig
    tokenizer_workers: int
    run_dir_parent: str | None
    metrics: MetricsConfig = MetricsConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
