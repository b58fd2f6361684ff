"""The edge between HTTP and the rest: bodies are read up to a limit, a vanished client is noticed at once."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mizzen.errors import BodyTooLarge, RequestError, WireError
from mizzen.server.client import BACKSTOP_S, Answer, ClientGone, EngineClient, RequestEnded
from mizzen.server.http import ABORT
from mizzen.server.responses import StreamEncoder, encode, error_event

_LINGER_S = 5.0  # how long the rest of a refused body is thrown away, so that its sender gets to read the answer


class JsonBytes(Response):
    """A JSON body that is already encoded."""

    media_type = "application/json"


class ErrorResponse(JsonBytes):
    """OpenAI's error body. Retry-After in whole seconds, at least 1."""

    def __init__(self, error: WireError, headers: dict[str, str] | None = None) -> None:
        headers = dict(headers or {})
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, -int(-error.retry_after_s // 1)))
        elif error.status in (429, 503):
            headers["retry-after"] = "1"
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        if error.status == 413:
            headers["connection"] = "close"
        super().__init__(encode(error.body()), error.status, headers)
        self._lingers = error.status == 413

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._lingers:
            await super().__call__(scope, receive, send)
            return
        # Closing on a peer that still sends would reset the connection, and the answer with it.
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        try:
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        except TimeoutError:
            scope.get("extensions", {}).get(ABORT, _nothing)()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _nothing() -> None:
    """Servers other than ours cannot drop a connection."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Reads at most ``limit`` bytes. Raises BodyTooLarge (by Content-Length, else while reading) or ClientGone."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over {limit} bytes. Shorten it, or raise MIZZEN_MAX_BODY_BYTES.")


class Watchers:
    """Tells the engine client when the HTTP client of an answer is gone."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, answer: Answer, receive: Receive) -> None:
        """The body must have been read. The task ends with the response or the connection, whichever is first."""
        task = asyncio.get_running_loop().create_task(self._watch(answer, receive))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, answer: Answer, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client.leave(answer)


class Streams:
    """The streams being written, to drop those whose reader has stalled beyond the request's deadline."""

    def __init__(self) -> None:
        self._open: set[EventStream] = set()

    def add(self, stream: "EventStream") -> None:
        self._open.add(stream)

    def discard(self, stream: "EventStream") -> None:
        self._open.discard(stream)

    def sweep(self) -> None:
        """To be called a few times a second."""
        now = time.monotonic()
        for stream in list(self._open):
            deadline_s = stream.answer.deadline_s
            if stream.sending and deadline_s is not None and now > deadline_s + BACKSTOP_S:
                stream.abort()


class EventStream(Response):
    """Server-sent events of an accepted request. Deltas that are ready together are written together."""

    def __init__(self, answer: Answer, encoder: StreamEncoder, client: EngineClient, streams: Streams) -> None:
        self.answer = answer
        self.sending = False
        self.abort: Callable[[], Any] = _nothing
        self._encoder = encoder
        self._client = client
        self._streams = streams
        self.background = None
        self.status_code = 200
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.abort = scope.get("extensions", {}).get(ABORT, _nothing)
        self._streams.add(self)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._write_events(send)
        finally:
            self._streams.discard(self)
            self._client.leave(self.answer)  # a bug or a cancellation must not leave the engine at work

    async def _write_events(self, send: Send) -> None:
        complete = False
        while not complete:
            try:
                data, complete = self._encoder.add(await self.answer.next(), self.answer.prompt_tokens)
            except ClientGone:
                return
            except RequestEnded as error:
                data, complete = error_event(error.wire()), True
            if data:
                self.sending = True
                await send({"type": "http.response.body", "body": data, "more_body": not complete})
                self.sending = False


def refusal(error: RequestError) -> ErrorResponse:
    return ErrorResponse(error.wire())
