"""With MIZZEN_NVTX a profile names the loop's work, layers and kernels; without, nothing is wrapped."""

from pathlib import Path

import pytest
import torch

from engine.harness import EngineUnderTest
from mizzen.models.decoder import Decoder, DecoderLayer
from tiny import make_tiny_model

IN_THE_LOOP = {"schedule", "update", "prepare", "enqueue"}
IN_THE_MODEL = {
    "layer 0",
    "layer 1",
    "attention",
    "attention plan",
    "attention kernels",
    "mlp",
    "gemm",
    "head",
    "add_rms_norm",
    "qk_norm_rope_write_kv",
    "gated_linear",
    "sampler",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


def names_in_a_profile(engine: EngineUnderTest) -> dict[str, int]:
    """Calls by name, on all threads: the model runs on the CPU stream's."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config, acc_events=True
    ) as profile:
        engine.submit("a", [5] * 10, sampling={"max_tokens": 3, "ignore_eos": True})
        engine.run()
    return {event.key: event.count for event in profile.key_averages()}


def test_ranges_appear_when_asked_for(model: Path) -> None:
    engine = EngineUnderTest(model, nvtx=True, overlap_depth=0)
    try:
        calls = names_in_a_profile(engine)
    finally:
        engine.close()
    assert set(calls) >= IN_THE_LOOP | IN_THE_MODEL
    steps = calls["enqueue"]
    assert steps == calls["prepare"] == calls["update"] == calls["layer 1"] == calls["sampler"] == 3
    assert calls["attention kernels"] == calls["mlp"] == 2 * steps, "two layers"
    assert calls["gemm"] == 3 * 2 * steps, "QKV, output, down"
    assert calls["gated_linear"] == 2 * steps


def test_nothing_is_wrapped_when_off(model: Path) -> None:
    engine = EngineUnderTest(model, overlap_depth=0)
    try:
        calls = names_in_a_profile(engine)
        network = engine.rank.runner._executor._model  # type: ignore[attr-defined]
        assert isinstance(network, Decoder)
        assert all("forward" not in vars(module) for module in network.modules())
        assert any(isinstance(module, DecoderLayer) for module in network.modules())
        assert engine.loop._schedule == engine.scheduler.schedule, "the very method"
    finally:
        engine.close()
    assert not set(calls) & (IN_THE_LOOP | IN_THE_MODEL)
