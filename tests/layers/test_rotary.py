"""The rotary table against transformers' own frequencies, at every position."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mizzen.layers.rotary import rotary_table
from mizzen.models.config import parse_architecture
from tiny import LLAMA3_ROPE, make_tiny_model

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 8.0},
        YARN,
        {**YARN, "beta_fast": 4.0, "beta_slow": 2.0},
        {**YARN, "truncate": False},
        {**YARN, "attention_factor": 0.7},
        {**YARN, "mscale": 0.8, "mscale_all_dim": 1.3},
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_the_table_equals_transformers(rope: dict[str, Any], head_dim: int, tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = make_tiny_model(
        tmp_path, "llama", rope_scaling=rope, head_dim=head_dim, rope_theta=1e6, max_position_embeddings=512
    )
    positions = torch.arange(512)
    cos, sin = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))(torch.zeros(1), positions[None])
    table = rotary_table(parse_architecture(folder).rope, head_dim, 512, torch.device("cpu"))
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=2e-5, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=2e-5, rtol=0)


def test_a_position_has_one_angle_whatever_the_context(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=64)
    rope = parse_architecture(folder).rope
    short, long = (rotary_table(rope, 16, num, torch.device("cpu")) for num in (100, 256))
    torch.testing.assert_close(short, long[:100], atol=1e-5, rtol=0)  # vectors of other lengths round otherwise
