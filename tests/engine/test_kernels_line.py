"""The start log's line on kernels: which run as their torch twins and why, and how many had to be compiled."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.harness import EngineUnderTest, engine_config
from mizzen.engine.build import log_kernels
from tiny import make_tiny_model


def kernels_line(logs: list[Any]) -> dict[str, Any]:
    (line,) = (line for line in logs if line["event"] == "kernels")
    return {key: value for key, value in line.items() if key not in ("event", "log_level")}


def test_a_start_on_the_cpu_says_that_all_kernels_are_torchs(tmp_path: Path) -> None:
    with capture_logs() as logs:
        EngineUnderTest(make_tiny_model(tmp_path / "tiny", "qwen3")).rank.runner.close()
    assert kernels_line(logs) == {"torch_twins": {"all": "no GPU"}}


@pytest.mark.parametrize(
    ("settings", "twins"),
    [
        ({}, {}),
        ({"kernels_off": ("silu_mul",)}, {"silu_mul": "MIZZEN_KERNELS_OFF"}),
        ({"graph_rows": 0}, {"sampler": "MIZZEN_CUDA_GRAPH_ROWS is 0"}),
    ],
)
def test_a_start_on_a_gpu_counts_what_was_compiled_and_names_each_twin(
    settings: dict[str, Any], twins: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = SimpleNamespace(compiled=["_norm_kernel", "_norm_kernel"])  # Triton itself is not here
    monkeypatch.setitem(sys.modules, "mizzen.kernels.triton.launch", launch)
    on_gpu = {"device": "cuda", "graph_rows": None}
    config = msgspec.structs.replace(engine_config(tmp_path), **{**on_gpu, **settings})
    with capture_logs() as logs:
        log_kernels(config)
    assert kernels_line(logs) == {"torch_twins": twins, "compiled": 2}
