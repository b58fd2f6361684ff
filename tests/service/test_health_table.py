"""docs/operations.md tables what each port answers in each state: each is made to happen, each cell is asked."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mizzen.config.settings import Settings
from service.running import Server
from service.streams import Streams
from tiny import make_tiny_model

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
PROBES = ("startup", "live", "ready")
ANSWER_TIMEOUT_S = 30.0
NO_ANSWER_S = 1.0  # silence for this long is no answer
HEARTBEAT_S = 5.0

Start = Callable[..., Server]
Row = tuple[str, str, str, str]

pytestmark = pytest.mark.timeout(300)


def table() -> dict[tuple[str, str], Row]:
    """By state and port: the answers to the three probes and to a request."""
    text = (
        OPERATIONS.read_text().partition("<!-- health table: begin -->")[2].partition("<!-- health table: end -->")[0]
    )
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in text.strip().splitlines()[2:]]
    return {(state, port): (startup, live, ready, post) for state, port, startup, live, ready, post in rows}


TABLE = table()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rope_scaling=None, max_position_embeddings=16_384)


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers, and does not wait for them."""
    with contextlib.ExitStack() as stack:

        def start(model: Path | str | None = None, **settings: Any) -> Server:
            running = Server(tiny if model is None else model, tmp_path, **settings)  # type: ignore[arg-type]
            stack.callback(running.close)
            return running

        yield start


def ask(method: str, url: str, expected: str, **options: Any) -> str:
    """The status, or "no answer" or "refused"."""
    timeout_s = NO_ANSWER_S if expected == "no answer" else ANSWER_TIMEOUT_S
    try:
        return str(httpx.request(method, url, timeout=timeout_s, **options).status_code)
    except httpx.ConnectError:
        return "refused"
    except httpx.TransportError:  # silence, or closed at the end of a silence
        return "no answer"


def check(server: Server, state: str, *, ports: tuple[str, ...] = ("health", "api")) -> None:
    """Asks all that the table tells of ``state``. The request goes last: its end may be the state's."""
    expected: list[tuple[str, str, str]] = []
    seen: list[tuple[str, str, str]] = []
    urls = {"health": server.health_url, "api": server.url}
    for port in ports:
        *probes, _ = TABLE[state, port]
        for probe, code in zip(("/startup", "/live", "/ready", ""), [*probes, probes[-1]], strict=True):
            expected.append((port, f"/health{probe}", code))
            seen.append((port, f"/health{probe}", ask("GET", f"{urls[port]}/health{probe}", code)))
    if "api" in ports:
        code = TABLE[state, "api"][-1]
        body = {"model": "test-model", "prompt": "Hello", "max_tokens": 2}
        expected.append(("api", "POST", code.partition(" when ")[0]))
        seen.append(("api", "POST", ask("POST", f"{server.url}/v1/completions", code, json=body)))
    assert seen == expected, state


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):  # it does not listen yet, or is just ending
            if result := condition():
                return result
        time.sleep(0.005)
    raise AssertionError(f"waited {timeout_s:g} s for {what}")


def stop_at_birth(server: Server, name: str, other_than: int = 0) -> int:
    """Stops the process as soon as it exists: long before it has said anything."""

    def stop() -> int:
        pid = server.pids().get(name, other_than)
        if pid != other_than:
            os.kill(pid, signal.SIGSTOP)
            return pid
        return 0

    pid: int = until(stop, f"a new {name}")
    return pid


def wait_phase(server: Server, phase: str) -> None:
    """Until both ports tell this phase, and the api accepts."""

    def reached() -> bool:
        bodies = [server.health(url=url)[1] for url in (server.health_url, server.url)]
        return all(body["phase"] == phase for body in bodies) and bodies[1]["processes"].get("api-0") == "ready"

    until(reached, f"phase {phase}")


def wait_ready_is(server: Server, ready: bool) -> None:
    until(
        lambda: all(server.health(url=url)[1]["ready"] is ready for url in (server.health_url, server.url)),
        f"ready to be {ready}",
    )


@pytest.mark.slow
def test_from_start_through_hang_and_restart_to_the_end(start: Start) -> None:
    server = start(tensor_parallel_size=2, heartbeat_timeout_s=HEARTBEAT_S)
    prepare = stop_at_birth(server, "prepare")
    wait_phase(server, "start")
    check(server, "starting")
    os.kill(prepare, signal.SIGCONT)

    first = stop_at_birth(server, "engine-1")  # rank 0 waits for it
    wait_phase(server, "load")
    check(server, "loading")
    status, body = server.health()
    assert (status, body["status"], body["phase"]) == (503, "unavailable", "load")
    assert body["phase_s"] > 0
    assert body["processes"]["engine-0"] == "load"
    refused = server.complete()
    assert refused.json()["error"]["code"] == "service_not_ready"
    assert "load for" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    os.kill(first, signal.SIGCONT)

    server.wait_ready()
    check(server, "serving")

    second = threading.Thread(target=lambda: stop_at_birth(server, "engine-1", other_than=first))
    second.start()
    os.kill(server.pids()["engine-0"], signal.SIGSTOP)
    check(server, "engine hung, not noticed yet")
    second.join(60)
    wait_ready_is(server, False)
    check(server, "restarting")
    body = server.health("live")[1]
    assert (body["epoch"], body["restarts"]) == (2, 1)
    os.kill(server.pids()["engine-1"], signal.SIGCONT)
    server.wait_ready()
    check(server, "serving")

    streams = Streams(server, 2, max_tokens=2000)
    server.process.send_signal(signal.SIGTERM)
    wait_ready_is(server, False)
    check(server, "draining")
    assert server.health()[1]["draining"]
    assert streams.outcomes(within_s=60.0) == ["length"] * 2
    assert server.process.wait(20) == 0
    check(server, "ended")
    server.wait_nothing_left()


@pytest.mark.slow
def test_while_a_model_is_downloaded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # it takes connections and says nothing
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        server = start("some-org/some-model")
        wait_phase(server, "download")
        check(server, "downloading")
        assert "some-org/some-model" in server.health()[1]["detail"]
        assert server.stop() == 0
    server.wait_nothing_left()


@pytest.mark.slow
def test_while_the_supervisor_or_the_api_hangs(start: Start) -> None:
    server = start(heartbeat_timeout_s=15)
    server.wait_ready()
    server.process.send_signal(signal.SIGSTOP)
    until(lambda: server.health("live", url=server.url)[0] == 503, "the api to miss the supervisor")
    check(server, "supervisor hung")
    server.process.send_signal(signal.SIGCONT)
    server.wait_ready()
    check(server, "serving")
    assert server.health()[1]["restarts"] == 0, "time in which it was stopped counts against nobody"

    api = server.pids()["api-0"]
    os.kill(api, signal.SIGSTOP)
    check(server, "api hung, not noticed yet")
    os.kill(api, signal.SIGCONT)
    until(lambda: server.health(url=server.url)[0] == 200, "the api to answer again")
    os.kill(api, signal.SIGKILL)
    reborn = stop_at_birth(server, "api-0", other_than=api)
    check(server, "api restarting")
    os.kill(reborn, signal.SIGCONT)
    server.wait_ready()
    check(server, "serving")
    assert server.stop() == 0
    server.wait_nothing_left()


@pytest.mark.slow
def test_while_it_gives_up(start: Start) -> None:
    server = start(max_restarts=0)
    server.wait_ready()
    os.kill(server.pids()["tokenizer-0"], signal.SIGSTOP)  # one that is deaf to Shutdown: two seconds are left to ask
    os.kill(server.pids()["engine-0"], signal.SIGKILL)
    until(lambda: server.health("live")[0] == 503, "the end to begin")
    check(server, "giving up", ports=("health",))
    until(lambda: "api-0" not in server.pids(), "the api worker to be gone")
    *probes, _ = TABLE["giving up", "api"]
    assert {ask("GET", f"{server.url}/health/live", "no answer")} == set(probes)
    assert server.process.wait(20) == 1
    check(server, "ended")
    server.wait_nothing_left()


def test_every_state_of_the_table_is_made_to_happen_here() -> None:
    walked = re.findall(r'check\(server, "([^"]+)"', Path(__file__).read_text())
    assert set(walked) == {state for state, _ in TABLE}


def test_the_table_tells_both_ports_of_each_state() -> None:
    states = {state for state, _ in TABLE}
    assert len(states) == 12
    assert set(TABLE) == {(state, port) for state in states for port in ("health", "api")}


def test_every_setting_that_the_page_names_exists() -> None:
    named = set(re.findall(r"MIZZEN_[A-Z_]+", OPERATIONS.read_text()))
    assert len(named) > 15
    assert named <= {f"MIZZEN_{field.upper()}" for field in Settings.model_fields}
