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


@torch.inference_mode()
def reference_choices(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """What transformers chooses greedily after each prefix of prompt and answer. If that is the answer at every step,
    then it generates this answer, by induction: one forward instead of one a token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@pytest.mark.parametrize(
    ("count", "num_tokens"),
    [(4, 16), pytest.param(20, 64, marks=[pytest.mark.slow, pytest.mark.timeout(600)])],
)
def test_greedy_tokens_equal_transformers_batched_and_one_by_one(smollm2: Path, count: int, num_tokens: int) -> None:
    tokens = prompts(smollm2, count)
    model = load(smollm2)
    batched = Harness(model, num_sequences=count, max_tokens=192).generate(tokens, num_tokens)
    single = [Harness(model, num_sequences=1, max_tokens=192).generate([prompt], num_tokens)[0] for prompt in tokens]
    assert all(len(answer) == num_tokens for answer in batched)
    assert batched == reference_choices(smollm2, tokens, batched)
    assert single == batched
