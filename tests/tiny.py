"""Tiny random models, as folders that the whole server can run on. Needs neither transformers nor a download."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; then the 256 bytes
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256  # 259: even shares for no number of ranks but 7 and 37
EOS_TOKEN_IDS = (0, 2)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_ROPE},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False, "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "head_dim": 32},
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a model of 2 layers, 4 heads and 2 KV heads; an override of ``...`` leaves the key out."""
    config = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_IDS[0],
        **FAMILIES[family],
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not ...}


def tiny_weights(config: dict[str, Any], *, std: float = 0.2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights under their Hugging Face names. At std 0.2 every part of the model matters."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, family = config["hidden_size"], config["intermediate_size"], config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
        for name, size in sizes.items():
            weights[f"{layer}self_attn.{name}_proj.weight"] = draw(size, hidden)
            if family == "qwen2" or config.get("attention_bias"):
                weights[f"{layer}self_attn.{name}_proj.bias"] = draw(size)
        weights[f"{layer}self_attn.o_proj.weight"] = draw(hidden, heads * head_dim)
        if config.get("attention_bias"):
            weights[f"{layer}self_attn.o_proj.bias"] = draw(hidden)
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{layer}self_attn.{name}.weight"] = 1 + draw(head_dim)
        for name, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            weights[f"{layer}mlp.{name}_proj.weight"] = draw(*shape)
            if config.get("mlp_bias"):
                weights[f"{layer}mlp.{name}_proj.bias"] = draw(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = 1 + draw(hidden)
    weights["model.norm.weight"] = 1 + draw(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(config["vocab_size"], hidden)
    return weights


def tiny_tokenizer() -> Tokenizer:
    """One token a byte, and three special ones."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {char: len(vocab) + index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def make_tiny_model(
    folder: Path, family: str = "llama", *, shards: int = 1, std: float = 0.2, seed: int = 0, **overrides: Any
) -> Path:
    """Writes config, generation config, weights and tokenizer to ``folder``; ``overrides`` change config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": list(EOS_TOKEN_IDS)})
    _write_weights(folder, tiny_weights(config, std=std, seed=seed), shards)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": config["max_position_embeddings"],
        },
    )
    return folder


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2))


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(weights.items())[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
