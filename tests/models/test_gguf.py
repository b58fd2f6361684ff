"""GGUF files: the same model as the folder that they convert to, on any number of ranks; and the same tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import USER_DEFINED, write_gguf
from safetensors.torch import load_file
from test_golden import reference_logits, some_tokens, whole
from test_loader import CPU, FakeGroup
from tokenizers import Tokenizer

from mizzen.distributed.group import ProcessGroup, SingleGroup
from mizzen.errors import ConfigError
from mizzen.models.config import eos_token_ids, parse_architecture, read_json
from mizzen.models.decoder import Decoder
from mizzen.models.gguf_folder import convert_gguf, gguf_folder
from mizzen.models.loader import load_model
from page_harness import Harness
from tiny import tiny_weights


def quiet(fraction: float, detail: str) -> None:
    pass


def load(folder: Path, weights: Path, group: ProcessGroup | None = None) -> Decoder:
    model = load_model(
        parse_architecture(folder),
        weights,
        load_format="auto",
        dtype="float32",
        device=CPU,
        group=group or SingleGroup(),
        progress=quiet,
    )
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "F16", "BF16", "F32"])
def test_a_file_equals_its_converted_folder(family: str, quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, family, quantization=quantization)
    prepared = gguf_folder(path, tmp_path / "cache", quiet)
    convert_gguf(path, tmp_path / "converted", quiet)
    assert parse_architecture(prepared).rope == parse_architecture(tmp_path / "converted").rope
    direct, converted = load(prepared, path), load(tmp_path / "converted", tmp_path / "converted")
    for (name, left), (_, right) in zip(direct.named_parameters(), converted.named_parameters(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_lossless_file_gives_the_published_weights_and_logits(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    config = write_gguf(path, family, quantization="F32", attention_bias=family == "llama")
    convert_gguf(path, tmp_path / "converted", quiet)
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    published = tiny_weights(config)
    assert converted.keys() == published.keys()
    for name, tensor in published.items():
        assert torch.equal(converted[name], tensor), name
    tokens = some_tokens()
    logits = whole(Harness(load(tmp_path / "converted", path), num_sequences=1, max_tokens=128), tokens)
    expected = reference_logits(tmp_path / "converted", tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantization", ["Q8_0", "F16"])
def test_ranks_read_their_slices(quantization: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # 96 / 4 inputs a rank: slices that begin and end within quantization blocks of 32
    write_gguf(path, "llama", quantization=quantization)
    folder = gguf_folder(path, tmp_path / "cache", quiet)
    one = load(folder, path).layers[1]
    ranks = [load(folder, path, FakeGroup(rank, 4)).layers[1] for rank in range(4)]
    down = torch.cat([rank.mlp.down.weight for rank in ranks], 1)  # type: ignore[union-attr]
    assert torch.equal(down, one.mlp.down.weight)  # type: ignore[union-attr]
    queries = torch.cat([rank.attention.qkv.weight[:16] for rank in ranks])  # type: ignore[index,union-attr]
    assert torch.equal(queries, one.attention.qkv.weight[:64])  # type: ignore[index,union-attr]
    keys = [rank.attention.qkv.weight[16:32] for rank in ranks]  # type: ignore[index,union-attr]
    assert torch.equal(keys[0], keys[1])  # ranks 0 and 1 share KV head 0
    assert torch.equal(torch.cat(keys[::2]), one.attention.qkv.weight[64:96])  # type: ignore[index,union-attr]


def test_the_folder_is_made_once_and_anew_when_the_file_changes(tmp_path: Path) -> None:
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    write_gguf(path)
    folder = gguf_folder(path, cache, quiet)
    assert not list(folder.glob("*.safetensors"))
    assert eos_token_ids(folder) == (0, 2)
    assert parse_architecture(folder).rms_norm_eps == 1e-5
    stamp = folder.stat().st_mtime_ns
    assert gguf_folder(path, cache, quiet) == folder
    assert folder.stat().st_mtime_ns == stamp
    write_gguf(path, max_position_embeddings=64)
    assert parse_architecture(gguf_folder(path, cache, quiet)).context_length == 64


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, pre="poro-chat")
    for make in (
        lambda: gguf_folder(path, tmp_path / "cache", quiet),
        lambda: convert_gguf(path, tmp_path / "out" / "converted", quiet),
    ):
        with pytest.raises(ConfigError, match="poro-chat"):
            make()
    assert not [file for file in (tmp_path / "cache" / "gguf").iterdir() if file.suffix != ".lock"]
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "converted").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "converted", quiet)


TEXTS = [
    "the 12  12",
    " the   the\n\n  9 lives",
    "<|im_start|>user\nhé 日本 🎉<|im_end|>",
    f"a{USER_DEFINED}b",
    "  ",
    "",
]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_every_text_comes_back(pre: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", pre=pre)
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", quiet)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert USER_DEFINED in tokenizer.encode(f"x{USER_DEFINED}").tokens
    assert read_json(folder / "tokenizer_config.json")["chat_template"] == "{{ messages }}"


def test_smollm_splits_digits_before_anything_else(tmp_path: Path) -> None:
    write_gguf(tmp_path / "smollm.gguf", pre="smollm")
    write_gguf(tmp_path / "gpt2.gguf", pre="gpt-2")
    smollm, gpt2 = (
        Tokenizer.from_file(str(gguf_folder(tmp_path / name, tmp_path, quiet) / "tokenizer.json"))
        for name in ("smollm.gguf", "gpt2.gguf")
    )
    assert smollm.encode("the  12").tokens == ["the", "ĠĠ", "1", "2"]
    assert gpt2.encode("the  12").tokens == ["the", "Ġ", "Ġ1", "2"]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_encoding_equals_transformers_own_conversion(pre: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "model.gguf", pre=pre)
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", quiet)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert tokenizer.encode(text).ids == reference.encode(text), text


def llama3_factors(factor: float, head_dim: int = 16, theta: float = 10000.0) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter writes for Llama 3.1: by wavelength, over an 8192 context."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    out = np.ones(head_dim // 2)
    for index, wavelength in enumerate(wavelengths):
        if wavelength > 8192 / 1.0:
            out[index] = factor
        elif wavelength >= 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            out[index] = 1 / ((1 - smooth) / factor + smooth)
    return out


def test_llama3_rope_is_recognized_from_its_factors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, rope_factors=llama3_factors(32.0, theta=500000.0), rope_theta=500000.0)
    folder = gguf_folder(path, tmp_path / "cache", quiet)
    rope = parse_architecture(folder).rope
    assert (rope.type, rope.factor, rope.original_max_positions) == ("llama3", 32.0, 8192)
    load(folder, path)
    write_gguf(path, rope_factors=llama3_factors(32.0, theta=10000.0) + np.linspace(0, 1, 8))
    with pytest.raises(ConfigError, match="llama3's rule"):
        gguf_folder(path, tmp_path / "cache", quiet)


def test_yarn_is_read_from_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    yarn = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
    }
    write_gguf(path, "qwen2", metadata=yarn)
    arch = parse_architecture(gguf_folder(path, tmp_path / "cache", quiet))
    assert (arch.rope.type, arch.rope.factor, arch.rope.original_max_positions) == ("yarn", 4.0, 128)


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("gemma", {}, "'gemma' is not supported"),
        ("llama", {"llama.expert_count": 8}, "experts"),
        ("llama", {"llama.rope.dimension_count": 8}, "8 of 16 dimensions"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_files_that_are_not_supported_are_refused(
    architecture: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", architecture=architecture, metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", quiet)


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.999])
def test_a_file_cut_short_is_refused_in_one_line(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ConfigError, match=r"model\.gguf") as caught:
        gguf_folder(path, tmp_path / "cache", quiet)
    assert caught.value.setting == "MIZZEN_MODEL"
    assert "\n" not in str(caught.value)
