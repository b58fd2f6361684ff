"""Signals: the first lets requests in flight finish, the second does not wait; exit code 0 and nothing left."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.running import Server
from service.streams import Streams
from tiny import make_tiny_model

NUM_STREAMS = 8
ENDLESS = 12_000  # tokens: more than a tiny model makes while a test waits

Start = Callable[..., Server]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rope_scaling=None, max_position_embeddings=16_384)


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> Server:
            running = Server(tiny, tmp_path, **settings)
            stack.callback(running.close)
            running.wait_ready()
            return running

        yield start


def wait_draining(server: Server) -> None:
    """Until the api knows: it hears of a drain a moment after the supervisor."""
    deadline = time.monotonic() + 10.0
    while not all(server.health(url=url)[1]["draining"] for url in (server.health_url, server.url)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish_and_nothing_new_in(start: Start, number: signal.Signals) -> None:
    server = start(api_workers=2, tokenizer_workers=2)
    streams = Streams(server, NUM_STREAMS, max_tokens=3000)
    server.process.send_signal(number)
    wait_draining(server)
    for url in (server.health_url, server.url):
        assert server.health("ready", url=url)[0] == 503
        assert server.health("live", url=url)[0] == 200
    refused = server.complete(max_tokens=3)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "service_not_ready"
    assert "draining" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert any(stream.outcome is None for stream in streams.all), "all was said before the drain was looked at"
    assert streams.outcomes(within_s=60.0) == ["length"] * NUM_STREAMS
    assert server.process.wait(20) == 0
    server.wait_nothing_left()
    assert not server.termination_log.exists()


def test_streams_longer_than_the_drain_end_with_an_error(start: Start) -> None:
    server = start(drain_timeout_s=1.5)
    streams = Streams(server, NUM_STREAMS, max_tokens=ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    assert streams.outcomes(within_s=15.0) == ["service_not_ready"] * NUM_STREAMS
    assert {stream.error["message"] for stream in streams.all} == {"The service is shutting down"}
    assert server.process.wait(20) == 0
    server.wait_nothing_left()
    assert "drain timeout" in server.log()


def test_a_second_signal_does_not_wait(start: Start) -> None:
    server = start(drain_timeout_s=600)
    streams = Streams(server, NUM_STREAMS, max_tokens=ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    wait_draining(server)
    server.process.send_signal(signal.SIGTERM)
    assert set(streams.outcomes(within_s=15.0)) <= {"service_not_ready", "closed"}
    assert server.process.wait(20) == 0
    server.wait_nothing_left()


def test_an_idle_service_ends_at_once(start: Start) -> None:
    server = start(drain_timeout_s=600)
    assert server.complete(max_tokens=3).status_code == 200
    assert server.stop() == 0
    server.wait_nothing_left()


def test_an_engine_that_dies_in_a_drain_ends_its_streams_and_the_drain(start: Start) -> None:
    server = start(drain_timeout_s=600)
    streams = Streams(server, NUM_STREAMS, max_tokens=ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    wait_draining(server)
    os.kill(server.pids()["engine-0"], signal.SIGKILL)
    assert streams.outcomes(within_s=5.0) == ["engine_restarted"] * NUM_STREAMS
    assert server.process.wait(20) == 0
    server.wait_nothing_left()
