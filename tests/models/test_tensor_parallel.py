"""Several ranks over gloo, each a process with one thread, equal one rank."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny import make_tiny_model

RANK_SCRIPT = Path(__file__).parent / "tensor_parallel_rank.py"


def run_ranks(size: int, model: Path, scratch: Path, timeout_s: float) -> list[torch.Tensor]:
    """Each rank's logits for the same steps."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_SCRIPT), str(rank), str(size), str(model), str(scratch)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=timeout_s)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(scratch / f"logits-{size}-{rank}.pt") for rank in range(size)]


def assert_ranks_equal_one(size: int, model: Path, scratch: Path, timeout_s: float = 60) -> None:
    (expected,) = run_ranks(1, model, scratch, timeout_s)
    every = run_ranks(size, model, scratch, timeout_s)
    for logits in every:
        assert torch.equal(logits, every[0])  # ranks that differ would choose different tokens
    scale = float(expected.std())
    torch.testing.assert_close(every[0], expected, atol=1e-4 * max(1.0, scale), rtol=1e-4)
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
    assert_ranks_equal_one(2, model, tmp_path)


def test_three_ranks_equal_one_on_smollm2(smollm2: Path, tmp_path: Path) -> None:
    assert_ranks_equal_one(3, smollm2, tmp_path, timeout_s=100)


def test_a_rank_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    alone = subprocess.run(
        [sys.executable, str(RANK_SCRIPT), "0", "2", str(model), str(tmp_path), "1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert alone.returncode == 1
    assert "imed out" in alone.stderr or "imeout" in alone.stderr
