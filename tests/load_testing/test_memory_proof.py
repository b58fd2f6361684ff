"""loadtest.gpu.memory on the CPU: what it asks of the engine, and that it sees memory run out."""

import json
from pathlib import Path

import pytest
import torch

from loadtest.gpu import memory
from mizzen.llm import LLM
from tiny import make_tiny_model

SMALL = ["--device", "cpu", "--rows", "4", "--fractions", "0.9", "--set", "max_batch_tokens=64", "--set", "threads=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3", max_position_embeddings=384)


def test_the_longest_prompt_and_all_rows_are_answered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    generate = LLM.generate

    def noted(llm: LLM, prompts: list[list[int]], *args: object, **options: object) -> object:
        asked.extend(map(len, prompts))
        return generate(llm, prompts, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LLM, "generate", noted)
    assert memory.main([str(model), *SMALL, "--json", str(tmp_path / "memory.json")]) == 0
    [run] = json.loads((tmp_path / "memory.json").read_text())["runs"]
    assert run["out_of_memory"] is None
    assert asked == [16, 16, 16, 384 - memory.ANSWER, 250, 250, 250, 250]


def test_running_out_of_memory_is_told_by_the_exit_status(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(llm: LLM, rows: int) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(memory, "fill", fail)
    assert memory.main([str(model), *SMALL, "--json", str(tmp_path / "memory.json")]) == 1
    [run] = json.loads((tmp_path / "memory.json").read_text())["runs"]
    assert run["out_of_memory"] == "CUDA out of memory. Tried to allocate"
