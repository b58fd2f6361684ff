"""Logits of tiny random models of every family against transformers', through pages."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mizzen.distributed.group import SingleGroup
from mizzen.models.config import ModelArchitecture, parse_architecture
from mizzen.models.decoder import Decoder
from mizzen.models.loader import load_model
from page_harness import Harness
from tiny import LLAMA3_ROPE, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-4
NUM_TOKENS = 100

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with llama3 rope": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "rope_scaling": None}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama with dynamic rope": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama with transformers 5 keys": ("llama", {
        # without the old keys: which of both transformers takes is not settled
        "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e4}, "rope_scaling": ..., "rope_theta": ...,
    }),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama without grouping": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {}),
    "mistral with a window": ("mistral", {"sliding_window": 128}),
    "mistral with wide heads": ("mistral", {"head_dim": 32}),
    "qwen2 tied": ("qwen2", {}),
    "qwen2 with yarn": ("qwen2", {"tie_word_embeddings": False, "rope_scaling": YARN}),
    "qwen2 with yarn untruncated": ("qwen2", {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 16.0}}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied with yarn": ("qwen3", {"tie_word_embeddings": True, "rope_scaling": YARN}),
}  # fmt: skip


def load(folder: Path, arch: ModelArchitecture | None = None) -> Decoder:
    model = load_model(
        arch or parse_architecture(folder),
        folder,
        load_format="auto",
        dtype="auto",
        device=torch.device("cpu"),
        group=SingleGroup(),
        progress=lambda fraction, detail: None,
    )
    assert isinstance(model, Decoder)
    return model


@torch.inference_mode()
def reference_logits(folder: Path, tokens: list[int]) -> Tensor:
    """transformers' logits [T, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def some_tokens(num: int = NUM_TOKENS, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(harness: Harness, tokens: list[int]) -> Tensor:
    return harness.step([(0, tokens)], every=True)


def chunked_then_decoded(harness: Harness, tokens: list[int]) -> Tensor:
    """Chunks that end within pages, then a token a step."""
    parts = [harness.step([(0, tokens[start:stop])], every=True) for start, stop in ((0, 37), (37, 38), (38, 90))]
    return torch.cat(parts + [harness.step([(0, [token])]) for token in tokens[90:]])


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    folder = make_tiny_model(tmp_path, family, **overrides)
    tokens = some_tokens()
    expected = reference_logits(folder, tokens)
    model = load(folder)
    assert expected.std() > 0.5
    for run in (whole, chunked_then_decoded):
        logits = run(Harness(model, num_sequences=1, max_tokens=128), tokens)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_a_batch_of_all_kinds_of_rows_equals_rows_alone(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path, "qwen3"))
    prompts = [some_tokens(num, seed) for seed, num in enumerate((5, 16, 17, 90, 33))]
    alone = [whole(Harness(model, num_sequences=1, max_tokens=128), prompt) for prompt in prompts]
    harness = Harness(model, num_sequences=5, max_tokens=128)
    for index in (0, 1, 2):
        harness.step([(index, prompts[index][:-1])])
    harness.step([(3, prompts[3][:40])])
    mixed = harness.step(
        [*((index, prompts[index][-1:]) for index in (2, 0, 1)), (3, prompts[3][40:]), (4, prompts[4])]
    )
    expected = torch.stack([alone[index][-1] for index in (2, 0, 1, 3, 4)])
    torch.testing.assert_close(mixed, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("page_size", [1, 5, 256])
def test_page_size_does_not_matter(page_size: int, tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path, "llama"))
    tokens = some_tokens()
    expected = whole(Harness(model, num_sequences=1, max_tokens=128), tokens)
    harness = Harness(model, num_sequences=1, max_tokens=256, page_size=page_size)
    torch.testing.assert_close(chunked_then_decoded(harness, tokens), expected, atol=TOLERANCE, rtol=0)


# The old name works in every transformers 5; the new one only in late ones.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_dynamic_rope_beyond_the_trained_context_equals_incremental_decoding(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path, "llama", max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 4.0}
    )
    tokens = some_tokens(60)
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        out = reference(torch.tensor([tokens[:32]]), use_cache=True)
        expected = [out.logits[0]]
        for token in tokens[32:]:
            out = reference(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            expected.append(out.logits[0])
    arch = parse_architecture(folder)
    assert arch.context_length == 128
    logits = whole(Harness(load(folder), num_sequences=1, max_tokens=128), tokens)
    torch.testing.assert_close(logits, torch.cat(expected), atol=TOLERANCE, rtol=0)


def rope_perturbed(arch: ModelArchitecture) -> ModelArchitecture:
    return dataclasses.replace(arch, rope=dataclasses.replace(arch.rope, theta=arch.rope.theta * 1.1))


def rope_missing_scaling(arch: ModelArchitecture) -> ModelArchitecture:
    return dataclasses.replace(arch, rope=dataclasses.replace(arch.rope, type="default"))


def eps_perturbed(arch: ModelArchitecture) -> ModelArchitecture:
    return dataclasses.replace(arch, rms_norm_eps=arch.rms_norm_eps * 10)


@pytest.mark.parametrize("perturb", [rope_perturbed, rope_missing_scaling, eps_perturbed])
def test_the_tolerance_would_show_a_wrong_model(perturb: Any, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    tokens = some_tokens()
    model = load(folder, perturb(parse_architecture(folder)))
    logits = whole(Harness(model, num_sequences=1, max_tokens=128), tokens)
    assert (logits - reference_logits(folder, tokens)).abs().max() > 2 * TOLERANCE


def test_the_tolerance_would_show_a_wrong_scale(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    tokens = some_tokens()
    harness = Harness(load(folder), num_sequences=1, max_tokens=128)
    harness.attention._scale *= 1.01
    difference = whole(harness, tokens) - reference_logits(folder, tokens)
    assert difference.abs().max() > 2 * TOLERANCE
