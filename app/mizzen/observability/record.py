"""One record of each HTTP request: metrics, traces and the access line are all made from it, so they cannot disagree.

It is complete when the response is over *and* the engine has said its last word on every choice (or nobody waits for
that any more: ``engine_done``); then it is emitted, once. A client that leaves is why these are two events: the timings
and counts of what the engine did for it arrive a step later.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import structlog

from mizzen.errors import WireError
from mizzen.ipc.messages import Delta, Finish, Prompt
from mizzen.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mizzen.observability.requests import Pace

log = structlog.get_logger()

CLIENT_GONE = 499  # nobody reads it; 499 as nginx logs it


class Observer(Protocol):
    """Is told of every complete record. Must be quick: it runs in the api's event loop."""

    def on_request_end(self, record: "RequestRecord") -> None: ...


@dataclass(slots=True, eq=False)
class InferenceRecord:
    """What a valid request asked of the engine, and what became of it. Times on CLOCK_MONOTONIC."""

    operation: Literal["chat", "text_completion"]
    model: str  # as the request named it
    sampling: SamplingParams
    stream: bool
    num_prompts: int
    num_choices: int
    prompts: list[Prompt] | None = None  # only if MIZZEN_TRACE_CONTENT
    answers: list[list[str]] | None = None  # likewise; by choice, the pieces of text that the client gets
    admitted: bool = False  # it was sent on its way, not refused with 429 or 503
    response_id: str | None = None  # the body's "id", once admitted
    refused_after: tuple[float, float] | None = None  # the tokenizer began with it, and refused it
    accepted_s: float | None = None  # the tokenizer's word, or the first text
    prompt_tokens: list[int] = field(default_factory=list)  # per prompt, once accepted
    first_output_s: float | None = None  # the first delta of any choice arrived at the api
    output_tokens: int = 0  # that arrived, of all choices
    pace: "Pace | None" = None  # tokens on their way to the client, if metrics are on
    finishes: dict[int, Finish] = field(default_factory=dict)  # by choice; aborted ones too

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        n = self.sampling.n
        return sum(self.prompt_tokens) or sum(
            finish.prompt_tokens for index, finish in self.finishes.items() if index % n == 0
        )

    @property
    def completion_tokens(self) -> int:
        """As the usage counts them; for choices that never finished, what arrived of the request."""
        if len(self.finishes) == self.num_choices:
            return sum(finish.completion_tokens for finish in self.finishes.values())
        return max(self.output_tokens, sum(finish.completion_tokens for finish in self.finishes.values()))

    @property
    def cached_tokens(self) -> int:
        """Of the prompts: a prompt counts once, by its first choice, as in the usage."""
        n = self.sampling.n
        return sum(finish.cached_tokens for index, finish in self.finishes.items() if index % n == 0)

    @property
    def finish_reasons(self) -> list[str]:
        return [self.finishes[index].reason for index in sorted(self.finishes)]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request. Times on CLOCK_MONOTONIC.

    ``route`` is the template ("/v1/models/{model_id}"), "" where no route matched: labels must not come from clients.
    ``status`` is what was sent, CLIENT_GONE if the client left before; ``error`` what the client was told, in the body
    or as a stream's last event; ``client_gone``: it left before the end.
    """

    method: str
    path: str
    request_id: str  # x-request-id of the response
    started_s: float
    emit: Callable[["RequestRecord"], None]
    named_by_client: bool = False  # request_id is its X-Request-Id
    traceparent: str | None = None
    tracestate: str | None = None
    route: str = ""
    status: int = 0
    error: WireError | None = None
    client_gone: bool = False
    api_key: int | None = None  # its number, from 1, in the order of the settings
    ended_s: float = 0.0
    inference: InferenceRecord | None = None
    trace_id: str | None = None  # the client's, or set by tracing, which comes first of the observers
    _open: set[int] = field(default_factory=set)  # choices that the engine has not ended
    _http_open: bool = True

    @property
    def error_type(self) -> str | None:
        """What went wrong, in one of a few words; None if nothing did."""
        if self.client_gone:
            return "client_disconnected"
        return (self.error.code or self.error.type) if self.error is not None else None

    # ---- told by the engine client ----

    def admit(self) -> None:
        """The request is on its way: the engine owes a last word on each choice."""
        assert self.inference is not None
        self.inference.admitted = True
        self._open = set(range(self.inference.num_choices))

    def accept(self, prompt_tokens: list[int]) -> None:
        assert self.inference is not None
        self.inference.accepted_s = self.inference.accepted_s or time.monotonic()
        self.inference.prompt_tokens = prompt_tokens

    def refuse(self, tokenize_s: float | None, tokenized_s: float | None) -> None:
        """The tokenizer did, after it had tried from the one time to the other."""
        assert self.inference is not None
        if tokenize_s is not None and tokenized_s is not None:
            self.inference.refused_after = (tokenize_s, tokenized_s)

    def output(self, delta: Delta) -> None:
        """A delta that the client gets. Runs for every token: the clock is read for the first alone."""
        inference = self.inference
        assert inference is not None
        if inference.first_output_s is None:
            now = time.monotonic()
            inference.accepted_s = inference.accepted_s or now
            if delta.num_tokens:
                inference.first_output_s = now
        if inference.answers is not None:
            inference.answers[delta.index].append(delta.text)
        inference.output_tokens += delta.num_tokens

    def finish(self, index: int, finish: Finish) -> None:
        """The engine's last word on a choice, whether or not somebody still waits for it."""
        assert self.inference is not None
        if index in self._open:
            self._open.remove(index)
            self.inference.finishes[index] = finish
            self._emit_if_complete()

    def engine_done(self) -> None:
        """Nothing more is expected of the engine: it never heard of the request, or it died."""
        if self._open:
            self._open.clear()
            self._emit_if_complete()

    # ---- told by the http side ----

    def http_done(self) -> None:
        self.ended_s = time.monotonic()
        self._http_open = False
        self._emit_if_complete()

    @property
    def open(self) -> bool:
        """The engine owes a word."""
        return bool(self._open)

    def _emit_if_complete(self) -> None:
        if not self._http_open and not self._open:
            self.emit(self)


def emit_to(observers: Sequence[Observer]) -> Callable[[RequestRecord], None]:
    """Tells each observer in order."""

    def emit(record: RequestRecord) -> None:
        for observer in observers:
            try:
                observer.on_request_end(record)
            except Exception:  # a bug in what only watches must cost neither this request nor those that wait
                log.exception("a request's end was not recorded", request_id=record.request_id)

    return emit
