"""A GGUF file's metadata as the config.json and generation_config.json that the model was published with."""

import math
from typing import Any

import numpy as np

from mizzen.errors import ConfigError
from mizzen.models.gguf_source import ROPE_FACTORS, metadata

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3_ORIGINAL_CONTEXT = 8192  # of every model that uses llama3 scaling; the file does not say


def model_config(reader: Any) -> dict[str, Any]:
    """Raises ConfigError for an architecture or a rope scaling that is not supported, or metadata that is missing."""
    kind = metadata(reader, "general.architecture")
    if kind not in _ARCHITECTURES or metadata(reader, f"{kind}.expert_count"):
        raise _refuse(
            f"GGUF architecture {kind!r}{' with experts' if kind in _ARCHITECTURES else ''} is not supported;"
            f" supported are {', '.join(sorted(_ARCHITECTURES))}"
        )

    def required(name: str) -> Any:
        value = metadata(reader, f"{kind}.{name}")
        if value is None:
            raise _refuse(f"the GGUF file has no {kind}.{name}")
        return value

    heads, hidden = required("attention.head_count"), required("embedding_length")
    head_dim = metadata(reader, f"{kind}.attention.key_length") or hidden // heads
    if (rotated := metadata(reader, f"{kind}.rope.dimension_count", head_dim)) != head_dim:
        raise _refuse(f"rotary embeddings of {rotated} of {head_dim} dimensions are not supported")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise _refuse("the GGUF file lacks token_embd.weight")
    theta = _float(metadata(reader, f"{kind}.rope.freq_base", 10000.0))
    config = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata(reader, f"{kind}.attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": required("context_length"),
        "rms_norm_eps": _float(required("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in tensors,
        "torch_dtype": "bfloat16",  # what quantized weights are computed in on a GPU: it cannot overflow
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata(reader, "tokenizer.ggml.eos_token_id"),
    }
    scaling = _rope_scaling(reader, kind, head_dim, theta, tensors.get(ROPE_FACTORS))
    return config | ({"rope_scaling": scaling} if scaling else {})


def generation_config(reader: Any) -> dict[str, Any]:
    """All the tokens that end an answer: of the text, of a turn, of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = {metadata(reader, f"tokenizer.ggml.{key}") for key in keys}
    return {
        "bos_token_id": metadata(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(found - {None}),
    }


def _rope_scaling(reader: Any, kind: str, head_dim: int, theta: float, factors: Any) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(np.array(factors.data, np.float64), head_dim, theta)
    scaling = metadata(reader, f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    factor = _float(metadata(reader, f"{kind}.rope.scaling.factor", 1.0))
    original = metadata(reader, f"{kind}.rope.scaling.original_context_length")
    if scaling == "linear":
        # llama.cpp's context_length is the scaled one; config.json's max_position_embeddings is not.
        raise _refuse("linear rope scaling in a GGUF file is not supported: use the model's own folder")
    if scaling == "yarn" and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise _refuse(f"rope scaling {scaling!r} in a GGUF file is not supported")


def _llama3_scaling(factors: "np.ndarray[Any, Any]", head_dim: int, theta: float) -> dict[str, Any]:
    """The file holds what each frequency is divided by. The longest waves are divided by the full factor; the rest
    of the rule is checked, since another rule would make another model."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_ORIGINAL_CONTEXT * frequencies / (2 * math.pi)
    blend = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    factor = float(factors.max())
    expected = 1 / ((1 - blend) / factor + blend)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise _refuse(f"{ROPE_FACTORS} in the GGUF file is not llama3's rule: use the model's own folder")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
    }


def _float(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _refuse(message: str) -> ConfigError:
    return ConfigError(message, setting="MIZZEN_MODEL")
