"""Several ranks over gloo, each a process with one thread, equal one rank."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny import make_tiny_model

RANK_SCRIPT = Path(__file__).parent / "tensor_parallel_rank.py"


def rank_command(rank: int, size: int, model: Path, scratch: Path, dtype: str, timeout_s: float) -> list[str]:
    return [sys.executable, str(RANK_SCRIPT), *map(str, (rank, size, model, scratch, dtype, timeout_s))]


def run_ranks(size: int, model: Path, scratch: Path, dtype: str) -> list[torch.Tensor]:
    """Each rank's logits for the same steps."""
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
    return [torch.load(scratch / f"logits-{size}-{rank}.pt") for rank in range(size)]


def assert_ranks_equal_one(size: int, model: Path, scratch: Path, *, dtype: str, atol: float) -> None:
    (expected,) = run_ranks(1, model, scratch, dtype)
    every = run_ranks(size, model, scratch, dtype)
    for logits in every:
        assert torch.equal(logits, every[0])  # ranks that differ would choose different tokens
    torch.testing.assert_close(every[0], expected, atol=atol, rtol=0)
    assert torch.equal(every[0].argmax(-1), expected.argmax(-1))


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
