"""Weights: what is loaded, and what is wrong with a checkpoint said in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mizzen.distributed.group import ProcessGroup, SingleGroup
from mizzen.errors import ConfigError
from mizzen.models.config import parse_architecture
from mizzen.models.decoder import Decoder
from mizzen.models.loader import Model, load_model, resolve_dtype
from mizzen.models.null import NullModel
from page_harness import Harness
from tiny import make_tiny_model

CPU = torch.device("cpu")


class FakeGroup(SingleGroup):
    """A rank of a group that never talks: enough to load its slices."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def load(folder: Path, *, load_format: str = "auto", dtype: str = "auto", group: ProcessGroup | None = None) -> Model:
    return load_model(
        parse_architecture(folder),
        folder,
        load_format=load_format,
        dtype=dtype,
        device=CPU,
        group=group or SingleGroup(),
        progress=lambda fraction, detail: None,
    )


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")


def test_shards_hold_the_same_model(tmp_path: Path) -> None:
    one = load(make_tiny_model(tmp_path / "one", "qwen2"))
    three = load(make_tiny_model(tmp_path / "three", "qwen2", shards=3))
    for (name, left), (_, right) in zip(one.named_parameters(), three.named_parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.layers.2.mlp.up_proj.weight", torch.zeros(1), r"model\.layers\.2\.mlp\.up_proj\.weight"),
        ("model.norm.weight", torch.zeros(63), r"model\.norm\.weight has shape \[63\] instead of \[64\]"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(64), "LlamaForCausalLM does not"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path)
    edit(folder, **{name: tensor})
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder)
    assert caught.value.setting == "MIZZEN_MODEL"
    assert "\n" not in str(caught.value)


def test_what_checkpoints_hold_twice_is_ignored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    edit(
        folder,
        **{
            "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        },
    )
    load(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 20000])
def test_a_file_cut_short_is_refused(keep: int, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors' is not a readable"):
        load(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ConfigError, match="weight_map"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="neither"):
        load(folder)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="which the index says it holds"):
        load(folder)


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_do_not_depend_on_the_number_of_ranks(size: int, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", tie_word_embeddings=False)
    (folder / "model.safetensors").unlink()
    single = load(folder, load_format="dummy")
    ranks = [load(folder, load_format="dummy", group=FakeGroup(rank, size)) for rank in range(size)]
    assert isinstance(single, Decoder)
    head = torch.cat([rank.head.weight for rank in ranks if isinstance(rank, Decoder)])
    assert torch.equal(head[: single.vocab_size], single.head.weight)
    assert not head[single.vocab_size :].any()
    down = [rank.layers[1].mlp.down.weight for rank in ranks if isinstance(rank, Decoder)]  # type: ignore[union-attr]
    assert torch.equal(torch.cat(down, 1), single.layers[1].mlp.down.weight)  # type: ignore[union-attr]


def test_dummy_activations_stay_small(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path, "llama", num_hidden_layers=40), load_format="dummy", dtype="float16")
    assert isinstance(model, Decoder)
    logits = Harness(model, num_sequences=1, max_tokens=64).step([(0, list(range(64)))], every=True)
    assert logits.dtype == torch.float16
    assert logits.isfinite().all()
    assert 0.1 < logits.float().std() < 10


def test_the_null_model_has_no_weights_and_no_cache_to_speak_of(tmp_path: Path) -> None:
    model = load(make_tiny_model(tmp_path), load_format="null")
    assert isinstance(model, NullModel)
    assert model.is_null
    assert not list(model.parameters())
    assert model.logits(torch.zeros(3, 1)).shape == (3, model.vocab_size)


def test_progress_ends_at_one_and_names_tensors(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    seen: list[tuple[float, str]] = []
    load_model(
        parse_architecture(folder),
        folder,
        load_format="auto",
        dtype="auto",
        device=CPU,
        group=SingleGroup(),
        progress=lambda fraction, detail: seen.append((fraction, detail)),
    )
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert any("layers.1.mlp" in detail for _, detail in seen)


def test_auto_dtype_is_float32_on_the_cpu_only(tmp_path: Path) -> None:
    arch = parse_architecture(make_tiny_model(tmp_path, torch_dtype="bfloat16"))
    assert resolve_dtype("auto", arch, CPU) == torch.float32
    assert resolve_dtype("auto", arch, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", arch, CPU) == torch.float16
