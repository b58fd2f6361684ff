"""The load tester's HTTP client against a server that answers with prepared bytes."""

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import COMPLETE, CUT, Answer, Client, Target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
REFUSAL = json.dumps({"error": {"message": "full", "code": "rate_limit_exceeded"}}).encode()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


LAST = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = event(
    choices=[], usage={"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
)
DONE = b"data: [DONE]\n\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


WHOLE = (
    HEAD
    + chunked(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), LAST, USAGE, DONE)
    + b"0\r\n\r\n"
)


class Prepared:
    """Answers each request with the next of ``answers`` (None: drops it); ``close_after``: one for each connection."""

    def __init__(self, *answers: bytes | None, close_after: bool = False, piece: int = 0) -> None:
        self._answers, self._close_after, self._piece = list(answers), close_after, piece
        self.heads: list[str] = []
        self.connections = 0
        self.tasks: set[asyncio.Task[Any]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await reader.readexactly(int(head.lower().split("content-length: ")[1].split("\r\n")[0]))
                self.heads.append(head)
                answer = self._answers.pop(0)
                if answer is None:
                    break
                step = self._piece or len(answer)
                for start in range(0, len(answer), step):
                    writer.write(answer[start : start + step])
                    await writer.drain()
                    await asyncio.sleep(0)
                if self._close_after:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def served(server: Prepared, use: Callable[[Client], Awaitable[Any]], *, tls: Path | None = None, **target: Any) -> Any:
    context = None
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls / "cert.pem", tls / "key.pem")

    async def both() -> Any:
        async with await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=context) as listening:
            port = listening.sockets[0].getsockname()[1]
            where = Target(f"{'https' if tls else 'http'}://127.0.0.1:{port}", **target)
            client = Client(where, "/chat/completions", timeout_s=10)
            result = await asyncio.wait_for(use(client), 30)
            client.close()
            for task in list(server.tasks):
                task.cancel()
            await asyncio.gather(*server.tasks, return_exceptions=True)
            return result

    return asyncio.run(both())


def ask(server: Prepared, count: int = 1, **target: Any) -> list[Answer]:
    async def use(client: Client) -> list[Answer]:
        return [await client.ask(b"{}", Answer(text=[])) for _ in range(count)]

    return list(served(server, use, **target))


def test_an_answer_counts_tokens_usage_and_what_was_cached() -> None:
    (answer,) = ask(Prepared(WHOLE))
    assert (answer.outcome, answer.tokens, answer.usage_tokens, answer.output_tokens) == (COMPLETE, 2, 7, 7)
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)
    assert "".join(answer.text or ()) == "ab"
    assert list(answer.counts) == [2]  # both in one read: one arrival
    assert answer.ended_s is not None
    assert answer.sent_s is not None
    assert answer.started_s <= answer.sent_s <= answer.arrivals[0] <= answer.ended_s


@pytest.mark.parametrize("piece", [1, 3, 50])
def test_a_stream_may_be_cut_anywhere_and_end_its_lines_as_it_likes(piece: int) -> None:
    body = (
        b": keep-alive\n\nevent: x\n" + delta(content="a") + delta(reasoning_content="b") + delta(tool_calls=[{"a": 1}])
    )
    lines = (body + LAST + b"data:[DONE]\n\n").replace(b"\n", b"\r\n")
    (answer,) = ask(Prepared(HEAD + chunked(lines) + b"0\r\n\r\n", piece=piece))
    assert (answer.outcome, answer.tokens) == (COMPLETE, 3)


def test_token_ids_count_where_text_is_held_back() -> None:
    events = [event(choices=[{"index": 0, "text": "", "token_ids": ids}]) for ids in ([1], [2, 3])]
    (answer,) = ask(Prepared(HEAD + chunked(*events, LAST, DONE) + b"0\r\n\r\n"))
    assert (answer.outcome, answer.output_tokens) == (COMPLETE, 3)


def test_a_connection_is_kept_for_the_next_request() -> None:
    server = Prepared(WHOLE, WHOLE, b"HTTP/1.1 429 x\r\ncontent-length: %d\r\n\r\n" % len(REFUSAL) + REFUSAL, WHOLE)
    answers = ask(server, 4)
    assert [answer.outcome for answer in answers] == [COMPLETE, COMPLETE, "refused 429 rate_limit_exceeded", COMPLETE]
    assert answers[2].message == "full"
    assert server.connections == 1


def test_a_kept_connection_that_the_server_closed_is_replaced_unseen() -> None:
    server = Prepared(WHOLE, WHOLE, close_after=True)
    assert [answer.outcome for answer in ask(server, 2)] == [COMPLETE, COMPLETE]
    assert server.connections == 2
    racing = Prepared(WHOLE, None, WHOLE)  # closed just when the next request was sent
    assert [answer.outcome for answer in ask(racing, 2)] == [COMPLETE, COMPLETE]
    assert len(racing.heads) == 3


def test_what_ends_without_a_last_word_is_cut() -> None:
    for answer in (None, HEAD, HEAD + chunked(delta(content="a")), HEAD + chunked(delta(content="a")) + b"0\r\n\r\n"):
        assert ask(Prepared(answer, close_after=True))[0].outcome == CUT


def test_an_answer_may_end_with_its_connection() -> None:
    plain = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + delta(content="a") + LAST + DONE
    assert ask(Prepared(plain, close_after=True))[0].outcome == COMPLETE
    refusal = b"HTTP/1.1 500 x\r\n\r\nnot JSON"
    (answer,) = ask(Prepared(refusal, close_after=True))
    assert (answer.outcome, answer.message) == ("refused 500", "not JSON")


def test_an_error_in_the_stream_is_the_outcome() -> None:
    failed = event(error={"message": "gone", "code": "engine_restarted"})
    (answer,) = ask(Prepared(HEAD + chunked(delta(content="a"), failed) + b"0\r\n\r\n"))
    assert (answer.outcome, answer.message, answer.tokens) == ("error engine_restarted", "gone", 1)


def test_what_cannot_be_read_is_the_outcome() -> None:
    assert ask(Prepared(b"SSH-2.0-x\r\n\r\n"))[0].outcome.startswith("unreadable: ")
    assert ask(Prepared(HEAD + chunked(b"data: {\n\n")))[0].outcome.startswith("unreadable: ")


def test_the_address_may_have_a_path_and_the_key_and_headers_are_sent() -> None:
    for path, expected in (
        ("", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/a/b", "/a/b/chat/completions"),
    ):
        target = Target("http://example.com" + path, api_key="k", headers=(("x-team", "blue"),))
        head = target.head("/chat/completions").decode()
        assert head.startswith(f"POST {expected} HTTP/1.1\r\nhost: example.com\r\n")
        assert "authorization: Bearer k\r\n" in head
        assert "x-team: blue\r\n" in head
    assert (Target("https://h").port, Target("http://h:81").port, Target("http://[::1]:9").host) == (443, 81, "::1")
    with pytest.raises(ValueError, match="no http"):
        Target("localhost:8000")


def test_tls_is_checked_unless_told_otherwise(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: it makes the certificate")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(
        [*command, "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"], check=True, capture_output=True
    )
    assert ask(Prepared(WHOLE), tls=tmp_path, verify=False)[0].outcome == COMPLETE
    assert "CERTIFICATE_VERIFY_FAILED" in ask(Prepared(WHOLE), tls=tmp_path)[0].outcome


def test_closing_the_client_ends_what_is_under_way() -> None:
    async def use(client: Client) -> list[Answer]:
        asked = [asyncio.create_task(client.ask(b"{}", Answer())) for _ in range(3)]
        await asyncio.sleep(0.1)
        client.close()
        return [*(await asyncio.gather(*asked)), await client.ask(b"{}", Answer())]

    server = Prepared(*[HEAD + chunked(delta(content="a"))] * 3)
    assert [answer.outcome for answer in served(server, use)] == ["unfinished"] * 4


def test_every_ending_that_the_server_says_is_counted() -> None:
    failed = event(error={"message": "gone", "code": "engine_restarted"})
    refusal = b"HTTP/1.1 429 x\r\ncontent-length: %d\r\n\r\n" % len(REFUSAL) + REFUSAL
    twice = HEAD + chunked(delta(content="a"), LAST, DONE, DONE) + b"0\r\n\r\n"
    erring = HEAD + chunked(delta(content="a"), failed) + b"0\r\n\r\n"
    never = HEAD + chunked(delta(content="a"), LAST) + b"0\r\n\r\n"
    answers = ask(Prepared(WHOLE, refusal, erring, twice, never), 5)
    assert [answer.endings for answer in answers] == [1, 1, 1, 2, 0]


def test_who_has_seen_enough_cancels_and_the_server_notices() -> None:
    async def use(client: Client) -> tuple[Answer, Answer]:
        left, seen = Answer(), []

        def enough(answer: Answer) -> None:
            seen.append(answer.tokens)
            asking.cancel()

        asking = asyncio.create_task(client.ask(b"{}", left, enough))
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert seen == [2]
        await asyncio.wait(server.tasks)  # its connection is gone
        return left, await client.ask(b"{}", Answer())

    server = Prepared(HEAD + chunked(delta(content="a"), delta(content="b")), WHOLE)
    left, after = served(server, use)
    assert (left.outcome, left.tokens, left.endings) == ("open", 2, 0)
    assert after.outcome == COMPLETE
    assert server.connections == 2
