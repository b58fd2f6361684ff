"""Every setting, once: its name, type, range, default and meaning. The only reader of the environment.

``Settings`` is what a person wrote; ``resolve`` makes of it what the processes use. The same fields give the
environment variables (MIZZEN_PAGE_SIZE), the flags (--page-size), the messages for wrong values and the reference in
the README.
"""

import argparse
import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le
from dotenv import dotenv_values
from pydantic import ByteSize, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from mizzen.config.config import AllReduce, LoadFormat, ModelSource, SchedulingPolicy
from mizzen.errors import ConfigError

PREFIX = "MIZZEN_"
ENV_FILE = ".env"
Auto = Literal["auto"]
Seconds = Annotated[float, Field(allow_inf_nan=False)]

# Kubernetes sets these for every Service of the namespace, so for one called "mizzen" or "mizzen-health" too.
_LINK_NAME = re.compile(
    r"MIZZEN(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_PORT_NAME = re.compile(r"MIZZEN(_\w+)?_PORT")
_LINK_PORT_VALUE = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


def _setting(default: Any, group: str, description: str, *, allowed: str | None = None, **constraints: Any) -> Any:
    """A field. ``allowed`` says what may be written where the type and range do not."""
    extra: dict[str, Any] = {"group": group} if allowed is None else {"group": group, "allowed": allowed}
    return Field(default, description=description, json_schema_extra=extra, **constraints)


class Settings(BaseSettings):
    """What was written in the environment, the .env file and the flags (which win in the opposite order)."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        env_ignore_empty=True,
        extra="ignore",  # unknown names are reported by load_settings, with the nearest name
        frozen=True,
    )

    # ---- model ----
    model: str = _setting(
        "", "Model", "The model to serve.", allowed="a folder, a .gguf file or its name on a hub (needed)"
    )
    model_source: ModelSource = _setting(
        "huggingface", "Model", "The hub that a model comes from which is no folder or file here."
    )
    model_revision: str | None = _setting(None, "Model", "Branch, tag or commit of a hub's model.", allowed="a name")
    load_format: LoadFormat = _setting(
        "auto", "Model", "How weights are read; dummy makes random ones, null computes nothing (benchmarks)."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "Model", "Type of weights and activations; auto is float32 on the CPU, else the model's own."
    )
    cache_dir: str | None = _setting(
        None, "Model", "Converted and downloaded models; by default ~/.cache/mizzen.", allowed="a folder"
    )
    served_model_name: str | None = _setting(
        None,
        "Model",
        "Names that clients may use; by default the model's folder or file name, or its name on the hub.",
        allowed="one or more names, comma separated",
    )
    chat_template: str | None = _setting(
        None, "Model", "Replaces the model's own chat template.", allowed="a Jinja file"
    )

    # ---- http ----
    host: str = _setting(
        "auto", "HTTP", "Address of the API; auto is 127.0.0.1 without API keys, 0.0.0.0 with.", allowed="an address"
    )
    port: int = _setting(8000, "HTTP", "Port of the API.", ge=1, le=65535)
    health_host: str = _setting(
        "auto", "HTTP", "Address of the health port; auto is that of the API.", allowed="an address"
    )
    health_port: int = _setting(
        8001, "HTTP", "Port of the supervisor's own health server, for probes; 0 is off.", ge=0, le=65535
    )
    api_workers: int = _setting(1, "HTTP", "API processes.", ge=1, le=64)
    tokenizer_workers: int = _setting(1, "HTTP", "Tokenizer processes.", ge=1, le=64)
    api_keys: SecretStr | None = _setting(
        None, "HTTP", "Keys of which a request must carry one.", allowed="one or more keys, comma separated"
    )
    api_keys_file: str | None = _setting(
        None, "HTTP", "More keys, one a line; # begins a comment.", allowed="a readable file"
    )
    max_body_bytes: ByteSize = _setting(
        ByteSize(16 * 1024**2), "HTTP", "Longest request body; a longer one gets 413.", ge=1024, le=1024**3
    )
    request_timeout_s: Seconds = _setting(
        600.0, "HTTP", "A request that takes longer ends with an error.", gt=0, le=86_400
    )
    max_queued_requests: int = _setting(
        256, "HTTP", "Requests that may wait for the engine; beyond it 429 with Retry-After.", ge=1, le=1_000_000
    )

    # ---- engine ----
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "Engine", "auto is cuda where there is a GPU.")
    tensor_parallel_size: Annotated[int, Ge(1), Le(64)] | Auto = _setting(
        1, "Engine", "Ranks that the model is split over, a GPU each; auto is all GPUs, and 1 on the CPU."
    )
    all_reduce: AllReduce = _setting(
        "auto",
        "Engine",
        "How GPUs sum what each has computed; auto is symmetric memory where they can map each other's, else NCCL.",
    )
    nvlink_multicast: bool = _setting(
        False, "Engine", "Leaves NVLink multicast (NVLS) to NCCL; false keeps it off.", allowed="true or false"
    )
    threads: Annotated[int, Ge(1), Le(1024)] | Auto = _setting(
        "auto", "Engine", "Threads of each rank on the CPU; auto shares the cores among the ranks."
    )
    engine_cpus: str | None = _setting(
        None,
        "Engine",
        "Pins each rank's main thread to a core, best one near its GPU; by default the system chooses.",
        allowed="a core's number for each rank, comma separated",
        pattern=r"^\d+(,\d+)*$",
    )
    seed: int = _setting(0, "Engine", "Seeds requests that bring none, and dummy weights.", ge=0, le=2**63 - 1)
    overlap_depth: int = _setting(
        1, "Engine", "Steps that the host runs ahead of the device; 0 turns overlap off.", ge=0, le=4
    )
    cuda_graph_rows: Annotated[int, Ge(0), Le(1024)] | Auto = _setting(
        "auto",
        "Engine",
        "Largest decode batch that runs as a CUDA graph; 0 turns graphs off, auto is 256 on a GPU of 120 GiB or more,"
        " else 160.",
    )
    cuda_graph_mixed_tokens: Annotated[int, Ge(0), Le(65_536)] | Auto = _setting(
        "auto",
        "Engine",
        "Likewise of tokens in steps that prefill too; 0 runs those without graphs, auto is MIZZEN_MAX_BATCH_TOKENS.",
    )
    kernels_off: str = _setting(
        "",
        "Engine",
        "Fused GPU kernels to replace by plain torch, to see what each is worth.",
        allowed="names, comma separated: rms_norm, add_rms_norm, qk_norm_rope_write_kv, silu_mul, linear, gated_linear",
        pattern=r"^((rms_norm|add_rms_norm|qk_norm_rope_write_kv|silu_mul|linear|gated_linear)(,|$))*$",
    )
    nvtx: bool = _setting(
        False,
        "Engine",
        "Names the scheduler's work, layers and kernels in profiles: NVTX ranges, on the CPU torch's profiler's.",
        allowed="true or false",
    )
    attention_backend: str = _setting(
        "auto",
        "Engine",
        "One for all, or prefill's and decode's with a comma between.",
        allowed="auto, or a backend (sdpa, flashinfer, flash_attn, triton), or two",
        pattern=r"^[a-z0-9_]+(,[a-z0-9_]+)?$",
    )
    max_model_len: Annotated[int, Ge(2), Le(2**24)] | Auto = _setting(
        "auto",
        "Engine",
        "Longest prompt and answer, in tokens; auto is the model's context, or what the KV cache holds if less.",
    )

    # ---- scheduler and KV cache ----
    scheduling_policy: SchedulingPolicy = _setting(
        "fcfs",
        "Scheduler",
        "Order of the waiting requests. longest-output, for offline work, also spreads that over the steps which the"
        " longest request takes.",
    )
    max_running_requests: Annotated[int, Ge(1), Le(4096)] | Auto = _setting(
        "auto", "Scheduler", "Requests in one batch; auto is 64 on the CPU, 256 on a GPU."
    )
    max_batch_tokens: Annotated[int, Ge(1), Le(2**20)] | Auto = _setting(
        "auto", "Scheduler", "Tokens of one step; auto is 256 on the CPU, 8192 on a GPU."
    )
    mixed_batches: bool = _setting(
        True,
        "Scheduler",
        "A step decodes and prefills at once; false: prompts are prefilled first, and decoding waits for them.",
        allowed="true or false",
    )
    page_size: int = _setting(16, "KV cache", "Tokens of a page.", ge=1, le=256)
    prefix_cache: Literal["radix", "none"] = _setting("radix", "KV cache", "Reuse of what prompts have in common.")
    kv_allocation: Literal["on-demand", "reserve"] = _setting(
        "on-demand", "KV cache", "reserve takes a request's longest answer up front: nothing is ever preempted."
    )
    memory_fraction: Seconds = _setting(
        0.9, "KV cache", "Part of the device's memory for weights and KV cache.", gt=0, le=1
    )
    kv_cache_bytes: Annotated[ByteSize, Ge(1), Le(2**50)] | Auto = _setting(
        "auto", "KV cache", "Size of the KV cache, instead of what MIZZEN_MEMORY_FRACTION leaves."
    )

    # ---- supervision ----
    drain_timeout_s: Seconds = _setting(
        30.0, "Supervision", "Time that SIGTERM leaves to requests in flight.", ge=0, le=86_400
    )
    heartbeat_timeout_s: Seconds = _setting(
        20.0,
        "Supervision",
        "A serving process without a heartbeat, or with work but no progress, for this long is restarted.",
        ge=0.5,
        le=3600,
    )
    download_timeout_s: Seconds = _setting(
        300.0, "Supervision", "Likewise while the model is downloaded or converted.", ge=0.5, le=86_400
    )
    load_timeout_s: Seconds = _setting(
        300.0, "Supervision", "Likewise while a process starts and weights are loaded.", ge=0.5, le=86_400
    )
    profile_timeout_s: Seconds = _setting(120.0, "Supervision", "Likewise while memory is measured.", ge=0.5, le=86_400)
    compile_timeout_s: Seconds = _setting(
        900.0, "Supervision", "Likewise while kernels are compiled.", ge=0.5, le=86_400
    )
    capture_timeout_s: Seconds = _setting(
        300.0, "Supervision", "Likewise while CUDA graphs are captured.", ge=0.5, le=86_400
    )
    max_restarts: int = _setting(
        5,
        "Supervision",
        "Restarts of a process, or of the engine, within the window; one more: exit 1.",
        ge=0,
        le=1000,
    )
    restart_window_s: Seconds = _setting(600.0, "Supervision", "The window of MIZZEN_MAX_RESTARTS.", gt=0, le=86_400)
    termination_log: str | None = _setting(
        None, "Supervision", "Where the line that says why the service ended is written too.", allowed="a file"
    )
    run_dir: str | None = _setting(
        None,
        "Supervision",
        "Where the private folder of sockets is made; by default $XDG_RUNTIME_DIR or /tmp.",
        allowed="a folder with a short path",
    )

    # ---- logs ----
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "Logs", "What is logged.")
    log_format: Literal["console", "json"] = _setting("console", "Logs", "Lines for people, or JSON.")
    log_interval_s: Seconds = _setting(
        10.0, "Logs", "Time between the engine's progress lines while it works; 0 is off.", ge=0, le=86_400
    )
    access_log: bool = _setting(
        True, "Logs", "A line for each request, when it has ended; none has text of prompts.", allowed="true or false"
    )

    # ---- traces ----
    trace_content: bool = _setting(
        False,
        "Traces",
        "Spans carry prompts and answers. Where they go is said by the OTEL_* variables; without them, nowhere.",
        allowed="true or false",
    )

    # ---- metrics ----
    metrics: bool = _setting(True, "Metrics", "Counts, and answers /metrics on both ports.", allowed="true or false")
    vllm_metrics: bool = _setting(
        True, "Metrics", "Exposes the metrics under vLLM's names too.", allowed="true or false"
    )
    metrics_require_key: bool = _setting(
        False, "Metrics", "/metrics needs one of MIZZEN_API_KEYS as well.", allowed="true or false"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        for source in (env_settings, dotenv_settings):
            assert isinstance(source, EnvSettingsSource)
            source.env_vars = {
                name: value for name, value in source.env_vars.items() if not is_service_link(name, value or "")
            }
        return init_settings, env_settings, dotenv_settings


class Loaded(NamedTuple):
    settings: Settings
    service_links: tuple[str, ...]  # names that were ignored


def variable(field: str) -> str:
    return PREFIX + field.upper()


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes made this variable from a Service's name: it was not meant as a setting."""
    name = name.upper()
    if _LINK_NAME.fullmatch(name):
        return True
    return bool(_LINK_PORT_NAME.fullmatch(name) and _LINK_PORT_VALUE.match(value))


def is_secret(field: FieldInfo) -> bool:
    return SecretStr in (field.annotation, *get_args(field.annotation))


def allowed(field: FieldInfo) -> str:
    """What may be written, in words: "1 to 256", "radix or none", "auto, or 1 to 64"."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    if "allowed" in extra:
        return str(extra["allowed"])
    parts = [(field.annotation, field.metadata)]
    for kind in get_args(field.annotation):
        parts.append((get_args(kind)[0], list(kind.__metadata__)) if get_origin(kind) is Annotated else (kind, []))
    choices = [str(value) for kind, _ in parts if get_origin(kind) is Literal for value in get_args(kind)]
    limits = [limit for _, metadata in parts for limit in metadata]
    low = [str(limit.ge) for limit in limits if isinstance(limit, Ge)]
    low += [f"over {limit.gt}" for limit in limits if isinstance(limit, Gt)]
    high = [str(limit.le) for limit in limits if isinstance(limit, Le)]
    if not high:
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    span = f"{low[0]} to {high[0]}" + (" bytes (or such as 512MiB)" if ByteSize in dict(parts) else "")
    return f"{choices[0]}, or {span}" if choices else span


def load_settings(flags: dict[str, Any] | None = None, *, env_file: Path | str | None = ENV_FILE) -> Loaded:
    """Reads flags (by field name), then the environment, then the .env file.

    Raises ConfigError with a line for each unknown variable and each wrong value.
    """
    flags = flags or {}
    ours = {name: value for name, value in _environment(env_file).items() if name.upper().startswith(PREFIX)}
    links = tuple(sorted(name for name, value in ours.items() if is_service_link(name, value)))
    known = [variable(field) for field in Settings.model_fields]
    problems = {
        name.upper(): _unknown(name, known) for name in sorted(ours) if name not in links and name.upper() not in known
    }
    try:
        settings = Settings(_env_file=env_file, **flags)  # type: ignore[call-arg]  # made by BaseSettings
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            field = str(detail["loc"][0])
            problems.setdefault(variable(field), _wrong(field, detail["input"], by_flag=field in flags))
    if problems:
        raise ConfigError("\n".join(problems.values()), setting=next(iter(problems)))
    return Loaded(settings, links)


def termination_log(flags: dict[str, Any], *, env_file: Path | str | None = ENV_FILE) -> str | None:
    """MIZZEN_TERMINATION_LOG alone, for when the other settings are wrong."""
    return flags.get("termination_log") or _environment(env_file).get("MIZZEN_TERMINATION_LOG") or None


def _environment(env_file: Path | str | None) -> dict[str, str]:
    from_file = dotenv_values(env_file) if env_file is not None and Path(env_file).is_file() else {}
    return {name: value or "" for name, value in {**from_file, **os.environ}.items()}


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)
    return f"{name} is not a setting; the nearest is {nearest[0]}"


def _wrong(field: str, value: Any, *, by_flag: bool) -> str:
    info = Settings.model_fields[field]
    shown = "wrong" if is_secret(info) else repr(value)
    name = f"{variable(field)} ({flag(field)})" if by_flag else variable(field)
    return f"{name} is {shown}, but must be: {allowed(info)}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Gives ``parser`` a flag for each setting; ``flags_of`` reads them back."""
    groups: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        title = str(extra["group"])
        group = groups.setdefault(title, None) or parser.add_argument_group(title)
        groups[title] = group
        help_text = f"{field.description} [{allowed(field)}; default: {default_text(field) or 'none'}]"
        group.add_argument(flag(name), dest=name, metavar="VALUE", help=help_text.replace("%", "%%"))


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name, None) for name in Settings.model_fields}
    return {name: value for name, value in given.items() if value is not None}


def default_text(field: FieldInfo) -> str:
    if field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
