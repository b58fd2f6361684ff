"""The several-GPU script on the CPU, over gloo: answers of split models, and a rank that dies under an offline LLM."""

import json
from pathlib import Path

import pytest

from loadtest.gpu import tensor_parallel
from tiny import make_tiny_model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "models" / "tiny", "qwen3", max_position_embeddings=1024, std=0.02)
    return tmp_path / "models"


def run(part: str, models: Path, tp: int) -> tuple[int, dict[str, object]]:
    file = models.parent / f"{part}.json"
    words = ["--models", str(models), "--model", "tiny", "--device", "cpu", "--tp", str(tp), "--json", str(file)]
    code = tensor_parallel.main([part, *words, "--limit-s", "100"])
    return code, json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("tp", [2, 4])
def test_split_models_answer_as_one_does_but_for_rounding(tp: int, models: Path) -> None:
    code, result = run("tokens", models, tp)
    assert code == 0, result
    way = result["ways"][f"TP {tp}"]  # type: ignore[index]  # it is JSON
    assert way["beyond"] == 0
    assert way["compared_tokens"] > 300, "bfloat16 and random weights differ early, but not at once"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_answer_that_rounding_does_not_explain_is_counted(models: Path) -> None:
    code, result = run("answers", models, 1)
    assert code == 0
    other = json.loads(json.dumps(result))
    other["answers"][3][5] = (other["answers"][3][5] + 1) % 259
    other["answers"][8][0] = (other["answers"][8][0] + 1) % 259
    weighed = tensor_parallel.weigh(models / "tiny", "cpu", {"TP 1": result, "changed": other, "same": result})
    changed = weighed["ways"]["changed"]
    assert (changed["differ"], changed["beyond"]) == (2, 2)
    assert weighed["ways"]["same"] == {"answers": 24, "compared_tokens": 24 * 64, "differ": 0, "beyond": 0, "gaps": []}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_llm_whose_rank_dies_says_so_and_ends(models: Path) -> None:
    code, result = run("death", models, 2)
    assert code == 0, result
    assert "the ranks lost each other" in str(result["error"]) or "engine rank 1 ended" in str(result["error"])
