"""The counting rule of loadtest.gpu.truth, and the whole script on the CPU."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtest.gpu import truth
from tiny import make_tiny_model

CPU = torch.device("cpu")
LOGITS = torch.tensor([3.0, 2.5, 1.0, 2.9])


def exact(ids: torch.Tensor, logits_to_keep: int) -> Any:
    """A model that holds the same of the next token, whatever came before."""
    assert logits_to_keep == 1
    return SimpleNamespace(logits=LOGITS[None, None])


@pytest.mark.parametrize(
    ("other", "differ", "beyond", "largest"),
    [
        ([0, 1, 0], 0, 0, 0.0),
        ([0, 3, 2], 1, 0, 0.5),  # 1 and 3: the worse is 0.5 below the best; what comes after does not count
        ([0, 2, 0], 1, 1, 2.0),
    ],
)
def test_a_difference_counts_by_the_worse_of_two_tokens(
    other: list[int], differ: int, beyond: int, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"another": {"page_size": 1}}
    answers = {"plain": [[0, 1, 0]], "another": [other]}

    def answer(folder: Path, device: torch.device, settings: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
        return [[5, 6]], answers["another" if settings == ways["another"] else "plain"]

    monkeypatch.setattr(truth, "answers", answer)
    result = truth.compare_ways(Path("folder"), exact, ways, CPU, error=0.6)
    assert result["another"] == {
        "answers": 1,
        "differ": differ,
        "beyond": beyond,
        "largest_gap": pytest.approx(largest),
    }


@pytest.mark.slow
def test_the_script_holds_on_a_tiny_model_cut_to_one_layer(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", "qwen3", max_position_embeddings=4096)
    out = tmp_path / "truth.json"
    assert truth.main([f"{model}:1", "--device", "cpu", "--json", str(out)]) == 0
    [result] = json.loads(out.read_text())["models"]
    assert result["layers"] == 1
    assert set(result["logits"]) == {"whole", "chunks of 100", "decode"}
    assert set(result["tokens"]) == set(truth.WAYS)
    assert result["tokens"]["the same again"]["differ"] == 0
