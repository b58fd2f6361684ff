"""How one request's tokens are chosen. A value object: validated once, never changed."""

import math

import msgspec

from mizzen.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # each: bounds what a stream holds back, and the cost of looking
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 256
SEED_LIMIT = 2**63


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Field names and meanings as in OpenAI's API and vLLM's extensions.

    temperature 0 is greedy. top_k 0 (or -1) is off, top_p 1 is off, min_p 0 is off. max_tokens None means: up to the
    context length. logprobs None is off, N gives the chosen token's log-probability and the N most likely ones.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequest naming the first field that is out of range."""
        _within("n", self.n, 1, MAX_CHOICES)
        _within("temperature", self.temperature, 0.0, 2.0)
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidRequest(f"'top_p' must be over 0 and at most 1, not {self.top_p}", param="top_p")
        _within("top_k", self.top_k, -1, 2**31 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        if not (math.isfinite(self.repetition_penalty) and 0.0 < self.repetition_penalty <= 10.0):
            raise InvalidRequest(
                f"'repetition_penalty' must be over 0 and at most 10, not {self.repetition_penalty}",
                param="repetition_penalty",
            )
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        for token, bias in (self.logit_bias or {}).items():
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise InvalidRequest(f"'logit_bias' names token {token}, which does not exist", param="logit_bias")
            _within("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _within("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**62)
        _within("min_tokens", self.min_tokens, 0, 2**62)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"'min_tokens' ({self.min_tokens}) is over 'max_tokens' ({self.max_tokens})", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"'stop' has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are allowed", param="stop"
            )
        if any(not text for text in self.stop):
            raise InvalidRequest("'stop' has an empty string", param="stop")
        if any(len(text) > MAX_STOP_CHARACTERS for text in self.stop):
            raise InvalidRequest(f"'stop' has a string of over {MAX_STOP_CHARACTERS} characters", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"'stop_token_ids' has {len(self.stop_token_ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise InvalidRequest("'stop_token_ids' has a negative id", param="stop_token_ids")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _within(field: str, value: float, low: float, high: float) -> None:
    if not (low <= value <= high):  # NaN fails both comparisons
        raise InvalidRequest(f"'{field}' must be between {low} and {high}, not {value}", param=field)
