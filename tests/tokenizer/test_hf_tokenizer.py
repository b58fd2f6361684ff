"""Loading a model folder's tokenizer, and encoding with its special tokens exactly once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizer_samples as samples

from mizzen.errors import ConfigError, InvalidRequest
from mizzen.tokenizer.hf import HFTokenizer


def test_a_text_survives_encode_and_decode(byte_level: HFTokenizer, byte_fallback: HFTokenizer) -> None:
    for text in samples.CORPUS:
        assert byte_level.decode(byte_level.encode(text)) == text
        assert byte_fallback.decode(byte_fallback.encode(text)) == text


def test_the_post_processor_decides_about_bos_where_the_config_is_silent(byte_fallback: HFTokenizer) -> None:
    plain = byte_fallback.encode("the cab", add_special_tokens=False)
    assert byte_fallback.encode("the cab") == [1, *plain]
    assert 1 not in plain


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_config_overrules_the_post_processor(tmp_path: Path, add_bos: bool, add_eos: bool) -> None:
    tokenizer = samples.load(
        tmp_path,
        samples.byte_fallback(),
        bos_token="<s>",
        eos_token={"content": "</s>", "lstrip": False},
        add_bos_token=add_bos,
        add_eos_token=add_eos,
    )
    plain = tokenizer.encode("abc", add_special_tokens=False)
    assert tokenizer.encode("abc") == [1] * add_bos + plain + [2] * add_eos


def test_special_tokens_may_come_from_their_own_file(tmp_path: Path) -> None:
    samples.write_folder(tmp_path, samples.byte_level())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    tokenizer = HFTokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 2)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    tokenizer = samples.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    loaded = samples.load(tmp_path, tokenizer)
    assert loaded.decode(loaded.encode("The quick brown fox jumps over the lazy dog")).endswith("lazy dog")
    assert len(loaded.encode("a")) == 1


def test_a_lone_surrogate_is_an_invalid_request(byte_level: HFTokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"lone surrogate \(U\+D800\) at position 1"):
        byte_level.encode("a\ud800b")


def test_decode_skips_special_tokens_only_if_asked(byte_level: HFTokenizer) -> None:
    ids = byte_level.encode("<|im_start|>hi<think><|im_end|>")
    assert byte_level.decode(ids) == "hi<think>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<think><|im_end|>"


def test_ids_beyond_the_vocabulary_have_no_text(byte_level: HFTokenizer) -> None:
    assert byte_level.decode([10**6, *byte_level.encode("hi"), 10**6]) == "hi"
    assert byte_level.token(10**6) == ("", b"")


def test_a_single_token_has_text_and_bytes(byte_level: HFTokenizer, byte_fallback: HFTokenizer) -> None:
    half = byte_level.encode("ह")[0]
    text, raw = byte_level.token(half)
    assert "ह".encode().startswith(raw)
    assert text == "�"
    assert byte_fallback.token(byte_fallback.encode("a the", add_special_tokens=False)[-1]) == (" the", b" the")
    assert byte_fallback.token(3 + 0xE6) == ("�", b"\xe6")


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"\xff\xfe", b'{"version": "1.0"}', b"[]"], ids=lambda content: repr(content)[:12]
)
def test_a_missing_or_corrupt_tokenizer_names_the_setting(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"MIZZEN_MODEL.*tokenizer") as caught:
        HFTokenizer.from_folder(tmp_path)
    assert caught.value.setting == "MIZZEN_MODEL"


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_corrupt_tokenizer_config_names_the_setting(tmp_path: Path, content: str) -> None:
    samples.write_folder(tmp_path, samples.byte_level())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"MIZZEN_MODEL.*tokenizer_config\.json"):
        HFTokenizer.from_folder(tmp_path)


def test_chat_templates_come_from_the_config_by_name_and_from_files(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = samples.write_folder(tmp_path, samples.byte_level(), chat_template=named)
    assert HFTokenizer.from_folder(folder).chat_templates == {"default": "D", "tool_use": "T"}
    (folder / "chat_template.jinja").write_text("F")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert HFTokenizer.from_folder(folder).chat_templates == {"default": "F", "tool_use": "T", "rag": "R"}


def test_the_tokenizer_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, mizzen.tokenizer.tokenize_worker, mizzen.tokenizer.detokenize_worker;"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
