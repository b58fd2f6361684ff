"""What a bad day does to a server, in two minutes: each thing that a panel shows or an alert tells happens once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import httpx

from monitoring.stack import Prometheus, wait_until
from service.running import Server
from service.streams import Stream

ENDLESS = 12_000  # tokens: more than a tiny model makes in time
SETTINGS = {
    "kv_cache_bytes": 2**20,  # 128 pages: a fraction of what its running requests want
    "max_running_requests": 8,
    "max_queued_requests": 24,
    "request_timeout_s": 30,
    "drain_timeout_s": 20,
}
SHARED_PREFIX = "All of these prompts have a beginning in common, which is longer than a page. "


@contextlib.contextmanager
def flood(server: Server, clients: int, **fields: object) -> Iterator[None]:
    """Clients that ask again as soon as they are answered, or a moment after they are refused."""
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            stream = Stream(server, {"prompt": f"{SHARED_PREFIX}Client {number}.", **fields})
            if stream.wait(60.0).startswith("refused"):
                over.wait(0.3)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60.0)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def leave_in_mid_stream(server: Server) -> None:
    for event in server.stream(prompt="A client that leaves", max_tokens=ENDLESS, ignore_eos=True):
        if event["choices"][0]["text"]:
            return  # closes the connection


def usual_traffic(server: Server) -> None:
    """Answers, streamed and whole; mistakes of clients; clients that leave."""
    for number in range(6):
        assert server.complete(f"{SHARED_PREFIX}Number {number}", max_tokens=20, ignore_eos=True).status_code == 200
        assert list(server.stream(prompt=f"{SHARED_PREFIX}Number {number}", max_tokens=20, ignore_eos=True))
        assert server.chat("Hello", max_tokens=3).status_code == 200
        leave_in_mid_stream(server)
    assert server.complete(max_tokens=-1).status_code == 400
    assert server.complete(model="another").status_code == 404
    assert server.complete([5] * 20_000).status_code == 400
    assert httpx.get(f"{server.url}/v1/models").status_code == 200


def slow_device(server: Server, for_s: float) -> None:
    """A step takes a third of a second."""
    engine = server.pids()["engine-0"]
    with flood(server, 6, max_tokens=20):
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            with stopped(engine):
                time.sleep(0.3)
            time.sleep(0.01)


def hang(server: Server, for_s: float) -> None:
    """The engine hangs with requests in it, for less than its heartbeat's timeout."""
    streams = [Stream(server, {"prompt": "hanging", "max_tokens": ENDLESS}) for _ in range(2)]
    wait_until(lambda: all(stream.pieces for stream in streams), 30.0, lambda: [s.outcome for s in streams])
    with stopped(server.pids()["engine-0"]):
        time.sleep(for_s)
    os.kill(server.pids()["engine-0"], signal.SIGKILL)  # and then dies
    for stream in streams:
        assert stream.wait(30.0) == "engine_restarted"


def ask_while_restarting(server: Server) -> None:
    """Until it is ready again: refused with 503."""
    refused = 0
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if server.complete(max_tokens=1).status_code == 200:
            break
        refused += 1
        time.sleep(0.1)
    assert refused > 0
    server.wait_ready()


def restart_again_and_again(server: Server, name: str, times: int) -> None:
    for _ in range(times):
        before = server.health()[1]["restarts"]
        os.kill(server.pids()[name], signal.SIGKILL)
        wait_until(lambda before=before: server.health()[1]["restarts"] > before, 30.0, server.health)
        server.wait_ready()


def drain(server: Server) -> None:
    """Told to end with requests in flight that do not end before the drain's deadline. The server is gone then."""
    for number in range(2):
        Stream(server, {"prompt": f"draining {number}", "max_tokens": ENDLESS})
    time.sleep(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pids()["engine-0"], signal.SIGSTOP)  # or they would finish
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60.0)


def wait_scrapes(prometheus: Prometheus, count: int) -> None:
    """So many scrapes from now."""
    query = 'scrape_samples_scraped{job="mizzen"}'
    seen = set()
    until = time.monotonic() + 10.0 + 3 * count
    while len(seen) <= count:
        seen |= {float(series["value"][0]) // 1 for series in prometheus.query(query)}
        assert time.monotonic() < until
        time.sleep(0.3)
