"""Whatever process is killed or stopped: every client has its ending, and the service comes back by itself, whole."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from service.running import Server
from service.streams import Stream, Streams
from tiny import make_tiny_model

ENDING_S = 5.0  # the promise: so soon after a death every client has its ending
NUM_STREAMS = 16
ENDLESS = 12_000  # tokens: more than a tiny model makes while it is being killed
HEARTBEAT_S = 3.0

Start = Callable[..., Server]

pytestmark = pytest.mark.timeout(300)  # bounds a hang; each wait in here has its own


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), rope_scaling=None, max_position_embeddings=16_384)


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two api workers and two tokenizers; killed and cured again and again."""
    running = Server(tiny, tmp_path_factory.mktemp("service"), api_workers=2, tokenizer_workers=2, max_restarts=100)
    with contextlib.closing(running):
        running.wait_ready()
        yield running
        assert running.stop() == 0
        running.wait_nothing_left()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def start(model: Path, **settings: Any) -> Server:
            running = Server(model, tmp_path, **settings)
            stack.callback(running.close)
            running.wait_ready()
            return running

        yield start


def kill(server: Server, name: str, number: signal.Signals = signal.SIGKILL) -> int:
    pid = server.pids()[name]
    os.kill(pid, number)
    return pid


def wait_cured(server: Server, before: dict[str, Any], name: str, pid: int) -> None:
    """Ready again, one restart later, with ``name`` under another pid; idle, no page held, and it answers."""
    deadline = time.monotonic() + 60.0
    while server.health()[1]["restarts"] == before["restarts"]:
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)
    server.wait_ready()
    body = server.wait_idle()
    assert body["restarts"] == before["restarts"] + 1
    assert body["epoch"] == before["epoch"] + name.startswith("engine")
    assert body["kv_pages_total"] == before["kv_pages_total"]
    pids = server.pids()
    assert set(pids) == set(body["processes"]) - {"prepare"}
    assert pids[name] != pid
    for _ in range(4):  # every api worker and tokenizer has its turn
        answer = server.complete(max_tokens=3, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3


def ports_of(pid: int) -> set[int]:
    """The client's ports of the connections that the process holds."""
    return {connection.raddr.port for connection in psutil.Process(pid).net_connections("tcp") if connection.raddr}


# ---- kill -9 ----


@pytest.mark.parametrize("name", ["engine-0", "detokenizer"])
def test_what_every_stream_needs_is_killed_and_all_end_with_an_error(service: Server, name: str) -> None:
    before = service.wait_idle()
    streams = Streams(service, NUM_STREAMS, max_tokens=ENDLESS)
    pid = kill(service, name)
    assert streams.outcomes(within_s=ENDING_S) == ["engine_restarted"] * NUM_STREAMS
    wait_cured(service, before, name, pid)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tokenizer-0", "tokenizer-1"])
def test_a_tokenizer_is_killed_and_streams_go_on(service: Server, name: str) -> None:
    before = service.wait_idle()
    streams = Streams(service, NUM_STREAMS, max_tokens=1500)
    pid = kill(service, name)
    assert streams.outcomes(within_s=60.0) == ["length"] * NUM_STREAMS
    wait_cured(service, before, name, pid)


@pytest.mark.slow
def test_requests_in_a_killed_tokenizer_are_refused_and_those_in_the_other_are_answered(service: Server) -> None:
    before = service.wait_idle()
    pid = kill(service, "tokenizer-0", signal.SIGSTOP)
    waiting = [Stream(service, {"prompt": "Hello", "max_tokens": 5}) for _ in range(NUM_STREAMS)]
    answered = 0
    deadline = time.monotonic() + 30.0
    while answered < NUM_STREAMS // 4 and time.monotonic() < deadline:  # the stopped one holds its share
        answered = sum(stream.outcome == "length" for stream in waiting)
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    outcomes = [stream.wait(ENDING_S) for stream in waiting]
    assert set(outcomes) == {"length", "refused 503"}
    refused = [stream for stream in waiting if stream.outcome == "refused 503"]
    assert all(stream.error["code"] == "engine_restarted" for stream in refused)
    assert all(stream.retry_after is not None and int(stream.retry_after) >= 1 for stream in refused)
    wait_cured(service, before, "tokenizer-0", pid)


@pytest.mark.slow
def test_an_api_worker_is_killed_and_its_own_streams_are_closed_the_others_go_on(service: Server) -> None:
    before, pids = service.wait_idle(), service.pids()
    streams = Streams(service, NUM_STREAMS, max_tokens=1500)
    ports = {name: ports_of(pid) for name, pid in pids.items() if name.startswith("api-")}
    name = max(ports, key=lambda name: len(ports[name]))  # who accepts a connection is the kernel's choice
    lost = [stream for stream in streams.all if stream.local_port in ports[name]]
    assert len(lost) >= NUM_STREAMS // 2
    kill(service, name)
    assert {stream.wait(ENDING_S) for stream in lost} == {"closed"}
    assert {stream.wait(60.0) for stream in streams.all if stream not in lost} <= {"length"}
    wait_cured(service, before, name, pids[name])


@pytest.mark.slow
def test_every_process_is_killed_at_once_and_the_service_comes_back(service: Server) -> None:
    before = service.wait_idle()
    streams = Streams(service, NUM_STREAMS, max_tokens=ENDLESS)
    pids = service.pids()
    # The api first: between two kills it would have time to tell its clients of the engine's end.
    for name in sorted(pids, key=lambda name: not name.startswith("api")):
        os.kill(pids[name], signal.SIGKILL)
    assert streams.outcomes(within_s=ENDING_S) == ["closed"] * NUM_STREAMS
    deadline = time.monotonic() + 60.0
    while service.health()[1]["restarts"] < before["restarts"] + len(pids):
        assert time.monotonic() < deadline, service.log()
        time.sleep(0.05)
    service.wait_ready()
    assert service.wait_idle()["epoch"] == before["epoch"] + 1
    assert set(service.pids()) == set(pids)
    assert service.complete(max_tokens=3).status_code == 200


@pytest.mark.slow
def test_each_process_of_a_real_model_is_killed_in_turn(smollm2: Path, start: Start) -> None:
    server = start(smollm2, max_model_len=1024)
    for name, outcome in {
        "engine-0": "engine_restarted",
        "detokenizer": "engine_restarted",
        "api-0": "closed",
        "tokenizer-0": "length",
    }.items():
        before = server.wait_idle()
        streams = Streams(server, NUM_STREAMS, max_tokens=40 if outcome == "length" else 900)
        pid = kill(server, name)
        assert streams.outcomes(60.0 if outcome == "length" else ENDING_S) == [outcome] * NUM_STREAMS, name
        wait_cured(server, before, name, pid)
    answer = server.chat("What is the capital of France?")
    assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."


@pytest.mark.slow
def test_either_of_two_ranks_is_killed_and_both_are_started_anew(tiny: Path, start: Start) -> None:
    server = start(tiny, tensor_parallel_size=2)
    for name in ("engine-1", "engine-0"):
        before, pids = server.wait_idle(), server.pids()
        streams = Streams(server, NUM_STREAMS, max_tokens=ENDLESS)
        pid = kill(server, name)
        assert streams.outcomes(within_s=ENDING_S) == ["engine_restarted"] * NUM_STREAMS
        wait_cured(server, before, name, pid)
        other = "engine-0" if name == "engine-1" else "engine-1"
        assert server.pids()[other] != pids[other]


# ---- SIGSTOP ----


@pytest.mark.slow
def test_a_process_that_hangs_is_noticed_and_cured(tiny: Path, start: Start) -> None:
    server = start(tiny, heartbeat_timeout_s=HEARTBEAT_S)
    for name, outcome in {
        "engine-0": "engine_restarted",
        "detokenizer": "engine_restarted",
        "api-0": "closed",
        "tokenizer-0": "length",
    }.items():
        before = server.wait_idle()
        streams = Streams(server, NUM_STREAMS, max_tokens=1500 if outcome == "length" else ENDLESS)
        pid = kill(server, name, signal.SIGSTOP)
        assert streams.outcomes(60.0 if outcome == "length" else HEARTBEAT_S + ENDING_S) == [outcome] * NUM_STREAMS
        wait_cured(server, before, name, pid)
        assert f"{name} sent no heartbeat for {HEARTBEAT_S:g} s in phase 'serve'" in server.log()


@pytest.mark.slow
def test_a_rank_that_hangs_takes_the_engine_with_it(tiny: Path, start: Start) -> None:
    server = start(tiny, tensor_parallel_size=2, heartbeat_timeout_s=HEARTBEAT_S)
    before = server.wait_idle()
    streams = Streams(server, NUM_STREAMS, max_tokens=ENDLESS)
    pid = kill(server, "engine-1", signal.SIGSTOP)
    assert streams.outcomes(HEARTBEAT_S + ENDING_S) == ["engine_restarted"] * NUM_STREAMS
    wait_cured(server, before, "engine-1", pid)


# ---- the supervisor and the guard ----


@pytest.mark.slow
def test_nothing_outlives_a_killed_supervisor(tiny: Path, start: Start) -> None:
    server = start(tiny, api_workers=2, tokenizer_workers=2)
    streams = Streams(server, NUM_STREAMS, max_tokens=ENDLESS)
    os.kill(server.pids()["detokenizer"], signal.SIGSTOP)  # not even one that cannot act
    server.process.kill()
    assert streams.outcomes(within_s=ENDING_S) == ["closed"] * NUM_STREAMS
    assert server.process.wait(5) == -signal.SIGKILL
    server.wait_nothing_left()


@pytest.mark.slow
def test_a_killed_guard_is_replaced_and_a_normal_stop_leaves_nothing(tiny: Path, start: Start) -> None:
    server = start(tiny)
    (guard,) = guards(server)
    guard.kill()
    deadline = time.monotonic() + 10.0
    while [process.pid for process in guards(server)] in ([], [guard.pid]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.complete(max_tokens=3).status_code == 200
    assert server.stop() == 0
    server.wait_nothing_left()


def guards(server: Server) -> list[psutil.Process]:
    return [process for process in server.family() if any("guard.py" in word for word in process.cmdline())]


# ---- giving up ----


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_ends_the_service_with_1_and_one_line(tiny: Path, start: Start) -> None:
    server = start(tiny, max_restarts=1)
    killed: set[int] = set()
    deadline = time.monotonic() + 60.0
    while server.process.poll() is None:
        assert time.monotonic() < deadline, server.log()
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            pid = server.pids().get("engine-0")
            if pid is not None and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.05)
    assert server.process.returncode == 1
    assert len(killed) == 2
    last_words = "engine failed 2 times (MIZZEN_MAX_RESTARTS=1 in 600 s); at last: engine-0 was killed by SIGKILL"
    [line] = server.termination_log.read_text().splitlines()
    assert line.startswith(last_words)
    assert "MIZZEN_KV_CACHE_BYTES" in line, "what to do if memory ran out"
    assert server.log().count(last_words) == 1
    server.wait_nothing_left()
