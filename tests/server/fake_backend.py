"""Everything behind the api process, faked in one thread but spoken to over real ZeroMQ sockets in a run directory.

The fake plays supervisor, tokenizers, engine and detokenizer. By itself it answers each request word by word; a test
can hold it (``hold``), put words in its mouth (``say``), or read what the api said (``requests``, ``aborts``).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mizzen.ipc.channels import ZmqReceiver, ZmqSender, address, configure, encode
from mizzen.ipc.messages import (
    AbortRequest,
    Beat,
    Delta,
    Deltas,
    EngineInbox,
    EngineInfo,
    Fatal,
    Finish,
    Health,
    ModelInfo,
    Ready,
    RequestAccepted,
    RequestRefused,
    TokenizeRequest,
    TokenizerInbox,
    TokenLogprob,
    ToSupervisor,
)

MODEL = ModelInfo(
    path="/models/tiny",
    weights="/models/tiny",
    name="tiny",
    architecture="LlamaForCausalLM",
    vocab_size=1000,
    context_length=512,
    eos_token_ids=(2,),
    default_sampling={"temperature": 0.7, "top_k": 40.0},
)
ENGINE = EngineInfo(max_model_len=512, max_running_requests=8, num_pages=64, page_size=16, kv_bytes=1 << 20)
WORDS = ("Hello", " world", ",", " this", " is", ' "Mizzen"', "\n", " é世🙂", ".")


def healthy(**changes: Any) -> Health:
    """The snapshot of a service that serves."""
    health = Health(
        startup=True, live=True, ready=True, phase="serve", phase_s=1.0, epoch=3, model=MODEL, engine=ENGINE
    )
    return msgspec.structs.replace(health, **changes)


@dataclass
class Choice:
    """One choice being answered."""

    request: TokenizeRequest
    index: int
    said: int = 0


@dataclass
class FakeBackend:
    """``words``: what every choice says, a token each. ``step_s``: time between tokens. Counts are a prompt's."""

    run_dir: Path
    tokenizers: int = 1
    api: str = "api-0"
    words: tuple[str, ...] = WORDS
    step_s: float = 0.0
    prompt_tokens: int = 7
    cached_tokens: int = 4
    hold: bool = False  # answer nothing by itself
    stall_after: int | None = None  # say that many words, then nothing more
    refuse: Callable[[TokenizeRequest], RequestRefused | None] = lambda _request: None
    requests: list[TokenizeRequest] = field(default_factory=list)
    aborts: list[tuple[str, AbortRequest]] = field(default_factory=list)  # (which receiver, message)
    beats: list[Beat] = field(default_factory=list)
    ready: int = 0
    fatal: Fatal | None = None

    def __post_init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._lock = threading.Lock()
        self._control = self._context.socket(zmq.ROUTER)
        configure(self._control)
        self._control.bind(address(self.run_dir, "control"))
        self._receivers = {
            f"tokenizer-{j}": ZmqReceiver(self._context, self.run_dir, f"tokenizer-{j}", TokenizerInbox)
            for j in range(self.tokenizers)
        }
        self._receivers["engine"] = ZmqReceiver(self._context, self.run_dir, "engine", EngineInbox)
        self._api = ZmqSender(self._context, self.run_dir, self.api)
        self._choices: list[Choice] = []
        self._next_step_s = 0.0
        self._decode = msgspec.msgpack.Decoder(ToSupervisor).decode
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-backend")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for receiver in self._receivers.values():
            receiver.close()
        self._api.close()
        self._control.close(0)
        self._context.term()

    # ---- what a test says ----

    def say(self, message: msgspec.Struct) -> None:
        """Sends a message to the api's data channel."""
        with self._lock:
            self._api.send(message)

    def tell(self, message: msgspec.Struct) -> None:
        """Sends a message to the api as its supervisor."""
        with self._lock:
            self._control.send_multipart([self.api.encode(), encode(message)])

    def accept(self, request: TokenizeRequest) -> None:
        self.say(RequestAccepted(request.request_id, [self.prompt_tokens] * len(request.prompts)))

    def finish(self, request: TokenizeRequest, index: int = 0, **changes: Any) -> None:
        end = Finish("stop", self.prompt_tokens, 1, self.cached_tokens)
        self.say(Deltas([Delta(request.request_id, index, finish=msgspec.structs.replace(end, **changes))]))

    # ---- what a test waits for ----

    def wait(self, condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
        """The first true value of ``condition``; AssertionError if it stays false."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if value := condition():
                return value
            time.sleep(0.005)
        raise AssertionError("the expected message never came")

    def wait_request(self, number: int = 1) -> TokenizeRequest:
        request: TokenizeRequest = self.wait(lambda: len(self.requests) >= number and self.requests[number - 1])
        return request

    @property
    def open_choices(self) -> int:
        return len(self._choices)

    # ---- the thread ----

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                self._receive()
                if time.monotonic() >= self._next_step_s:
                    self._step()
                    self._next_step_s = time.monotonic() + self.step_s
            time.sleep(0.002)

    def _receive(self) -> None:
        while self._control.poll(0):
            _identity, data = self._control.recv_multipart()
            match self._decode(data):
                case Beat() as beat:
                    self.beats.append(beat)
                case Ready():
                    self.ready += 1
                case Fatal() as fatal:
                    self.fatal = fatal
        for name, receiver in self._receivers.items():
            for message in receiver.drain():
                if isinstance(message, TokenizeRequest):
                    self._on_request(message)
                elif isinstance(message, AbortRequest):
                    self.aborts.append((name, message))
                    self._on_abort(message)

    def _on_request(self, request: TokenizeRequest) -> None:
        self.requests.append(request)
        if refusal := self.refuse(request):
            self._api.send(refusal)
        elif not self.hold:
            self._api.send(RequestAccepted(request.request_id, [self.prompt_tokens] * len(request.prompts)))
            count = len(request.prompts) * request.sampling.n
            self._choices += [Choice(request, index) for index in range(count)]

    def _on_abort(self, abort: AbortRequest) -> None:
        ended = [choice for choice in self._choices if choice.request.request_id == abort.request_id]
        self._choices = [choice for choice in self._choices if choice.request.request_id != abort.request_id]
        finish = Finish("abort", self.prompt_tokens, 0)
        if ended:
            self._api.send(Deltas([Delta(abort.request_id, choice.index, finish=finish) for choice in ended]))

    def _step(self) -> None:
        """A token for each choice, as one message."""
        items = []
        for choice in list(self._choices):
            if self.stall_after is not None and choice.said >= self.stall_after:
                continue
            items.append(self._next_delta(choice))
            if items[-1].finish is not None:
                self._choices.remove(choice)
        if items:
            self._api.send(Deltas(items))

    def _next_delta(self, choice: Choice) -> Delta:
        request, word = choice.request, self.words[choice.said]
        choice.said += 1
        limit = request.sampling.max_tokens
        finish = None
        if choice.said == limit or choice.said == len(self.words):
            reason: Any = "stop" if choice.said == len(self.words) else "length"
            finish = Finish(reason, self.prompt_tokens, choice.said, self.cached_tokens)
        width = request.sampling.logprobs
        logprobs = []
        if width is not None:
            top = [(word, word.encode(), -0.25), ("other", b"other", float("-inf"))][:width]
            logprobs = [TokenLogprob(word, word.encode(), -0.25, top, choice.said)]
        token_ids = [choice.said] if request.return_token_ids else []
        return Delta(request.request_id, choice.index, word, 1, token_ids, logprobs, finish)
