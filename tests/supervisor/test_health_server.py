"""The supervisor's health port, over HTTP."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mizzen.errors import ConfigError
from mizzen.ipc.messages import Health
from mizzen.supervisor.health import HealthServer, MetricsEndpoint
from mizzen.supervisor.listen import listen

READY = Health(startup=True, live=True, ready=True, phase="serve", phase_s=1.0)
LOADING = Health(startup=False, live=True, ready=False, phase="load", phase_s=2.5, fraction=0.5, detail="layer 3")


@pytest.fixture
def server() -> Iterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0)
    server.start()
    yield server
    server.close()


def get(server: HealthServer, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize(
    ("health", "startup", "live", "ready"),
    [
        (READY, 200, 200, 200),
        (LOADING, 503, 200, 503),
        (msgspec.structs.replace(READY, ready=False, draining=True), 200, 200, 503),
        (msgspec.structs.replace(READY, live=False, ready=False), 200, 503, 503),
    ],
)
def test_each_probe_answers_from_the_snapshot(
    server: HealthServer, health: Health, startup: int, live: int, ready: int
) -> None:
    server.publish(health)
    assert get(server, "/health/startup")[0] == startup
    assert get(server, "/health/live")[0] == live
    assert get(server, "/health/ready?verbose=1")[0] == ready
    assert get(server, "/health") == get(server, "/health/ready")


def test_503_carries_the_loading_phase_and_its_seconds(server: HealthServer) -> None:
    server.publish(LOADING)
    body = get(server, "/health")[1]
    assert (body["phase"], body["phase_s"], body["fraction"], body["detail"]) == ("load", 2.5, 0.5, "layer 3")


def test_a_stale_snapshot_is_neither_live_nor_ready() -> None:
    server = HealthServer("127.0.0.1", 0, stale_s=-1.0)
    server.publish(READY)
    snapshot = server.snapshot()
    server.close()
    assert not snapshot.live
    assert not snapshot.ready
    assert "supervisor" in snapshot.detail


def test_another_path_is_404_in_the_usual_shape(server: HealthServer) -> None:
    status, body = get(server, "/metrics")
    assert status == 404
    assert body["error"]["code"] == "not_found"


def test_a_client_that_sends_nothing_does_not_block_the_others(server: HealthServer) -> None:
    server.publish(READY)
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server, "/health")[0] == 200


@pytest.mark.parametrize(("host", "setting"), [("no.such.host.invalid", "MIZZEN_HOST"), ("192.0.2.1", "MIZZEN_HOST")])
def test_a_host_that_is_not_ours_names_the_setting(host: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listen(host, 0, host_setting="MIZZEN_HOST", port_setting="MIZZEN_PORT")
    assert caught.value.setting == setting


def test_metrics_are_here_as_text_or_503_in_a_line_while_they_cannot_be_had() -> None:
    answers: list[bytes | None] = [b"a 1\n", None]
    server = HealthServer("127.0.0.1", 0, metrics=MetricsEndpoint(lambda: answers.pop(0), None))
    server.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            assert answer.read() == b"a 1\n"
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)
        with refused.value as error:
            assert error.code == 503
            assert error.read().count(b"\n") == 1
    finally:
        server.close()


def test_without_metrics_there_is_no_such_page(server: HealthServer) -> None:
    assert get(server, "/metrics")[0] == 404
