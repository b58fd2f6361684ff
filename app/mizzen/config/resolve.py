"""Settings become a frozen Config here and nowhere else: after this, no "auto" is left but the model's own."""

import contextlib
import ctypes
import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from mizzen.config.config import (
    CacheConfig,
    Config,
    EngineConfig,
    LogConfig,
    MetricsConfig,
    ModelConfigSource,
    SchedulerConfig,
    ServerConfig,
    SupervisorConfig,
    TelemetryConfig,
)
from mizzen.config.settings import Settings
from mizzen.config.telemetry import resolve_telemetry
from mizzen.errors import ConfigError

LOOPBACK = "127.0.0.1"


def resolve(settings: Settings) -> Config:
    """Decides each "auto" and checks what the settings name. Raises ConfigError with a line for each problem."""
    problems: list[ConfigError] = []

    @contextlib.contextmanager
    def collect() -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            problems.append(error)

    keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    ranks = 1
    cpus: tuple[int, ...] = ()
    telemetry = TelemetryConfig()
    with collect():
        telemetry = resolve_telemetry(os.environ, content=settings.trace_content)
    with collect():
        keys = api_keys(settings)
    with collect():
        names = served_model_names(settings)
    with collect():
        device, ranks = choose_device(settings)
        cpus = engine_cpus(settings, ranks)
    with collect():
        check_ports(settings)
    with collect():
        check_lengths(settings, device)
    with collect():
        if settings.chat_template is not None and not Path(settings.chat_template).is_file():
            raise ConfigError(f"there is no file {settings.chat_template}", setting="MIZZEN_CHAT_TEMPLATE")
    if problems:
        raise ConfigError("\n".join(map(str, problems)), setting=problems[0].setting)

    host = settings.host if settings.host != "auto" else "0.0.0.0" if keys else LOOPBACK
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Config(
        server=ServerConfig(
            host=host,
            port=settings.port,
            health_host=host if settings.health_host == "auto" else settings.health_host,
            health_port=settings.health_port,
            api_workers=settings.api_workers,
            served_model_names=names,
            api_keys=keys,
            max_body_bytes=int(settings.max_body_bytes),
            request_timeout_s=settings.request_timeout_s,
            max_queued_requests=settings.max_queued_requests,
            chat_template=settings.chat_template and str(Path(settings.chat_template).resolve()),
        ),
        supervisor=SupervisorConfig(
            drain_timeout_s=settings.drain_timeout_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            download_timeout_s=settings.download_timeout_s,
            load_timeout_s=settings.load_timeout_s,
            profile_timeout_s=settings.profile_timeout_s,
            compile_timeout_s=settings.compile_timeout_s,
            capture_timeout_s=settings.capture_timeout_s,
            max_restarts=settings.max_restarts,
            restart_window_s=settings.restart_window_s,
            termination_log=settings.termination_log,
        ),
        engine=EngineConfig(
            device=device,
            tensor_parallel_size=ranks,
            overlap_depth=settings.overlap_depth,
            graph_rows=graph_rows(settings, device),
            graph_mixed_tokens=graph_mixed_tokens(settings, device),
            kernels_off=tuple(name for name in settings.kernels_off.split(",") if name),
            all_reduce=settings.all_reduce,
            nvlink_multicast=settings.nvlink_multicast,
            nvtx=settings.nvtx,
            cpus=cpus,
            attention_backend=settings.attention_backend,
            threads=threads(settings, ranks),
            seed=settings.seed,
            cache=CacheConfig(
                page_size=settings.page_size,
                prefix_cache=settings.prefix_cache,
                allocation=settings.kv_allocation,
                memory_fraction=settings.memory_fraction,
                kv_cache_bytes=None if settings.kv_cache_bytes == "auto" else int(settings.kv_cache_bytes),
            ),
            scheduler=SchedulerConfig(
                policy=settings.scheduling_policy,
                max_running_requests=running_requests(settings, device),
                max_batch_tokens=batch_tokens(settings, device),
                max_model_len=None if settings.max_model_len == "auto" else settings.max_model_len,
                mixed_batches=settings.mixed_batches,
            ),
            model=ModelConfigSource(
                model=settings.model,
                revision=settings.model_revision,
                load_format=settings.load_format,
                dtype="float32" if settings.dtype == "auto" and device == "cpu" else settings.dtype,
                source=settings.model_source,
                cache_dir=str(Path(settings.cache_dir or f"{cache_home}/mizzen").expanduser()),
            ),
        ),
        log=LogConfig(settings.log_level, settings.log_format, settings.log_interval_s, settings.access_log),
        tokenizer_workers=settings.tokenizer_workers,
        run_dir_parent=settings.run_dir or runtime_dir(),
        metrics=MetricsConfig(settings.metrics, settings.vllm_metrics, settings.metrics_require_key),
        telemetry=telemetry,
    )


def describe(config: Config) -> dict[str, Any]:
    """The configuration as plain data for logs and people; keys are counted, not shown."""
    data: dict[str, Any] = msgspec.to_builtins(config)
    data["server"]["api_keys"] = f"{len(config.server.api_keys)} hidden"
    return data


def api_keys(settings: Settings) -> tuple[str, ...]:
    """The keys of MIZZEN_API_KEYS, then those of the file; none is allowed twice or shown."""
    keys: list[str] = []
    if settings.api_keys is not None:
        keys += _valid_keys(settings.api_keys.get_secret_value().split(","), "MIZZEN_API_KEYS")
    if settings.api_keys_file is not None:
        path = Path(settings.api_keys_file)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            if isinstance(error, PermissionError):
                reason = f"{reason} for uid {os.getuid()}"
            raise ConfigError(f"cannot read {path}: {reason}", setting="MIZZEN_API_KEYS_FILE") from error
        keys += _valid_keys((line.partition("#")[0] for line in lines), "MIZZEN_API_KEYS_FILE")
    return tuple(dict.fromkeys(keys))


def _valid_keys(parts: Any, setting: str) -> list[str]:
    keys = [key for part in parts if (key := part.strip())]
    if not keys:
        # An empty list of keys would open the server to everybody: surely not what was meant.
        raise ConfigError("holds no key; unset it to serve without keys", setting=setting)
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError(f"key {number} has a character that no HTTP header can carry", setting=setting)
    return keys


def served_model_names(settings: Settings) -> tuple[str, ...]:
    """The names in MIZZEN_SERVED_MODEL_NAME; else what the model is called."""
    if not settings.model:
        raise ConfigError(
            "MIZZEN_MODEL is not set: name a folder, a .gguf file or a model of the hub", setting="MIZZEN_MODEL"
        )
    if settings.served_model_name is not None:
        names = tuple(dict.fromkeys(name for part in settings.served_model_name.split(",") if (name := part.strip())))
        if not names:
            raise ConfigError("holds no name", setting="MIZZEN_SERVED_MODEL_NAME")
        return names
    path = Path(settings.model).expanduser()
    if path.exists() or path.is_absolute():
        path = path.resolve()
        return (path.stem if path.suffix == ".gguf" else path.name,)
    return (settings.model,)


def choose_device(settings: Settings) -> tuple[Literal["cpu", "cuda"], int]:
    """And the ranks on it: a GPU takes one, so "auto" is all GPUs that this process sees, and 1 on the CPU."""
    wanted = settings.tensor_parallel_size
    gpus = 0 if settings.device == "cpu" else cuda_device_count()
    if gpus == 0:
        if settings.device == "cuda":
            raise ConfigError("MIZZEN_DEVICE is 'cuda', but no usable GPU was found", setting="MIZZEN_DEVICE")
        return "cpu", 1 if wanted == "auto" else wanted
    if wanted == "auto":
        return "cuda", gpus
    if wanted > gpus:
        raise ConfigError(
            f"MIZZEN_TENSOR_PARALLEL_SIZE is {wanted}, but there are {gpus} GPUs",
            setting="MIZZEN_TENSOR_PARALLEL_SIZE",
        )
    return "cuda", wanted


def check_ports(settings: Settings) -> None:
    if settings.port == settings.health_port:
        raise ConfigError(
            f"MIZZEN_HEALTH_PORT is {settings.health_port}, which is MIZZEN_PORT too: choose another, or 0 for none",
            setting="MIZZEN_HEALTH_PORT",
        )


def threads(settings: Settings, ranks: int) -> int:
    if settings.threads != "auto":
        return settings.threads
    return max(1, available_cpus() // ranks)


def engine_cpus(settings: Settings, ranks: int) -> tuple[int, ...]:
    """A core for each rank, all different and allowed for this process; none if the setting names none."""
    if settings.engine_cpus is None:
        return ()
    cpus = tuple(map(int, settings.engine_cpus.split(",")))
    may = _allowed_cpus()
    if len(cpus) != ranks or len(set(cpus)) != ranks:
        raise ConfigError(
            f"MIZZEN_ENGINE_CPUS is {settings.engine_cpus}, but must name {ranks} different cores: one for each of"
            " MIZZEN_TENSOR_PARALLEL_SIZE's ranks",
            setting="MIZZEN_ENGINE_CPUS",
        )
    if missing := [str(cpu) for cpu in cpus if cpu not in may]:
        raise ConfigError(
            f"MIZZEN_ENGINE_CPUS names core {', '.join(missing)}, but this process may use"
            f" {', '.join(map(str, sorted(may))) or 'none that it could name'}",
            setting="MIZZEN_ENGINE_CPUS",
        )
    return cpus


def running_requests(settings: Settings, device: str) -> int:
    if settings.max_running_requests != "auto":
        return settings.max_running_requests
    return min(64 if device == "cpu" else 256, batch_tokens(settings, device))


def graph_rows(settings: Settings, device: str) -> int | None:
    if device == "cpu":
        return 0
    return None if settings.cuda_graph_rows == "auto" else settings.cuda_graph_rows


def graph_mixed_tokens(settings: Settings, device: str) -> int:
    tokens = settings.cuda_graph_mixed_tokens
    if device == "cpu" or settings.cuda_graph_rows == 0:
        return 0
    return batch_tokens(settings, device) if tokens == "auto" else tokens


def batch_tokens(settings: Settings, device: str) -> int:
    if settings.max_batch_tokens != "auto":
        return settings.max_batch_tokens
    # On the CPU a step of 256 tokens takes about a second on a small model: streams must not stall for longer.
    tokens = 256 if device == "cpu" else 8192
    running = settings.max_running_requests
    return tokens if running == "auto" else max(tokens, running)


def check_lengths(settings: Settings, device: str) -> None:
    running, tokens = running_requests(settings, device), batch_tokens(settings, device)
    if tokens < running:
        raise ConfigError(
            f"MIZZEN_MAX_BATCH_TOKENS is {tokens}, but must be at least MIZZEN_MAX_RUNNING_REQUESTS ({running}):"
            " each running request takes a token a step",
            setting="MIZZEN_MAX_BATCH_TOKENS",
        )


def runtime_dir() -> str | None:
    """$XDG_RUNTIME_DIR if it can be used; None leaves the choice of a temporary folder to the supervisor."""
    path = os.environ.get("XDG_RUNTIME_DIR")
    return path if path and os.access(path, os.W_OK | os.X_OK) else None


def _allowed_cpus() -> set[int]:
    """Empty where the system has no affinities."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def available_cpus() -> int:
    """Cores that this process may use: its affinity, and its container's quota (rounded up)."""
    cpus = len(_allowed_cpus()) or os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no cgroup v2
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, math.ceil(int(quota) / int(period))))


def cuda_device_count() -> int:
    """GPUs that torch could use, found without importing torch: the driver is asked, if torch was built for it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
