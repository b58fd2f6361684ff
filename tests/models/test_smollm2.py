"""SmolLM2's real weights: greedy tokens equal transformers', and three ranks equal one."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from mizzen.distributed.group import SingleGroup
from mizzen.models.config import parse_architecture
from mizzen.models.decoder import Decoder
from mizzen.models.loader import load_model
from page_harness import Harness

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "def fibonacci(n):",
    "List three prime numbers above 100.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet, and when?",
    "What is 17 * 23?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarize the plot of Cinderella in two sentences.",
    "What does HTTP status 404 mean?",
    "Name the planets of the solar system in order.",
    "Write an SQL query that counts users by country.",
    "What is the difference between a list and a tuple?",
    "Tell me a joke about computers.",
    "How do vaccines work?",
    "Compose a polite email that declines an invitation.",
    "Ünïcödé 日本語 🎉: what languages are these?",
    "1, 1, 2, 3, 5, 8,",
]


def load(folder: Path) -> Decoder:
    model = load_model(
        parse_architecture(folder),
        folder,
        load_format="auto",
        dtype="float32",
        device=torch.device("cpu"),
        group=SingleGroup(),
        progress=lambda fraction, detail: None,
    )
    assert isinstance(model, Decoder)
    return model


def prompts(folder: Path, count: int) -> list[list[int]]:
    """Every other one as a chat, so that lengths and special tokens vary."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" if index % 2 == 0 else text
        for index, text in enumerate(QUESTIONS[:count])
    ]
    return [tokenizer.encode(text).ids for text in texts]


def reference_tokens(folder: Path, tokens: list[list[int]], num_tokens: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # else it fills what the call's own config leaves open
    config = GenerationConfig(do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    out = []
    for prompt in tokens:
        ids = torch.tensor([prompt])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        out.append(generated[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize(
    ("count", "num_tokens"),
    [(4, 16), pytest.param(20, 64, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_greedy_tokens_equal_transformers_batched_and_one_by_one(smollm2: Path, count: int, num_tokens: int) -> None:
    tokens = prompts(smollm2, count)
    model = load(smollm2)
    batched = Harness(model, num_sequences=count, max_tokens=192).generate(tokens, num_tokens)
    single = [Harness(model, num_sequences=1, max_tokens=192).generate([prompt], num_tokens)[0] for prompt in tokens]
    expected = reference_tokens(smollm2, tokens, num_tokens)
    assert all(len(answer) == num_tokens for answer in expected)
    assert batched == expected
    assert single == expected
