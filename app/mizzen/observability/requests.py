"""Metrics of requests. What clients see is counted as they see it, token by token; the rest when a record is complete.

A request for several answers counts as many requests, as in vLLM: the engine runs each.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic  # by name: Pace.add reads it for every token

from mizzen.ipc.messages import Delta, Finish
from mizzen.observability.feed import Counter, Feed
from mizzen.observability.metrics import MAX_KEYS
from mizzen.observability.record import InferenceRecord, RequestRecord

INFERENCE_PATHS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class _Key:
    requests: Counter
    prompt: Counter
    generation: Counter


class RequestMetrics:
    """An observer of records. ``api_keys`` in the order of the settings; only hashes of them leave."""

    def __init__(self, feed: Feed, api_keys: Sequence[str] = ()) -> None:
        self._feed = feed
        self.first = feed.histogram("mizzen_time_to_first_token_seconds")
        self.gap = feed.histogram("mizzen_inter_token_latency_seconds")
        self._counted_gaps = 0  # of those still in the histogram: counted as tokens already
        self.prompt = feed.counter("mizzen_prompt_tokens_total")
        self.generation = feed.counter("mizzen_generation_tokens_total")
        self._cached = feed.counter("mizzen_cached_prompt_tokens_total")
        self._duration = feed.histogram("mizzen_request_duration_seconds")
        self._queue = feed.histogram("mizzen_request_queue_time_seconds")
        self._prefill = feed.histogram("mizzen_request_prefill_time_seconds")
        self._decode = feed.histogram("mizzen_request_decode_time_seconds")
        self._per_token = feed.histogram("mizzen_time_per_output_token_seconds")
        self._prompt_length = feed.histogram("mizzen_request_prompt_tokens")
        self._length = feed.histogram("mizzen_request_generation_tokens")
        self._aborted = feed.counter("mizzen_requests_aborted_total")
        self._keys = [self._key(name) for name in key_names(api_keys)]

    def _key(self, name: str) -> _Key:
        return _Key(
            self._feed.counter("mizzen_key_requests_total", name),
            self._feed.counter("mizzen_key_tokens_total", name, "prompt"),
            self._feed.counter("mizzen_key_tokens_total", name, "generation"),
        )

    def flush(self) -> None:
        """Sends what was counted. Each gap ended with a token."""
        if self._feed.due():
            self.generation.add(sum(self.gap.counts) - self._counted_gaps)
            self._counted_gaps = 0 if self._feed.flush() else sum(self.gap.counts)

    def pace(self, record: RequestRecord, inference: InferenceRecord) -> "Pace":
        return Pace(self, record.started_s, inference)

    def on_request_end(self, record: RequestRecord) -> None:
        self._feed.counter("mizzen_http_responses_total", record.route or "other", str(record.status)).add()
        inference, error = record.inference, record.error
        refused = inference is None or not inference.admitted
        if inference is not None and inference.accepted_s is None:  # the tokenizer may refuse what was admitted
            refused = refused or (error is not None and error.status < 500)
        if refused:
            if error is not None and record.path in INFERENCE_PATHS:
                self._feed.counter("mizzen_requests_rejected_total", error.code or "other").add()
            return
        assert inference is not None
        for index in range(inference.num_choices):
            self._choice(record, inference, index, inference.finishes.get(index))
        tokens = inference.completion_tokens
        pace = inference.pace
        assert pace is not None
        # What was generated but never came by here: an end-of-sequence token, or what nobody waited for any more.
        self.generation.add(max(0, tokens - pace.tokens))
        key = self._keys[record.api_key or 0]
        key.requests.add()
        key.prompt.add(pace.prompt_tokens)
        key.generation.add(max(tokens, pace.tokens))

    def _choice(self, record: RequestRecord, inference: InferenceRecord, index: int, finish: Finish | None) -> None:
        pace = inference.pace
        assert pace is not None
        reason = _reason(record, finish)
        self._feed.counter("mizzen_requests_finished_total", reason).add()
        if reason == "abort":
            self._aborted.add()
        if finish is None:
            return
        if finish.completion_tokens and not pace.counted[index]:
            pace.prompt_tokens += finish.prompt_tokens
            self.prompt.add(finish.prompt_tokens)
        if reason not in ("stop", "length"):
            return
        self._cached.add(finish.cached_tokens)
        self._prompt_length.observe(finish.prompt_tokens)
        self._length.observe(finish.completion_tokens)
        self._duration.observe((pace.last_s[index] or record.ended_s) - record.started_s)
        timings = finish.timings
        if timings.queued_s is not None and timings.scheduled_s is not None:
            self._queue.observe(timings.scheduled_s - timings.queued_s)
            if timings.first_token_s is not None and timings.last_token_s is not None:
                self._prefill.observe(timings.first_token_s - timings.scheduled_s)
                decode_s = timings.last_token_s - timings.first_token_s
                self._decode.observe(decode_s)
                if finish.completion_tokens > 1:
                    self._per_token.observe(decode_s / (finish.completion_tokens - 1))


class Pace:
    """Of one request: when its choices' tokens are handed to the client. ``add`` runs for every token: it is flat."""

    __slots__ = (
        "_bounds",
        "_gap",
        "_inference",
        "_metrics",
        "_started_s",
        "counted",
        "last_s",
        "prompt_tokens",
        "tokens",
    )

    def __init__(self, metrics: RequestMetrics, started_s: float, inference: InferenceRecord) -> None:
        self._metrics = metrics
        self._gap = metrics.gap
        self._bounds = metrics.gap.bounds
        self._started_s = started_s
        self._inference = inference
        self.last_s = [0.0] * inference.num_choices  # 0: no token yet
        self.counted = [False] * inference.num_choices  # its prompt's tokens
        self.prompt_tokens = 0
        self.tokens = 0

    def add(self, deltas: list[Delta]) -> None:
        """What is handed over together: a choice's tokens among it share their gap evenly, and cost one look-up."""
        now = monotonic()
        last_s = self.last_s
        if len(last_s) > 1:
            for index in {delta.index for delta in deltas}:
                self._add(index, [delta for delta in deltas if delta.index == index], now)
            return
        count = 0
        for delta in deltas:
            count += delta.num_tokens
        if count and (since_s := last_s[0]):  # as _add and Histogram.observe do
            last_s[0] = now
            self.tokens += count
            gap_s, histogram = now - since_s, self._gap
            histogram.counts[bisect_left(self._bounds, gap_s / count)] += count
            histogram.sum += gap_s
        else:
            self._add(0, deltas, now)

    def _add(self, index: int, deltas: list[Delta], now: float) -> None:
        """Of one choice. Generation is counted from the gaps when sent."""
        count = sum([delta.num_tokens for delta in deltas])
        since_s = self.last_s[index]
        if not count:
            return
        self.last_s[index] = now
        self.tokens += count
        if since_s:
            self._gap.observe((now - since_s) / count, count)
        else:
            first = next(delta.num_tokens for delta in deltas if delta.num_tokens)
            self._begin(index, now)
            self._metrics.generation.add(first)
            if count > first:
                self._gap.observe(0.0, count - first)

    def _begin(self, index: int, now: float) -> None:
        self._metrics.first.observe(now - self._started_s)
        lengths = self._inference.prompt_tokens
        if lengths:  # else the detokenizer's word has overtaken the tokenizer's: counted at the end
            length = lengths[index // self._inference.sampling.n]
            self.counted[index] = True
            self.prompt_tokens += length
            self._metrics.prompt.add(length)


def key_names(api_keys: Sequence[str]) -> list[str]:
    """Labels by key number: 0 is no key. The first MAX_KEYS keys have names of their own: short hashes."""
    names = [hashlib.sha256(key.encode()).hexdigest()[:8] for key in api_keys[:MAX_KEYS]]
    return ["none", *names, *["other"] * (len(api_keys) - len(names))]


def _reason(record: RequestRecord, finish: Finish | None) -> str:
    if finish is not None and finish.reason in ("stop", "length"):
        return finish.reason
    error = (finish.error if finish is not None else None) or record.error
    if error is not None:
        return "timeout" if error.status == 504 else "error"
    return "abort" if record.client_gone else "error"
