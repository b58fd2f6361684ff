"""A request has one outcome, known once its connection is closed: what arrives after its end is seen too.

One connection a request, parsed in C (httptools, msgspec): a client that must hold hundreds of streams has no time to
spare. Tokens are counted by their ids (``return_token_ids``), since text is held back while a character is incomplete.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httptools
import msgspec

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
OPEN, COMPLETE, CUT, CLOSED = "open", "complete", "cut", "closed by the client"


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Event).decode


def completion(prompt: list[int], max_tokens: int, **fields: Any) -> bytes:
    """The body of a streamed completion that is as long as ``max_tokens`` says."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return msgspec.json.encode({**body, "return_token_ids": True, **fields})


class Stream(asyncio.Protocol):
    """One streamed completion. All times are time.monotonic's (the loop's own is that of its turn).

    ``arrivals``: when tokens arrived; tokens of one read are one arrival. ``outcome``: "open", then "complete",
    "refused 429 rate_limit_exceeded", "error engine_restarted", "cut" (the server closed without a last word) or
    "closed by the client". ``on_tokens`` is called with the time and count of each arrival.
    """

    def __init__(self, body: bytes, on_tokens: Callable[["Stream", float, int], None] | None = None) -> None:
        self.outcome = OPEN
        self.due_s = 0.0
        self.sent_s: float | None = None
        self.ended_s: float | None = None
        self.arrivals: list[float] = []
        self.tokens = 0
        self.endings = 0  # how often the server said that it is over: 1 unless the client closed
        self.message = ""
        self._body = body
        self._on_tokens = on_tokens
        self._loop = asyncio.get_running_loop()
        self._closed = self._loop.create_future()
        self._transport: Any = None  # uvloop's are no asyncio.Transport
        self._parser: Any = httptools.HttpResponseParser(self)
        self._rest = b""  # of an event that is not whole yet, or all of an answer that is no stream
        self._done = self._finished = False

    async def run(self, port: int) -> "Stream":
        """Sends the request and returns when the connection is closed."""
        try:
            await self._loop.create_connection(lambda: self, "127.0.0.1", port)
        except OSError as error:
            self._end(f"not connected: {error.strerror}")
            return self
        await self._closed
        return self

    def close(self) -> None:
        """Drops the connection, as a client does that has lost interest."""
        if self.outcome == OPEN:
            self._end(CLOSED)
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio's callbacks ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        if self.outcome != OPEN:
            self._transport.abort()
            return
        self._transport.write(HEAD + b"content-length: %d\r\n\r\n" % len(self._body) + self._body)
        self._body = b""
        self.sent_s = time.monotonic()

    def data_received(self, data: bytes) -> None:
        before = self.tokens
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            self._end(f"unreadable: {error}")
            self.close()
            return
        if self.tokens > before:
            now = time.monotonic()
            self.arrivals.append(now)
            if self._on_tokens is not None:
                self._on_tokens(self, now, self.tokens - before)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.outcome == OPEN:
            self._end(COMPLETE if self._done and self._finished else CUT)
        if not self._closed.done():
            self._closed.set_result(None)

    # ---- httptools' callbacks ----

    def on_body(self, data: bytes) -> None:
        self._rest += data
        if self._parser.get_status_code() != 200:
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            self._event(event.removeprefix(b"data: "))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.endings += 1
            error = _decode(self._rest).error or _Error()
            self.message = error.message
            self._end(f"refused {status} {error.code}")

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.endings += 1
            self._done = True
            return
        event = _decode(data)
        if event.error is not None:
            self.endings += 1
            self.message = event.error.message
            self._end(f"error {event.error.code}")
        for choice in event.choices:
            self.tokens += len(choice.token_ids)
            self._finished = self._finished or choice.finish_reason is not None

    def _end(self, outcome: str) -> None:
        if self.outcome == OPEN:
            self.outcome, self.ended_s = outcome, time.monotonic()
