"""What arrives is stamped before it is looked at: parsing costs the client's time, never the server's figures.

One request at a time on a connection, connections kept for the next request (httptools, msgspec; TLS where the URL says
so). A kept connection that the server closed meanwhile is replaced once, unseen; any other end without a last word is
"cut". All times are time.monotonic's.
"""

import asyncio
import ssl
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

OPEN, COMPLETE, CUT = "open", "complete", "cut"
TIMEOUT, UNFINISHED = "timeout", "unfinished"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True)
class Target:
    """Where requests go. ``base_url`` as OpenAI's clients take it; without a path, /v1 is meant. Raises ValueError."""

    base_url: str
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    verify: bool = True

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.base_url!r} is no http:// or https:// address")

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.base_url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def root(self) -> str:
        """Scheme and authority: where /metrics is."""
        parts = urlsplit(self.base_url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def url(self, path: str) -> str:
        return self.root + (urlsplit(self.base_url).path.rstrip("/") or "/v1") + path

    def all_headers(self) -> dict[str, str]:
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **dict(self.headers)}

    def tls(self) -> ssl.SSLContext | None:
        if urlsplit(self.base_url).scheme == "http":
            return None
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def head(self, path: str) -> bytes:
        """A POST up to its content-length's value."""
        lines = {
            "host": urlsplit(self.root).netloc,
            "content-type": "application/json",
            "accept": "text/event-stream",
            "user-agent": "mizzen-loadtest",
            **self.all_headers(),
        }
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {urlsplit(self.url(path)).path} HTTP/1.1\r\n{text}content-length: ".encode("latin-1")


@dataclass(slots=True)
class Answer:
    """One request and what came of it.

    ``due_s``: when it should leave; ``started_s``: when the client began with it; ``sent_s``: when it was written to a
    connection. ``arrivals``: when tokens arrived (all tokens of one read are one arrival) and ``counts`` how many.
    ``outcome``: "open", then "complete", "refused 429 rate_limit_exceeded", "error engine_restarted", "cut", "timeout",
    "not connected: ...", "unreadable: ..." or "unfinished" (the run was over).
    ``endings``: how often the server said that it is over ([DONE], an error, a refusal).
    ``tokens``: what was seen to arrive, by token ids if the server sends them, else one a chunk with text;
    ``usage_tokens``: what the server says that it was.
    """

    due_s: float = 0.0
    started_s: float = 0.0
    sent_s: float | None = None
    ended_s: float | None = None
    arrivals: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("i"))
    outcome: str = OPEN
    message: str = ""
    tokens: int = 0
    usage_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: list[str] | None = None  # a list: the answer's text is wanted
    wire_bytes: int = 0
    endings: int = 0

    @property
    def output_tokens(self) -> int:
        return self.tokens if self.usage_tokens is None else self.usage_tokens

    def end(self, outcome: str, now: float | None = None) -> None:
        if self.outcome == OPEN:
            self.outcome, self.ended_s = outcome, time.monotonic() if now is None else now


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: Any = None  # uvloop's are no asyncio.Transport
        self.lost = False
        self.reusable = False
        self._loop = asyncio.get_running_loop()
        self._answer: Answer | None = None
        self._over: asyncio.Future[None] | None = None

    async def exchange(self, data: bytes, answer: Answer, on_arrival: Callable[[Answer], None] | None) -> None:
        """Returns when the answer has ended."""
        self._on_arrival = on_arrival
        self._answer, self._over = answer, self._loop.create_future()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._rest = b""  # of an event that is not whole yet, or all of an answer that is no stream
        self._finished = self.reusable = False
        self._chunks = self._ids = 0
        self.transport.write(data)
        answer.sent_s = time.monotonic()
        try:
            await self._over
        finally:
            self._answer = self._over = None

    def stop(self, outcome: str) -> None:
        if self._answer is not None:
            self._answer.end(outcome)
        self._drop()

    def _drop(self) -> None:
        self.reusable = False
        self.transport.abort()
        self._finish()

    def _finish(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    # ---- asyncio's callbacks ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer = self._answer
        if answer is None:  # after its end, a server may say nothing
            self.reusable = False
            self.transport.abort()
            return
        self._now = now
        answer.wire_bytes += len(data)
        before = answer.tokens
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError, UnicodeDecodeError) as error:
            answer.end(f"unreadable: {error}", now)
            self._drop()
        if answer.tokens > before:
            answer.arrivals.append(now)
            answer.counts.append(answer.tokens - before)
            if self._on_arrival is not None:
                self._on_arrival(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if (answer := self._answer) is not None:
            status = self._parser.get_status_code()
            if status not in (0, 200):  # of a length that only its end tells
                self._refused(answer, status)
            answer.end(COMPLETE if self._finished else CUT)
        self._finish()

    # ---- httptools' callbacks ----

    def on_body(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        if self._parser.get_status_code() != 200:
            self._rest = data
            return
        if b"\r" in data:  # never within JSON
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._event(event)

    def on_message_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None or 100 <= status < 200:
            return
        if status != 200:
            self._refused(answer, status)
        answer.end(COMPLETE if self._finished else CUT, self._now)
        self.reusable = bool(self._parser.should_keep_alive())
        self._finish()

    def _refused(self, answer: Answer, status: int) -> None:
        try:
            error = _decode(self._rest).error
        except msgspec.DecodeError:
            error = self._rest[:200].decode("utf-8", "replace")
        code, answer.message = _code_and_message(error)
        answer.endings += 1
        answer.end(f"refused {status} {code}".rstrip(), self._now)

    def _event(self, event: bytes) -> None:
        if event.startswith(b"data: ") and b"\n" not in event:
            data = event[6:]
        else:  # several lines, comments, other fields
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if not data:
                return
        if data == b"[DONE]":
            self._finished = True
            if self._answer is not None:
                self._answer.endings += 1
            return
        self._read(_decode(data))

    def _read(self, event: _Event) -> None:
        answer = self._answer
        if answer is None:
            return
        if event.error is not None:
            code, answer.message = _code_and_message(event.error)
            answer.endings += 1
            answer.end(f"error {code}", self._now)
        for choice in event.choices or ():
            delta = choice.delta
            content = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
            if choice.token_ids:
                self._ids += len(choice.token_ids)
            if content or choice.token_ids or (delta is not None and delta.tool_calls):
                self._chunks += 1
            if content and answer.text is not None:
                answer.text.append(content)
            if choice.finish_reason is not None:
                self._finished = True
        answer.tokens = self._ids or self._chunks
        if (usage := event.usage) is not None:
            answer.prompt_tokens, answer.usage_tokens = usage.prompt_tokens, usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                answer.cached_tokens = usage.prompt_tokens_details.cached_tokens


def _code_and_message(error: Any) -> tuple[str, str]:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or ""), str(error.get("message") or "")
    return "", "" if error is None else str(error)


class Client:
    """Asks ``target``; ``path`` is /chat/completions or /completions."""

    def __init__(self, target: Target, path: str, timeout_s: float) -> None:
        self._target, self._timeout_s = target, timeout_s
        self._head = target.head(path)
        self._tls = target.tls()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False
        self.connections = 0

    async def ask(self, body: bytes, answer: Answer, on_arrival: Callable[[Answer], None] | None = None) -> Answer:
        """Sends ``body`` and fills ``answer`` until it has an outcome; ``on_arrival`` is called after each arrival.

        Who cancels it drops the connection; the answer's outcome is then the caller's to say."""
        answer.started_s = time.monotonic()
        data = self._head + b"%d\r\n\r\n" % len(body) + body
        while True:
            connection = self._kept()
            reused = connection is not None
            if connection is None:
                connection = await self._connect(answer)
            if connection is None:
                break
            await self._exchange(connection, data, answer, on_arrival)
            if not (reused and answer.outcome == CUT and answer.wire_bytes == 0):
                break
            answer.outcome, answer.ended_s, answer.sent_s = OPEN, None, None
        return answer

    async def _exchange(
        self, connection: _Connection, data: bytes, answer: Answer, on_arrival: Callable[[Answer], None] | None
    ) -> None:
        timer = asyncio.get_running_loop().call_later(self._timeout_s, connection.stop, TIMEOUT)
        self._busy.add(connection)
        try:
            await connection.exchange(data, answer, on_arrival)
        finally:
            timer.cancel()
            self._busy.discard(connection)
            if connection.reusable and not connection.lost and not self._closed:
                self._idle.append(connection)
            else:
                connection.transport.abort()

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
        return None

    async def _connect(self, answer: Answer) -> _Connection | None:
        if self._closed:
            answer.end(UNFINISHED)
            return None
        host, port = self._target.host, self._target.port
        try:
            async with asyncio.timeout(self._timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, host, port, ssl=self._tls, server_hostname=host if self._tls else None
                )
        except TimeoutError:
            answer.end("not connected: timeout")
            return None
        except OSError as error:  # ssl.SSLError is one
            answer.end(f"not connected: {error.strerror or error}")
            return None
        self.connections += 1
        if self._closed:
            connection.transport.abort()
            answer.end(UNFINISHED)
            return None
        return connection

    def close(self) -> None:
        """Drops every connection; requests under way end as "unfinished"."""
        self._closed = True
        for connection in list(self._busy):
            connection.stop(UNFINISHED)
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()
