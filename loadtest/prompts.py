"""A prompt has as many tokens as was asked for: it is made of words that are one token each, whatever stands beside.

That holds for a space and a common English word in every byte-pair vocabulary that we know of (a tokenizer's file, if
given, sorts out those for which it does not); a run checks it against the server's own count before it begins. Pieces
are JSON already, so that a body is put together by joining bytes.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

WORDS = """
action add age air allow area arm art ask attack back bank base begin best better big black blue body book boy build
buy call car case cause center change child choice church city class clear color come common cost course court create
cut data day death die doctor door drug early effect end energy event expect eye face fact fall family father feel
field figure film find fire floor follow food foot force form free friend full future game girl give goal good great
green ground group grow hair hand hard head health heart help high hold home hour house human idea image issue job
keep kill kind know land large late law lead leader learn leave letter level life light like line live local long look
lot love major make man market matter media member might mind minute moment money month mother move movie music name
nation need new news night north number object offer office oil old open others paper parent part party past pay
people phone piece place plan plant play point power price range rate reach read real red right risk road role room
rule run scene see send sense set short show side sit site size small son south space staff stand star start state
stay step stop story study table take talk tax team tell term test thing think time town tree try turn type use value
view voice wait walk wall want war watch water way week white whole wife win woman word work world write year young
""".split()  # noqa: SIM905 - 256 words in 13 lines
CACHED_BLOCKS = 65_536  # of a trace: what was sent lately is likely to be sent again


class Pieces(Protocol):
    """Makes pieces of prompts; ``joiner`` goes between two of them."""

    joiner: bytes

    def random(self, source: np.random.Generator, count: int) -> bytes: ...


class Text:
    """Pieces of words, one token each."""

    joiner = b" "

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self._words = np.array([word.encode() for word in words], dtype=object)

    def random(self, source: np.random.Generator, count: int) -> bytes:
        return b" ".join(self._words[source.integers(0, len(self._words), count)].tolist())


class TokenIds:
    """Pieces of token ids below ``vocabulary``, for /completions."""

    joiner = b","

    def __init__(self, vocabulary: int) -> None:
        self._ids = np.array([b"%d" % token for token in range(vocabulary)], dtype=object)

    def random(self, source: np.random.Generator, count: int) -> bytes:
        return b",".join(self._ids[source.integers(0, len(self._ids), count)].tolist())


class Blocks:
    """Blocks of a trace: equal for equal ids, whatever trace they are in, and for no others."""

    def __init__(self, pieces: Pieces, seed: int, block_tokens: int) -> None:
        self._pieces, self._seed, self._block_tokens = pieces, seed, block_tokens
        self._whole = lru_cache(CACHED_BLOCKS)(self._make)

    def block(self, hash_id: int) -> bytes:
        return self._whole(hash_id)

    def beginning(self, hash_id: int, count: int) -> bytes:
        """Its first ``count`` tokens."""
        return self._pieces.joiner.join(self.block(hash_id).split(self._pieces.joiner)[:count])

    def _make(self, hash_id: int) -> bytes:
        return self._pieces.random(np.random.default_rng((self._seed, hash_id)), self._block_tokens)


class Tokenizer:
    """The served model's own, of a tokenizer.json or a folder with one; needs the package ``tokenizers``."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast: Any = Fast.from_file(str(path / "tokenizer.json" if path.is_dir() else path))

    def count(self, text: str) -> int:
        return len(self._fast.encode(text, add_special_tokens=False).ids)

    def single(self, words: list[str]) -> list[str]:
        """Those that are one token, with a space before them and without."""
        return [word for word in words if self.count(word) == 1 and self.count(" " + word) == 1]
