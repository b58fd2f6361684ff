"""Clients that come in crowds, leave in the middle or never read: nothing of theirs stays, the next request works."""

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.running import Server
from service.streams import Stream, Streams
from tiny import make_tiny_model

ENDLESS = 12_000  # tokens: more than a tiny model makes while a test waits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rope_scaling=None, max_position_embeddings=16_384)


@contextlib.contextmanager
def serving(model: Path, folder: Path, **settings: Any) -> Iterator[Server]:
    """A server that must be as whole at the end as at the start."""
    with contextlib.closing(Server(model, folder, **settings)) as running:
        running.wait_ready()
        pids = running.pids()
        yield running
        assert running.wait_idle()["restarts"] == 0
        assert running.pids() == pids
        assert running.stop() == 0
        running.wait_nothing_left()


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its KV cache holds less than its 64 running requests may want: preemption is part of the flood. Its queue
    holds any flood, however unevenly the kernel deals the connections out to the api workers."""
    settings = {"api_workers": 2, "tokenizer_workers": 2, "kv_cache_bytes": 2**23, "max_queued_requests": 1000}
    with serving(tiny, tmp_path_factory.mktemp("service"), **settings) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its requests may take two seconds, and eight run at a time."""
    folder = tmp_path_factory.mktemp("hasty")
    with serving(tiny, folder, request_timeout_s=2, max_running_requests=8) as running:
        yield running


def assert_works(server: Server) -> None:
    """Everything that was held is free, and a request is answered."""
    server.wait_idle(60.0)
    answer = server.complete(max_tokens=5, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 5


def head_and_body(fields: dict[str, Any], path: str = "/v1/completions") -> bytes:
    body = json.dumps({"model": "test-model", "temperature": 0, "ignore_eos": True, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: mizzen\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def visit(server: Server, fields: dict[str, Any], leave: Callable[[bytes], bool], stay_s: float) -> str:
    """Asks, reads until ``leave`` likes what came or ``stay_s`` are over, and hangs up: with a reset half of the time.

    Returns all that came.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    came = b""
    try:
        async with asyncio.timeout(stay_s):
            writer.write(head_and_body(fields))
            while not leave(came):
                data = await reader.read(65_536)
                if not data:
                    break
                came += data
    except TimeoutError:
        pass  # that was long enough
    finally:
        if random.random() < 0.5:  # a reset instead of an orderly end
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    return came.decode(errors="replace")


# ---- clients that leave ----


def test_three_hundred_connections_drop_in_mid_stream(service: Server) -> None:
    async def drop(number: int) -> str:
        pieces = random.randint(1, 50)
        fields = {"prompt": f"Number {number}", "stream": True, "max_tokens": ENDLESS}
        return await visit(service, fields, lambda came: came.count(b'"text":') >= pieces, 60.0)

    async def flood() -> list[str]:
        return await asyncio.gather(*(drop(number) for number in range(300)))

    came = asyncio.run(flood())
    assert [text.split()[1] for text in came] == ["200"] * 300
    assert all('"text":' in text for text in came), "each was in mid-stream"
    assert_works(service)


def test_two_hundred_requests_are_aborted_at_random_times(service: Server) -> None:
    dice = random.Random(7)

    def request(number: int) -> dict[str, Any]:
        prompt: Any = f"Request {number % 20} " * dice.choice([1, 3, 40, 200])
        return {
            "prompt": [prompt, "another"] if dice.random() < 0.2 else prompt,
            "stream": dice.random() < 0.7,
            "max_tokens": dice.choice([1, 20, 200, ENDLESS // 2]),
            "n": dice.choice([1, 1, 1, 2]),
            "stop": dice.choice([None, ["e"], ["zq", "xx"]]),
            "temperature": dice.choice([0, 1]),
            "logprobs": dice.choice([None, None, 2]),
        }

    async def flood() -> list[str]:
        async def one(number: int) -> str:
            await asyncio.sleep(dice.random() * 4)
            return await visit(service, request(number), lambda came: b"[DONE]" in came, dice.choice([0.01, 0.3, 2, 5]))

        return await asyncio.gather(*(one(number) for number in range(200)))

    assert {text.split()[1] for text in asyncio.run(flood()) if text} == {"200"}
    assert_works(service)


# ---- clients that never read ----


def test_clients_that_never_read_hold_nothing_after_their_time(hasty: Server) -> None:
    """That a stalled connection is dropped too is tested with the api alone: what is sent here fits the buffers."""
    with contextlib.ExitStack() as stack:
        for k in range(40):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", hasty.port))
            client.sendall(
                head_and_body({"prompt": f"Number {k}", "stream": True, "max_tokens": ENDLESS, "logprobs": 5})
            )
        deadline = time.monotonic() + 10.0
        while hasty.health()[1]["running"] < 8:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert_works(hasty)  # all of them are still connected


# ---- too many at once ----


def test_beyond_the_queue_429_tells_when_to_come_back_and_what_was_accepted_finishes(
    tiny: Path, tmp_path: Path
) -> None:
    with serving(tiny, tmp_path, max_running_requests=4, max_queued_requests=8) as server:
        running = Streams(server, 4, max_tokens=4000)
        flood = [Stream(server, {"prompt": f"Number {k}", "max_tokens": 30}) for k in range(40)]
        deadline = time.monotonic() + 30.0
        while sum(stream.outcome is not None for stream in flood) < 32:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        whole = server.complete(max_tokens=3)
        assert all(stream.outcome is None for stream in running.all), "a place was free before all had asked"
        assert whole.status_code == 429
        assert whole.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(whole.headers["retry-after"]) <= 60
        assert running.outcomes(within_s=60.0) == ["length"] * 4
        assert sorted(stream.wait(30.0) for stream in flood) == ["length"] * 8 + ["refused 429"] * 32
        for stream in flood:
            if stream.outcome == "refused 429":
                assert stream.error["code"] == "rate_limit_exceeded"
                assert stream.retry_after is not None
                assert 1 <= int(stream.retry_after) <= 60
        assert_works(server)


# ---- time limits ----


def test_a_request_that_takes_too_long_ends_with_its_own_error_streamed_or_not(hasty: Server) -> None:
    running = Streams(hasty, 8, max_tokens=ENDLESS)
    waiting = [Stream(hasty, {"prompt": f"Waits {k}", "max_tokens": ENDLESS}) for k in range(4)]
    assert running.outcomes(within_s=30.0) == ["request_timeout"] * 8
    assert [stream.wait(30.0) for stream in waiting] == ["request_timeout"] * 4
    assert all("time limit" in stream.error["message"] for stream in [*running.all, *waiting])
    whole = hasty.complete(max_tokens=ENDLESS, ignore_eos=True)
    assert whole.status_code == 504
    error = whole.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_timeout")
    assert_works(hasty)
