"""A model's config.json, read once into a frozen description; what is not supported is refused, never ignored."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from mizzen.errors import ConfigError, InvalidRequest
from mizzen.hub import Progress as Progress  # loading counts as the download does
from mizzen.layers.rope_scaling import RopeScaling
from mizzen.sampling_params import SamplingParams

log = structlog.get_logger()


# What config.json calls the architecture, and what sets that family apart in code.
SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_SAMPLING_DEFAULTS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """All that the model code needs to know of a model. Sizes are of the whole model, not of one rank."""

    name: str  # LlamaForCausalLM
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeScaling
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    context_length: int  # positions the model is right for: scaling and a sliding window are accounted for
    sliding_window: int | None
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"

    def kv_heads_per_rank(self, tensor_parallel_size: int) -> int:
        """KV heads fewer than ranks are replicated: every rank has at least one."""
        return max(1, self.num_kv_heads // tensor_parallel_size)

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError if ``size`` ranks cannot share this model evenly."""

        def refuse(count: int, what: str) -> ConfigError:
            return ConfigError(
                f"MIZZEN_TENSOR_PARALLEL_SIZE={size} does not divide this model's {count} {what}: name a"
                " number that does (auto is all GPUs)",
                setting="MIZZEN_TENSOR_PARALLEL_SIZE",
            )

        if self.num_heads % size:
            raise refuse(self.num_heads, "attention heads")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise refuse(self.num_kv_heads, "KV heads (nor is it a multiple of them)")
        if self.intermediate_size % size:
            raise refuse(self.intermediate_size, "intermediate features")


def _refuse(message: str) -> ConfigError:
    return ConfigError(message, setting="MIZZEN_MODEL")


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``. Raises ConfigError if it is missing or not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise _refuse(f"'{path.parent}' has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise _refuse(f"'{path}' cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise _refuse(f"'{path}' does not hold a JSON object")
    return value


def parse_architecture(folder: Path | str) -> ModelArchitecture:
    """Reads ``folder``/config.json. Raises ConfigError naming what is missing, malformed or not supported."""
    path = Path(folder) / "config.json"
    try:
        return _parse(read_json(path))
    except KeyError as error:
        raise _refuse(f"'{path}' has no {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise _refuse(f"'{path}' is malformed: {error}") from None


def _parse(config: dict[str, Any]) -> ModelArchitecture:
    names = config.get("architectures") or []
    name = next((name for name in names if name in SUPPORTED_ARCHITECTURES), None)
    if name is None:
        found = ", ".join(map(str, names)) or f"model_type {config.get('model_type')!r}"
        raise _refuse(
            f"architecture {found} is not supported; supported are {', '.join(sorted(SUPPORTED_ARCHITECTURES))}"
        )
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "?")
        raise _refuse(f"quantized checkpoints ({method}) are not supported; GGUF files are")
    if config.get("hidden_act", "silu") != "silu":
        raise _refuse(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    family = SUPPORTED_ARCHITECTURES[name]
    hidden_size, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    # Qwen3's head_dim does not follow from the hidden size: its default in transformers is 128.
    head_dim = config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads)
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise _refuse(f"{num_heads} attention heads do not share {num_kv_heads} KV heads evenly")
    if head_dim % 2:
        raise _refuse(f"head_dim {head_dim} is odd: rotary embeddings pair its halves")
    max_positions = _positive(config, "max_position_embeddings")
    rope = _parse_rope(config, max_positions)
    window = _sliding_window(config, family)
    context_length = _scaled_context(rope, max_positions)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelArchitecture(
        name=name,
        family=family,
        hidden_size=hidden_size,
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_positive(config, "intermediate_size"),
        vocab_size=_positive(config, "vocab_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (attention_bias and family != "mistral"),
        output_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        # Within one window, attention over the window and over everything are the same.
        context_length=min(context_length, window) if window else context_length,
        sliding_window=window,
        dtype=_dtype(config),
    )


def _positive(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value


def _dtype(config: dict[str, Any]) -> str:
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise _refuse(f"dtype {dtype!r} is not supported, only float32, bfloat16 and float16")
    return str(dtype)


def _sliding_window(config: dict[str, Any], family: str) -> int | None:
    """Mistral's window holds if set; Qwen's only if use_sliding_window says so; Llama has none."""
    if family == "llama" or (family.startswith("qwen") and not config.get("use_sliding_window", False)):
        return None
    window = config.get("sliding_window")
    return None if window is None else int(window)


def _parse_rope(config: dict[str, Any], max_positions: int) -> RopeScaling:
    """``rope_parameters`` (transformers 5) or ``rope_scaling`` beside ``rope_theta``."""
    given: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise _refuse(f"partial_rotary_factor {partial} is not supported, only 1.0")
    original = int(
        config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings") or max_positions
    )
    if kind == "default":
        return RopeScaling(theta)
    if kind == "linear":
        return RopeScaling(theta, "linear", float(given["factor"]))
    if kind == "dynamic":
        return RopeScaling(theta, "dynamic", float(given["factor"]), max_positions)
    if kind == "llama3":
        return RopeScaling(
            theta,
            "llama3",
            float(given["factor"]),
            original,
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
        )
    if kind == "yarn":
        factor = given.get("factor")
        return RopeScaling(
            theta,
            "yarn",
            float(factor) if factor is not None else max_positions / original,
            original,
            beta_fast=float(given.get("beta_fast") or 32.0),
            beta_slow=float(given.get("beta_slow") or 1.0),
            truncate=bool(given.get("truncate", True)),
            attention_factor=given.get("attention_factor"),
            mscale=given.get("mscale"),
            mscale_all_dim=given.get("mscale_all_dim"),
        )
    raise _refuse(f"rope type {kind!r} is not supported, only default, linear, dynamic, yarn and llama3")


def _scaled_context(rope: RopeScaling, max_positions: int) -> int:
    """Linear and dynamic configs keep the unscaled max_position_embeddings; llama3's is scaled; yarn's is either."""
    if rope.type in ("linear", "dynamic"):
        return int(max_positions * rope.factor)
    if rope.type == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def eos_token_ids(folder: Path | str) -> tuple[int, ...]:
    """All end tokens that config.json and generation_config.json name, sorted."""
    ids: set[int] = set()
    for config in _configs(Path(folder)):
        eos = config.get("eos_token_id")
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return tuple(sorted(ids))


def default_sampling(folder: Path | str) -> dict[str, float]:
    """generation_config.json's sampling parameters. ``do_sample`` false means temperature 0, as in transformers.

    A value that no request may have is left out, with a warning: it must not make requests fail that never named it.
    """
    path = Path(folder) / "generation_config.json"
    if not path.exists():
        return {}
    config = read_json(path)
    chosen: dict[str, float] = {}
    for key, kind in _SAMPLING_DEFAULTS.items():
        if config.get(key) is None:
            continue
        try:
            value = kind(config[key])
            SamplingParams(**{key: value}).validate()  # type: ignore[arg-type]  # a number, as its fields are
        except (TypeError, ValueError, InvalidRequest) as error:
            log.warning("a default of generation_config.json is ignored", field=key, reason=str(error))
            continue
        chosen[key] = value
    if config.get("do_sample") is False:
        return {key: value for key, value in chosen.items() if key == "repetition_penalty"} | {"temperature": 0.0}
    return chosen


def _configs(folder: Path) -> list[dict[str, Any]]:
    generation = folder / "generation_config.json"
    return [read_json(folder / "config.json"), *([read_json(generation)] if generation.exists() else [])]
