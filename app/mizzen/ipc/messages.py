"""Messages between processes, as msgspec tagged structs. Token ids travel as int32 bytes (30x cheaper than lists).

    api --TokenizeRequest/AbortRequest--> tokenizer --GenerateRequest/AbortRequest--> engine rank 0
    engine rank 0 --StepOutput--> detokenizer --Deltas--> api        detokenizer --StopChoice--> engine rank 0
    tokenizer --RequestAccepted/RequestRefused--> api                engine rank 0 --RankStep--> engine ranks
    every process <--control--> supervisor

A request has one or more choices: (request_id, index). The engine names a choice by a small integer, its handle.
Every accepted choice gets exactly one terminal message (a Delta with ``finish``); whoever receives output for a
choice it does not know answers with an abort. ``epoch`` counts engine starts: a message of another epoch is dropped.
Times are CLOCK_MONOTONIC seconds (``time.monotonic()``), which all processes of a host share.
"""

from typing import Any, Literal

import msgspec

from mizzen.config.config import LogLevel
from mizzen.errors import WireError
from mizzen.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Phase = Literal["start", "download", "load", "profile", "compile", "capture", "serve", "drain"]


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of all messages: the struct's name is its tag."""


# ---- requests ----


class ChatPrompt(msgspec.Struct, tag=True, omit_defaults=True):
    """Messages as parsed from the request: each a dict with role, content (a string or None) and what else it had."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


class TextPrompt(msgspec.Struct, tag=True, omit_defaults=True):
    text: str


class TokenPrompt(msgspec.Struct, tag=True, omit_defaults=True):
    token_ids: bytes  # int32


Prompt = ChatPrompt | TextPrompt | TokenPrompt


class TokenizeRequest(Message):
    """One HTTP request. Prompt p's choice k has index ``p * sampling.n + k`` and, if seeded, seed + k."""

    request_id: str
    api: int
    epoch: int
    prompts: list[Prompt]
    sampling: SamplingParams
    max_model_len: int
    arrival_s: float
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False


class GenerateRequest(Message):
    """One choice, tokenized. ``sampling.max_tokens`` is set, and prompt + max_tokens fits the context."""

    request_id: str
    index: int
    api: int
    epoch: int
    token_ids: bytes  # int32
    sampling: SamplingParams
    arrival_s: float
    tokenize_s: float | None = None  # when the tokenizer began with it, and when it was done
    tokenized_s: float | None = None
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    return_token_ids: bool = False


class AbortRequest(Message):
    """All choices of a request; it travels the way of the request itself, so it cannot overtake it."""

    request_id: str
    reason: Literal["abort", "timeout"] = "abort"


class StopChoice(Message):
    """The detokenizer found a stop string: the choice needs no more tokens. A ChoiceEnded answers, as always."""

    handle: int


# ---- answers ----


class RequestAccepted(Message):
    """The request passed all that can be refused before its first token."""

    request_id: str
    prompt_tokens: list[int]  # per prompt


class RequestRefused(Message):
    request_id: str
    error: WireError
    tokenize_s: float | None = None  # when the tokenizer began with it, and when it refused it
    tokenized_s: float | None = None


class ChoiceStarted(msgspec.Struct, omit_defaults=True):
    """Tells the detokenizer of a choice before its first token."""

    handle: int
    request_id: str
    index: int
    api: int
    prompt_tokens: int
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  # stop strings do not end a choice before this many tokens
    logprobs: int | None = None
    return_token_ids: bool = False


class Timings(msgspec.Struct, omit_defaults=True):
    """Seconds on CLOCK_MONOTONIC; None where the choice never got there."""

    arrival_s: float = 0.0
    tokenize_s: float | None = None  # the tokenizer began
    tokenized_s: float | None = None  # and was done
    queued_s: float | None = None  # the engine received it
    scheduled_s: float | None = None  # first scheduled
    first_token_s: float | None = None
    last_token_s: float | None = None
    detokenize_s: float | None = None  # the detokenizer got the first token
    detokenized_s: float | None = None  # and gave out the last text


class ChoiceEnded(msgspec.Struct, omit_defaults=True):
    """The engine's last word on a choice. ``stop_token_id`` is set if a token ended it: that token has no text."""

    handle: int
    reason: FinishReason
    completion_tokens: int
    cached_tokens: int = 0
    stop_token_id: int | None = None
    error: WireError | None = None
    timings: Timings = msgspec.field(default_factory=Timings)


class TopLogprobs(msgspec.Struct):
    """Log-probabilities of one step, for those rows that asked: row k belongs to ``handles[k]``."""

    handles: bytes  # int64 [K]
    width: int
    chosen: bytes  # float32 [K]
    token_ids: bytes  # int32 [K, width], most likely first
    logprobs: bytes  # float32 [K, width]


class StepOutput(Message):
    """All that one step of the engine produced: starts first, then a token a row, then ends."""

    epoch: int
    started: list[ChoiceStarted] = []
    handles: bytes = b""  # int64 [R]
    token_ids: bytes = b""  # int32 [R]
    top_logprobs: TopLogprobs | None = None
    ended: list[ChoiceEnded] = []
    reset: bool = False  # the first message of an engine's life: forget everything before it


class TokenLogprob(msgspec.Struct, array_like=True):
    """``text`` and ``raw`` of one token, its log-probability, and the most likely alternatives."""

    text: str
    raw: bytes
    logprob: float
    top: list[tuple[str, bytes, float]] = []
    token_id: int = -1


class Finish(msgspec.Struct, omit_defaults=True):
    """``stop_reason``: the stop string or stop token id that ended the choice, None for an EOS token."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    stop_reason: str | int | None = None
    error: WireError | None = None
    timings: Timings = msgspec.field(default_factory=Timings)


class Delta(msgspec.Struct, omit_defaults=True):
    """New text of one choice. Never part of a character; text that may begin a stop string is held back."""

    request_id: str
    index: int
    text: str = ""
    num_tokens: int = 0  # tokens since the last delta
    token_ids: list[int] = []  # filled if the request asked
    logprobs: list[TokenLogprob] = []
    finish: Finish | None = None


class Deltas(Message):
    items: list[Delta]


# ---- control: every process has one DEALER socket to the supervisor's ROUTER ----


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine found out while loading."""

    max_model_len: int
    max_running_requests: int
    num_pages: int
    page_size: int
    kv_bytes: int


class ModelInfo(msgspec.Struct, frozen=True):
    """What all processes know of the model, found out in the download phase (mizzen/models/prepare.py)."""

    path: str  # the folder with config.json, tokenizer.json, ...
    weights: str  # the same folder, or a .gguf file
    name: str  # for logs: what MIZZEN_MODEL said
    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float] = {}  # from generation_config.json: temperature, top_p, top_k, ...


class Load(msgspec.Struct, omit_defaults=True):
    """The engine's load, for admission control and the health snapshot."""

    running: int = 0
    waiting: int = 0
    kv_pages_total: int = 0
    kv_pages_used: int = 0  # held by requests
    kv_pages_cached: int = 0  # only cached: evictable
    steps: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    waiting_preempted: int = 0  # of those waiting
    waiting_for: Literal["slots", "kv_pages", "batch_tokens"] = "batch_tokens"  # what the first of the others lacks
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # of these, found


class Beat(Message):
    """A main loop is alive. ``pending``: it has work; ``progress`` counts what it has done (steps, messages)."""

    phase: Phase
    fraction: float | None = None
    detail: str = ""
    pending: bool = False
    progress: int = 0
    load: Load | None = None


class Ready(Message):
    """The process serves. Rank 0 tells what it found out; the download process tells the model."""

    engine: EngineInfo | None = None
    model: ModelInfo | None = None


class Fatal(Message):
    """The process is about to exit: a configuration error (78) or a failure (1), in one line."""

    exit_code: int
    message: str


class PeerDown(Message):
    """A process died; what depended on it ends. ``name``: "api-0", "tokenizer-1", "detokenizer" or "engine"."""

    name: str


class Drain(Message):
    """Accept nothing new; in-flight requests go on until ``deadline_s``."""

    deadline_s: float


class Shutdown(Message):
    """End now."""


class SetLogLevel(Message):
    """Log from this level on; ``ControlClient.poll`` sees to it."""

    level: LogLevel


class Health(Message):
    """The supervisor's snapshot; /health/* on both ports answers from it."""

    startup: bool
    live: bool
    ready: bool
    phase: Phase
    phase_s: float
    detail: str = ""
    fraction: float | None = None
    draining: bool = False
    epoch: int = 0
    model: ModelInfo | None = None
    engine: EngineInfo | None = None
    load: Load = msgspec.field(default_factory=Load)
    processes: dict[str, str] = {}  # name -> state
    restarts: int = 0
    retry_after_s: float = 1.0


EngineInbox = GenerateRequest | AbortRequest | StopChoice
TokenizerInbox = TokenizeRequest | AbortRequest
DetokenizerInbox = StepOutput
ApiInbox = Deltas | RequestAccepted | RequestRefused
ToSupervisor = Beat | Ready | Fatal
FromSupervisor = Health | PeerDown | Drain | Shutdown | SetLogLevel
