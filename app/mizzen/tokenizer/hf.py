"""A model folder's tokenizer, from tokenizer.json alone: neither transformers nor torch is needed at run time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from mizzen.errors import ConfigError, InvalidRequest
from mizzen.tokenizer.vocabulary import Vocabulary, build_vocabulary

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class _TokenizerJson(msgspec.Struct):
    """The one part of tokenizer.json that the `tokenizers` package does not tell."""

    decoder: dict[str, Any] | None = None


class HFTokenizer:
    """Encodes and decodes. Holds no state of any text: safe to share between threads.

    ``special_tokens``: "bos_token" -> "<s>" and so on, those that the model has. ``chat_templates``: by name.
    ``vocabulary``: the byte table, or None where tokens are not runs of bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: dict[str, Any] | None,
        *,
        special_tokens: dict[str, str],
        chat_templates: dict[str, str],
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special_tokens = special_tokens
        self.chat_templates = chat_templates
        added = tokenizer.get_added_tokens_decoder()
        tokens = {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}
        tokens |= {token: entry.content for token, entry in added.items()}
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.vocabulary: Vocabulary | None = build_vocabulary(tokens, added, decoder)
        raw = self.vocabulary.pieces(False).raw if self.vocabulary else [text.encode() for text in tokens.values()]
        self.longest_token_bytes = max(map(len, raw), default=1)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self._prefix, self._suffix = self._surrounding_ids(add_bos, add_eos)

    @classmethod
    def from_folder(cls, folder: Path) -> "HFTokenizer":
        """Raises ConfigError if the folder has no readable tokenizer.json."""
        path = folder / "tokenizer.json"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{folder} has no readable tokenizer.json: {error}", setting="MIZZEN_MODEL") from error
        try:
            tokenizer = Tokenizer.from_str(data.decode())
            decoder = msgspec.json.decode(data, type=_TokenizerJson).decoder
        except Exception as error:  # `tokenizers` raises plain Exception for a file it cannot read
            raise ConfigError(f"{path} is not a valid tokenizer: {error}", setting="MIZZEN_MODEL") from error
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
        if add_bos is not None or add_eos is not None:  # one of them given: the other is off, as in transformers
            add_bos, add_eos = bool(add_bos), bool(add_eos)
        return cls(
            tokenizer,
            decoder,
            special_tokens=special_tokens,
            chat_templates=_chat_templates(folder, config),
            add_bos=add_bos,
            add_eos=add_eos,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Releases the GIL. Raises InvalidRequest for text that is not Unicode (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}:"
                " it is not valid Unicode"
            ) from error
        # The batch call, because the single one holds the GIL, and the fast one, because offsets are not needed.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text, exactly as the incremental detokenizer would stream it."""
        if self.vocabulary is not None:
            return self.vocabulary.decode(list(token_ids), skip_special_tokens)
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> tuple[str, bytes]:
        """One token's text and bytes, for logprobs; the text of half a character is U+FFFD."""
        if self.vocabulary is None:
            text = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
            return text, text.encode()
        pieces = self.vocabulary.pieces(skip_special_tokens=False)
        if not 0 <= token_id < len(pieces.raw):
            return "", b""
        raw = pieces.raw[token_id]
        whole = pieces.text[token_id]
        return (whole if whole is not None else raw.decode("utf-8", "replace")), raw

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def _surrounding_ids(self, add_bos: bool | None, add_eos: bool | None) -> tuple[list[int], list[int]]:
        """What goes before and after a text: what tokenizer_config.json says or, if silent, the post-processor."""
        if add_bos is not None or add_eos is not None:
            bos = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
            eos = [self.eos_token_id] if add_eos and self.eos_token_id is not None else []
            return bos, eos
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(whole) - len(plain) + 1):
            end = start + len(plain)
            if whole[start:end] == plain:
                return whole[:start], whole[end:]
        return [], []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable: {error}", setting="MIZZEN_MODEL") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold an object", setting="MIZZEN_MODEL")
    return value


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken, spelled out
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files win over tokenizer_config.json, where a list names several templates."""
    value = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates |= {entry["name"]: entry["template"] for entry in value}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    return templates
