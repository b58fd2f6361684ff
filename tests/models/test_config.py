"""config.json: every form that models are published with, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from mizzen.errors import ConfigError
from mizzen.models.config import ModelArchitecture, default_sampling, eos_token_ids, parse_architecture
from tiny import LLAMA3_ROPE, make_tiny_model, tiny_config


def parse(folder: Path, config: dict[str, Any]) -> ModelArchitecture:
    (folder / "config.json").write_text(json.dumps(config))
    return parse_architecture(folder)


def test_both_rope_forms_mean_the_same(tmp_path: Path) -> None:
    old = parse(tmp_path, tiny_config("llama", rope_theta=5e5, rope_scaling=LLAMA3_ROPE))
    new = tiny_config("llama", rope_parameters={**LLAMA3_ROPE, "rope_theta": 5e5})
    del new["rope_theta"], new["rope_scaling"]
    assert parse(tmp_path, new).rope == old.rope
    assert (old.rope.type, old.rope.theta, old.rope.factor) == ("llama3", 5e5, 8.0)


@pytest.mark.parametrize(
    ("family", "overrides", "context"),
    [
        ("llama", {}, 512),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 1024),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
            2048,
        ),
        (
            "qwen2",
            {
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
                "max_position_embeddings": 2048,
            },
            2048,
        ),
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": 1000}, 512),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": False}, 512),
        ("qwen2", {"sliding_window": 100, "use_sliding_window": True}, 100),
    ],
)
def test_the_context_is_what_the_model_is_right_for(
    family: str, overrides: dict[str, Any], context: int, tmp_path: Path
) -> None:
    assert parse(tmp_path, tiny_config(family, **overrides)).context_length == context


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
        ({"architectures": []}, "LlamaForCausalLM, MistralForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn"}, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(overrides: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse(tmp_path, tiny_config("llama", **overrides))
    assert caught.value.setting == "MIZZEN_MODEL"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"architectures": 3}'])
def test_a_missing_or_broken_config_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        parse_architecture(tmp_path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    config = tiny_config("llama")
    del config["num_hidden_layers"]
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        parse(tmp_path, config)


def test_ranks_that_do_not_share_the_model_evenly_are_refused(tmp_path: Path) -> None:
    arch = parse(tmp_path, tiny_config("llama", num_attention_heads=12, num_key_value_heads=2, head_dim=8))
    for size, heads in ((1, 2), (2, 1), (4, 1), (6, 1), (12, 1)):
        arch.check_tensor_parallel(size)
        assert arch.kv_heads_per_rank(size) == heads
    for size, numbers in ((5, "MIZZEN_TENSOR_PARALLEL_SIZE=5 .* 12 "), (3, "MIZZEN_TENSOR_PARALLEL_SIZE=3 .* 2 KV")):
        with pytest.raises(ConfigError, match=numbers):
            arch.check_tensor_parallel(size)
    odd = parse(tmp_path, tiny_config("llama", intermediate_size=97))
    with pytest.raises(ConfigError, match="97"):
        odd.check_tensor_parallel(2)


def test_all_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, eos_token_id=7)
    assert eos_token_ids(folder) == (0, 2, 7)
    (folder / "generation_config.json").unlink()
    assert eos_token_ids(folder) == (7,)


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "pad_token_id": 3}))
    assert default_sampling(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0}
    path.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}))
    assert default_sampling(tmp_path) == {"temperature": 0.0, "repetition_penalty": 1.1}


def test_a_default_that_no_request_may_have_is_left_out(tmp_path: Path) -> None:
    bad = {"temperature": 50.0, "top_p": 0, "top_k": "many", "repetition_penalty": 1.2}
    (tmp_path / "generation_config.json").write_text(json.dumps(bad))
    assert default_sampling(tmp_path) == {"repetition_penalty": 1.2}
