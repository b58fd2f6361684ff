"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json.

Byte-level BPE is built here, since how text is split before merging is known by name only: a name that is not in the
table is refused, because a wrong split makes a model quietly worse. SentencePiece vocabularies go through transformers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mizzen.errors import ConfigError
from mizzen.models.gguf_source import metadata

_CONTROL, _USER_DEFINED = 3, 4  # token types
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> pre_tokenizers.PreTokenizer:
    """A digit is a word of its own, whatever stands before it."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits,
    "llama3": lambda: _split(_LLAMA3_SPLIT),
    "llama-v3": lambda: _split(_LLAMA3_SPLIT),
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": lambda: _split(_QWEN2_SPLIT),
}


def write_tokenizer(reader: Any, gguf_path: Path, folder: Path) -> dict[str, Any]:
    """Writes ``folder``/tokenizer.json and returns what belongs in tokenizer_config.json."""
    kind = metadata(reader, "tokenizer.ggml.model")
    if kind == "gpt2":
        _byte_level_tokenizer(reader).save(str(folder / "tokenizer.json"))
    elif kind == "llama":
        _sentencepiece_tokenizer(gguf_path).save(str(folder / "tokenizer.json"))
    else:
        raise ConfigError(f"GGUF tokenizer {kind!r} is not supported, only gpt2 and llama", setting="MIZZEN_MODEL")
    return _tokenizer_config(reader, kind)


def _tokenizer_config(reader: Any, kind: str) -> dict[str, Any]:
    tokens: list[str] = metadata(reader, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": metadata(reader, "tokenizer.ggml.add_bos_token", kind == "llama"),
    }
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = metadata(reader, f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    template = metadata(reader, "tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def _byte_level_tokenizer(reader: Any) -> Tokenizer:
    pre = metadata(reader, "tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"GGUF pre-tokenizer {pre!r} is not supported, only {', '.join(sorted(_PRE_TOKENIZERS))}:"
            " use the model's own folder",
            setting="MIZZEN_MODEL",
        )
    tokens: list[str] = metadata(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata(reader, "tokenizer.ggml.merges")]
    llama3 = pre.startswith("llama")
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=llama3)
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = metadata(reader, "tokenizer.ggml.token_type", [])
    pairs = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in pairs if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in pairs if k == _USER_DEFINED])
    if metadata(reader, "tokenizer.ggml.add_bos_token", llama3):
        bos_id = metadata(reader, "tokenizer.ggml.bos_token_id")
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _sentencepiece_tokenizer(gguf_path: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # loads torch: only where it is needed

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    backend = tokenizer.backend_tokenizer
    assert isinstance(backend, Tokenizer)
    return backend
