"""A token is a run of bytes, and text is the UTF-8 reading of those bytes put together: that is all of decoding.

This holds for the two families that causal models use, byte-level BPE and SentencePiece with byte fallback, and is what
makes incremental decoding exact and cheap. Other decoders (WordPiece, no decoder at all) have no byte table.
"""

from typing import Any, NamedTuple

from tokenizers import AddedToken

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Pieces(NamedTuple):
    """By token id: its bytes, and its text if those bytes are whole characters (else None)."""

    raw: list[bytes]
    text: list[str | None]


class Vocabulary:
    """The bytes of each token. ``strip_left``: so many leading spaces of a whole text are dropped."""

    def __init__(self, raw: list[bytes], special_ids: frozenset[int], strip_left: int) -> None:
        self.strip_left = strip_left
        text = [_whole_text(piece) for piece in raw]
        self._all = Pieces(raw, text)
        self._without_special = Pieces(
            [b"" if token in special_ids else piece for token, piece in enumerate(raw)],
            ["" if token in special_ids else piece for token, piece in enumerate(text)],
        )

    def pieces(self, skip_special_tokens: bool) -> Pieces:
        return self._without_special if skip_special_tokens else self._all

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Text of a whole sequence; ids beyond the vocabulary (padding rows of the embedding) have no text."""
        raw = self.pieces(skip_special_tokens).raw
        known = len(raw)
        text = b"".join([raw[token] for token in token_ids if token < known]).decode("utf-8", "replace")
        return strip_left(text, self.strip_left)[0]


def strip_left(text: str, limit: int) -> tuple[str, int]:
    """Drops up to ``limit`` leading spaces; returns the rest and how many may still be dropped from what follows it."""
    start = 0
    while start < limit and start < len(text) and text[start] == " ":
        start += 1
    return text[start:], (limit - start if start == len(text) else 0)


def build_vocabulary(tokens: dict[int, str], added: dict[int, AddedToken], decoder: Any) -> Vocabulary | None:
    """``decoder``: that part of tokenizer.json. None if it is not of a family whose tokens are runs of bytes."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    special_ids = frozenset(token for token, entry in added.items() if entry.special)
    if len(steps) == 1 and steps[0] and steps[0]["type"] == "ByteLevel":
        raw = {token: _byte_level(text) for token, text in tokens.items()}
        return Vocabulary(_table(raw), special_ids, strip_left=0)
    fallback = _parse_byte_fallback(steps)
    if fallback is None:
        return None
    replacements, strip = fallback
    raw = {token: _byte_fallback(text, replacements) for token, text in tokens.items()}
    return Vocabulary(_table(raw), special_ids, strip_left=strip)


def _table(raw: dict[int, bytes]) -> list[bytes]:
    return [raw.get(token, b"") for token in range(max(raw, default=-1) + 1)]


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for their own byte, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token, spelled as it is
        return token.encode()


def _parse_byte_fallback(steps: list[Any]) -> tuple[list[tuple[str, str]], int] | None:
    """SentencePiece as tokenizer.json spells it: Replace*, ByteFallback, Fuse, and perhaps Strip of leading spaces."""
    replacements: list[tuple[str, str]] = []
    kinds = [step and step["type"] for step in steps]
    while kinds[:1] == ["Replace"] and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps, kinds = steps[1:], kinds[1:]
    if kinds == ["ByteFallback", "Fuse"]:
        return replacements, 0
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["content"] == " " and steps[2]["stop"] == 0:
        return replacements, int(steps[2]["start"])
    return None


def _byte_fallback(token: str, replacements: list[tuple[str, str]]) -> bytes:
    for old, new in replacements:
        token = token.replace(old, new)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass  # not a byte: a token that looks like one
    return token.encode()
