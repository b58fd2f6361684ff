"""An OpenAI-compatible server that does exactly what its script says, and writes down when it did it.

It runs in the client's own event loop (asyncio's, which reads before it runs timers): nothing but that loop's turn lies
between its clock readings and the client's, so that the two can be compared closely on a machine that is busy.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Script:
    """What becomes of one request. ``gaps_s``: before each token; the first counts from the request's arrival or, if
    it has to ``queue``, from when the request before it ended. ``then``: how it ends after those tokens: "done",
    "error" (an event), "drop" (the connection), "hang"; ``status`` other than 200 refuses it."""

    gaps_s: tuple[float, ...] = (0.0,)
    then: str = "done"
    status: int = 200
    error: Any = None
    queue: bool = False
    cached_tokens: int | None = None


@dataclass
class Handled:
    """``body`` of a request, when it was received, when each token and its end were sent (time.monotonic)."""

    body: dict[str, Any]
    received_s: float
    sent_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    authorization: str = ""

    @property
    def prompt(self) -> str:
        if "messages" in self.body:
            return str(self.body["messages"][-1]["content"])
        return str(self.body["prompt"])


def words(body: dict[str, Any]) -> int:
    """Each word is a token; a chat template puts 7 around each message."""
    if "messages" in body:
        return sum(7 + len(_text(message["content"]).split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


def _text(content: Any) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


class DelayServer:
    """``script`` gets the body and the request's number, from 0; requests for a single token (those that a run begins
    with) do not count and are answered at once."""

    def __init__(
        self, script: Callable[[dict[str, Any], int], Script], metrics: Callable[[], str] | None = None
    ) -> None:
        self._script, self._metrics = script, metrics
        self._turn = asyncio.Lock()
        self.handled: list[Handled] = []
        self.url = ""
        self.max_model_len: int | None = None
        self.usage = True

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["DelayServer"]:
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(task := asyncio.create_task(self._connection(reader, writer)))
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(lines[0].split()[1], headers, body, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/models":
            model = {"id": "delay", **({"max_model_len": self.max_model_len} if self.max_model_len else {})}
            _whole(writer, 200, {"data": [model]})
            return "close" not in headers.get("connection", "")
        if path == "/metrics":
            text = self._metrics() if self._metrics else ""
            writer.write(
                b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (200 if text else 404, len(text)) + text.encode()
            )
            return "close" not in headers.get("connection", "")
        if not body:  # such as /health, which some clients ask first
            _whole(writer, 200, {})
            return True
        fields = json.loads(body)
        handled = Handled(fields, time.monotonic(), authorization=headers.get("authorization", ""))
        if fields.get("max_tokens") == 1:
            return await self._stream(fields, Script(), handled, writer)
        self.handled.append(handled)
        script = self._script(fields, len(self.handled) - 1)
        async with self._turn if script.queue else contextlib.nullcontext():
            return await self._stream(fields, script, handled, writer)

    async def _stream(
        self, body: dict[str, Any], script: Script, handled: Handled, writer: asyncio.StreamWriter
    ) -> bool:
        if script.status != 200:
            handled.ended_s = time.monotonic()
            _whole(writer, script.status, script.error)
            return True
        chat = "messages" in body
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if chat:
            _event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        part: dict[str, Any] = {"delta": {"content": " word"}} if chat else {"text": " word"}
        token = _chunked(_sse({"choices": [{"index": 0, **part, "finish_reason": None}]}))
        for gap_s in script.gaps_s:
            await asyncio.sleep(gap_s)
            handled.sent_s.append(time.monotonic())
            writer.write(token)
        if script.then == "hang":
            await asyncio.sleep(3600)
        if script.then == "error":
            _event(writer, {"error": script.error})
        if script.then == "drop":
            await writer.drain()
            writer.transport.abort()
            return False
        if script.then == "done":
            part = {"delta": {}} if chat else {"text": ""}
            _event(writer, {"choices": [{"index": 0, **part, "finish_reason": "length"}]})
            if self.usage:
                usage: dict[str, Any] = {"prompt_tokens": words(body), "completion_tokens": len(script.gaps_s)}
                if script.cached_tokens is not None:
                    usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
                _event(writer, {"choices": [], "usage": usage})
            writer.write(_chunked(b"data: [DONE]\n\n"))
        handled.ended_s = time.monotonic()
        writer.write(b"0\r\n\r\n")
        return True


def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(_chunked(_sse(event)))


def _sse(event: dict[str, Any]) -> bytes:
    delta = any("delta" in choice for choice in event.get("choices", ()))
    event = {"id": "1", "object": "chat.completion.chunk" if delta else "text_completion", "model": "delay", **event}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
