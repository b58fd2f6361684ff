"""Small GGUF files, written the way llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from mizzen.models.gguf_source import _LAYER, _TOP
from tiny import SPECIAL_TOKENS, tiny_config, tiny_tokenizer, tiny_weights

# Merges make the splits matter: two spaces are a token, as are "the" and " the".
MERGES = [("Ġ", "Ġ"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "1"), ("1", "2")]
USER_DEFINED = "<think>"


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a Q or K projection's rows: halves of a head interleaved."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    quantization: str = "Q8_0",
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    architecture: str | None = None,
    rope_factors: np.ndarray[Any, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Writes a tiny model of ``family`` and returns the config.json that it stands for."""
    tokens = [*tiny_tokenizer().get_vocab()]
    tokens.sort(key=tiny_tokenizer().get_vocab().__getitem__)
    tokens += [left + right for left, right in MERGES] + [USER_DEFINED]
    config = tiny_config(family, **{"rope_scaling": None, "vocab_size": len(tokens), **overrides})
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    for key, value in (metadata or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    types = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    types[-1] = gguf.TokenType.USER_DEFINED
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    for name, tensor in tiny_weights(config).items():
        _add(writer, name, tensor, config, quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def _add(writer: Any, name: str, tensor: torch.Tensor, config: dict[str, Any], quantization: str) -> None:
    if config["model_type"] == "llama":
        if ".q_proj." in name:
            tensor = permute(tensor, config["num_attention_heads"])
        if ".k_proj." in name:
            tensor = permute(tensor, config["num_key_value_heads"])
    values = tensor.contiguous().numpy()
    top = {value: key for key, value in _TOP.items()}
    if name not in top:
        _, _, layer, *rest = name.split(".")
        inner = {value: key for key, value in _LAYER.items()}[".".join(rest[:-1])]
        top[name] = f"blk.{layer}.{inner}.{rest[-1]}"
    kind = gguf.GGMLQuantizationType[quantization if values.ndim == 2 else "F32"]
    writer.add_tensor(top[name], gguf.quants.quantize(values, kind), raw_dtype=kind)
