"""Several ranks over gloo, each a process with one thread, equal one rank."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from models.tensor_parallel_rank import STEPS
from tiny import make_tiny_model

RANK_SCRIPT = Path(__file__).parent / "tensor_parallel_rank.py"


def rank_command(rank: int, size: int, model: Path, scratch: Path, dtype: str, timeout_s: float) -> list[str]:
    return [sys.executable, str(RANK_SCRIPT), *map(str, (rank, size, model, scratch, dtype, timeout_s))]


def run_ranks(size: int, model: Path, scratch: Path, dtype: str) -> list[dict[str, Any]]:
    """What each rank got for the same steps."""
    ranks = [
        subprocess.Popen(rank_command(rank, size, model, scratch, dtype, 60), stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=110)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(scratch / f"rank-{size}-{rank}.pt") for rank in range(size)]


def assert_ranks_equal_one(size: int, model: Path, scratch: Path, *, dtype: str, atol: float) -> None:
    (expected,) = run_ranks(1, model, scratch, dtype)
    every = run_ranks(size, model, scratch, dtype)
    logits = every[0]["logits"]
    for rank in every:
        assert torch.equal(rank["logits"], logits)  # ranks that differ would choose different tokens
        assert rank["steps"] == every[0]["steps"]
    torch.testing.assert_close(logits, expected["logits"], atol=atol, rtol=0)
    assert torch.equal(logits.argmax(-1), expected["logits"].argmax(-1))
    assert_same_samples(every[0]["steps"], expected["steps"])
    assert expected["gathered"] == []
    for rank in every:
        # 2 rows a step: each exchanges a largest logit and its token, a share of the mass, and a token
        assert rank["gathered"] == [2 * 16, 2 * 8, 2 * 8] * STEPS


def assert_same_samples(steps: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Of every kind of row. The most likely tokens may change places where they are equally likely."""
    assert len(expected) == STEPS
    for step, reference in zip(steps, expected, strict=True):
        assert step["token_ids"] == reference["token_ids"]
        assert step["logprob_rows"] == reference["logprob_rows"]
        for name in ("chosen_logprobs", "top_logprobs"):
            torch.testing.assert_close(torch.tensor(step[name]), torch.tensor(reference[name]), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {}),
        ("qwen2", {}),  # tied: the padded vocabulary is split for both uses
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),  # one KV head on two ranks
    ],
)
def test_two_ranks_equal_one(family: str, overrides: dict[str, int], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", family, **overrides)
    assert_ranks_equal_one(2, model, tmp_path, dtype="float32", atol=1e-4)


def test_three_ranks_equal_one_on_smollm2(smollm2: Path, tmp_path: Path) -> None:
    # Logits reach 40 here, and float32 sums in another order differ by 3e-3: float64 tells noise from mistakes.
    assert_ranks_equal_one(3, smollm2, tmp_path, dtype="float64", atol=1e-5)


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    alone = subprocess.run(
        rank_command(0, 2, model, tmp_path, "float32", timeout_s=1),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert alone.returncode == 1
    assert "imed out" in alone.stderr or "imeout" in alone.stderr
