"""Deltas add up to ``decode(all ids)``, at a constant cost a token: what is held back is at most half a character.

A stream has no U+FFFD unless the whole text has one there, because its bytes are not UTF-8.
"""

import codecs
from typing import Protocol

from mizzen.tokenizer.hf import HFTokenizer
from mizzen.tokenizer.vocabulary import REPLACEMENT, Vocabulary, strip_left


class IncrementalDetokenizer(Protocol):
    """One sequence's decoder."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, often all of its own."""

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""


def incremental_detokenizer(tokenizer: HFTokenizer, skip_special_tokens: bool) -> IncrementalDetokenizer:
    if tokenizer.vocabulary is not None:
        return ByteDetokenizer(tokenizer.vocabulary, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens)


class ByteDetokenizer:
    """For tokens that are runs of bytes. The common token, whole characters with nothing pending, is one look-up."""

    __slots__ = ("_pending", "_raw", "_strip", "_text")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._raw, self._text = vocabulary.pieces(skip_special_tokens)
        self._pending = b""  # the beginning of a character
        self._strip = vocabulary.strip_left  # leading spaces still to be dropped

    def push(self, token_id: int) -> str:
        if token_id >= len(self._raw):  # a padding row of the embedding
            return ""
        text = None if self._pending else self._text[token_id]
        if text is None:
            data = self._pending + self._raw[token_id]
            text, consumed = codecs.utf_8_decode(data, "replace", False)
            self._pending = data[consumed:]
        if self._strip and text:
            text, self._strip = strip_left(text, self._strip)
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class WindowDetokenizer:
    """For any other decoder: decodes a window of the last tokens twice, with and without the new ones.

    The window is needed because such decoders place spaces by a token's neighbours.
    """

    def __init__(self, tokenizer: HFTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._read: list[int] = []  # the last tokens whose text was given out
        self._new: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._new.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):  # perhaps half a character
            return ""
        self._read, self._new = self._new, []
        return text

    def flush(self) -> str:
        text = self._new_text() if self._new else ""
        self._read, self._new = self._read + self._new, []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._read, skip_special_tokens=False)
        return self._tokenizer.decode(self._read + self._new, skip_special_tokens=False)[len(before) :]
