"""The load tester's client against a server that answers with prepared bytes."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from loadtest.streams import COMPLETE, CUT, Stream, completion

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = completion([1, 2, 3], 4)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def tokens(*ids: int) -> bytes:
    return event(choices=[{"index": 0, "text": "\u00e9", "token_ids": ids, "finish_reason": None}])


LAST = event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data) if data else b"0\r\n\r\n"


async def served(handler: Handler, use: Callable[[int], Awaitable[Stream]]) -> Stream:
    """What ``use`` returns for the port of a server of ``handler``, once that has ended too."""
    handled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # the client drops what it cannot read, or has enough of
            await handler(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        handled.set_result(None)

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        stream = await asyncio.wait_for(use(server.sockets[0].getsockname()[1]), 30)
        await asyncio.wait_for(handled, 30)
    return stream


def ask(*pieces: bytes, pause_s: float = 0.01) -> Stream:
    """The stream that the server answers with ``pieces``, each in a packet of its own, and a closed connection."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in head
        assert await reader.readexactly(len(BODY)) == BODY
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return asyncio.run(served(handler, lambda port: Stream(BODY).run(port)))


def test_a_completion_asks_for_as_many_tokens_as_it_is_to_have() -> None:
    body = json.loads(completion([5, 6], 7, temperature=0.5))
    assert body["prompt"] == [5, 6]
    assert body["max_tokens"] == 7
    assert body["ignore_eos"] is body["stream"] is body["return_token_ids"] is True
    assert body["temperature"] == 0.5


def test_an_answer_is_complete_and_every_arrival_is_noted_once() -> None:
    both = tokens(3) + tokens(4, 5)  # one read: one arrival
    stream = ask(STREAM + chunk(tokens(1)), chunk(tokens(2)), chunk(both), chunk(LAST + DONE) + chunk(b""))
    assert (stream.outcome, stream.tokens, stream.endings) == (COMPLETE, 5, 1)
    assert len(stream.arrivals) == 3
    assert stream.sent_s is not None
    assert stream.ended_s is not None
    assert stream.sent_s <= stream.arrivals[0] < stream.arrivals[2] <= stream.ended_s


def test_events_may_be_cut_anywhere() -> None:
    data = STREAM + chunk(tokens(1) + tokens(2)) + chunk(tokens(3)) + chunk(LAST) + chunk(DONE) + chunk(b"")
    for size in (1, 7, 50):
        stream = ask(*(data[start : start + size] for start in range(0, len(data), size)), pause_s=0.0002)
        assert (stream.outcome, stream.tokens, stream.endings) == (COMPLETE, 3, 1)


def test_a_connection_that_ends_without_a_last_word_is_cut() -> None:
    for pieces in ([STREAM + chunk(tokens(1))], [STREAM + chunk(tokens(1) + LAST)], [STREAM + chunk(DONE)], []):
        assert ask(*pieces).outcome == CUT


def test_a_refusal_names_status_and_code() -> None:
    body = json.dumps(
        {"error": {"message": "full", "type": "x", "param": None, "code": "rate_limit_exceeded"}}
    ).encode()
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n" % len(body)
    stream = ask(head + body)
    assert (stream.outcome, stream.message, stream.endings) == ("refused 429 rate_limit_exceeded", "full", 1)


def test_an_error_in_the_stream_ends_it() -> None:
    failed = event(error={"message": "gone", "type": "x", "param": None, "code": "engine_restarted"})
    stream = ask(STREAM + chunk(tokens(1)), chunk(failed) + chunk(b""))
    assert (stream.outcome, stream.message, stream.endings) == ("error engine_restarted", "gone", 1)


def test_what_follows_the_end_is_seen() -> None:
    assert ask(STREAM + chunk(tokens(1) + LAST + DONE), chunk(DONE) + chunk(b"")).endings == 2


def test_what_cannot_be_read_ends_the_stream_with_the_reason() -> None:
    assert ask(b"SSH-2.0-x\r\n\r\n").outcome.startswith("unreadable: ")
    assert ask(STREAM + chunk(b"data: {\n\n")).outcome.startswith("unreadable: ")


def test_nobody_listening_is_an_outcome() -> None:
    async def use() -> Stream:
        server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await Stream(BODY).run(port)

    assert asyncio.run(use()).outcome.startswith("not connected: ")


def test_a_client_that_closes_is_not_a_cut_and_the_server_notices() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(tokens(1)))
        while await reader.read(65536):
            pass  # until the connection is gone

    stream = asyncio.run(
        served(handler, lambda port: Stream(BODY, lambda stream, _now, _count: stream.close()).run(port))
    )
    assert (stream.outcome, stream.tokens) == ("closed by the client", 1)
