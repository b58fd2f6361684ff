"""What a bad day does to a server, in three minutes: each thing that a panel shows or an alert tells happens once."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import zmq

from fake_nvml import FakeNvml
from mizzen.observability.feed import Feed, MetricsSender
from mizzen.observability.gpus import GpuMetrics
from monitoring.stack import Alertmanager, Prometheus, Webhook, wait_until
from service.running import Server
from service.streams import Stream
from tiny import make_tiny_model

ENDLESS = 12_000  # tokens: more than a tiny model makes in time
SETTINGS = {
    "kv_cache_bytes": 2**22,  # 128 pages: a fraction of what its running requests want
    "max_running_requests": 16,
    "max_queued_requests": 24,
    "request_timeout_s": 20,
    "heartbeat_timeout_s": 60,  # a hang is to last until alerts have told of it
    "drain_timeout_s": 20,
}
SHARED_PREFIX = "All of these prompts have a beginning in common, which is longer than a page. "


@contextlib.contextmanager
def flood(server: Server, clients: int, **fields: object) -> Iterator[list[Stream]]:
    """Clients that ask again as soon as they are answered, or a moment after they are refused. Gives all they asked."""
    over = threading.Event()
    streams: list[Stream] = []

    def client(number: int) -> None:
        while not over.is_set():
            stream = Stream(server, {"prompt": f"{SHARED_PREFIX}Client {number}.", **fields})
            streams.append(stream)
            if stream.wait(60.0).startswith("refused"):
                over.wait(0.3)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield streams
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
        with contextlib.suppress(ProcessLookupError):  # it may have been killed meanwhile
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


@contextlib.contextmanager
def slow_device(server: Server) -> Iterator[None]:
    """Once some tokens have arrived, none for a third of a second, and so on."""
    engine, over = server.pids()["engine-0"], threading.Event()

    def pieces() -> int:
        return sum(stream.pieces for stream in streams)

    def slow_down() -> None:
        while not over.is_set():
            with stopped(engine):
                over.wait(0.3)
                before = pieces()
            until = time.monotonic() + 1.0
            while pieces() == before and time.monotonic() < until:
                time.sleep(0.0005)

    with flood(server, 6, max_tokens=20) as streams:
        thread = threading.Thread(target=slow_down)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(10.0)


@contextlib.contextmanager
def hang(server: Server) -> Iterator[None]:
    """The engine hangs with requests in it; one more comes each second, and each times out. It is then killed."""
    streams = [Stream(server, {"prompt": "hanging", "max_tokens": ENDLESS}) for _ in range(2)]
    wait_until(lambda: all(stream.pieces for stream in streams), 30.0, lambda: [s.outcome for s in streams])
    engine, over = server.pids()["engine-0"], threading.Event()

    def go_on_asking() -> None:
        while not over.wait(1.0):
            streams.append(Stream(server, {"prompt": "hanging too", "max_tokens": 5}))

    thread = threading.Thread(target=go_on_asking)
    with stopped(engine):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(10.0)
        os.kill(engine, signal.SIGKILL)
        outcomes = [stream.wait(30.0) for stream in streams]
    assert {"request_timeout", "engine_restarted"} == set(outcomes)


@contextlib.contextmanager
def stuck_start(server: Server) -> Iterator[None]:
    """The engine after the one that was killed hangs while it loads; clients are refused with 503 all the time."""
    wait_until(lambda: "engine-0" in server.pids(), 30.0, server.health)
    over = threading.Event()
    statuses: list[int] = []

    def ask() -> None:
        while not over.wait(0.2):
            statuses.append(server.complete(max_tokens=1).status_code)

    thread = threading.Thread(target=ask)
    with stopped(server.pids()["engine-0"]):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(70.0)
    assert set(statuses) == {503}
    server.wait_ready()


@contextlib.contextmanager
def fake_gpu(server: Server) -> Iterator[None]:
    """What the metrics process would read of a GPU, if the engine had one: by a fake NVML, sent as a process sends."""
    (run_dir,) = server.run_parent.glob("mizzen-*")
    over = threading.Event()

    def read() -> None:
        context = zmq.Context()
        sender = MetricsSender(context, run_dir)
        gpus = GpuMetrics(Feed(sender.send), 1, FakeNvml(), {})
        while not over.wait(0.5):
            gpus.read()
        sender.close()
        context.term()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10.0)


def restart_again_and_again(server: Server, name: str, times: int) -> None:
    for _ in range(times):
        before = server.health()[1]["restarts"]
        os.kill(server.pids()[name], signal.SIGKILL)
        wait_until(lambda before=before: server.health()[1]["restarts"] > before, 30.0, server.health)
        server.wait_ready()


def drain(server: Server) -> None:
    """Told to end with requests in flight that do not end before the drain's deadline. The server is gone then."""
    streams = [Stream(server, {"prompt": f"draining {number}", "max_tokens": ENDLESS}) for number in range(2)]
    wait_until(lambda: all(stream.pieces for stream in streams), 30.0, lambda: [s.outcome for s in streams])
    with stopped(server.pids()["engine-0"]):  # or they would finish
        assert server.stop() == 0


def wait_scrapes(prometheus: Prometheus, count: int) -> None:
    """So many scrapes from now."""
    query = 'scrape_samples_scraped{job="mizzen"}'
    seen = set()
    until = time.monotonic() + 10.0 + 3 * count
    while len(seen) <= count:
        seen |= {float(series["value"][0]) // 1 for series in prometheus.query(query)}  # seconds
        assert time.monotonic() < until
        time.sleep(0.3)


class Day(NamedTuple):
    prometheus: Prometheus
    start_s: float
    end_s: float
    pages: list[tuple[str, str]]  # what the pager heard: (alert, status)


def fill(expression: str) -> str:
    """A panel's query with Grafana's variables replaced: everything is chosen."""
    for name, value in {"$model": ".*", "$instance": ".*", "$__rate_interval": "5s", "$__range": "60s"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


@contextlib.contextmanager
def a_day(folder: Path) -> Iterator[Day]:
    """The story, from a server that starts to one that is gone; the Prometheus that saw it can still be asked."""
    # Layers, so that a step takes a while: slow_device lets few steps through before it stops the engine again.
    model = make_tiny_model(folder / "model", rope_scaling=None, max_position_embeddings=16_384, num_hidden_layers=12)
    with contextlib.ExitStack() as stack:
        pager = stack.enter_context(contextlib.closing(Webhook()))
        alertmanager = stack.enter_context(contextlib.closing(Alertmanager(folder / "alertmanager", pager.url)))
        server = stack.enter_context(contextlib.closing(Server(model, folder, **SETTINGS)))
        prometheus = stack.enter_context(
            contextlib.closing(
                Prometheus(folder / "prometheus", f"127.0.0.1:{server.health_port}", alertmanager=alertmanager.address)
            )
        )
        start_s = time.time()

        def wait_pages(status: str, *names: str) -> None:
            wanted = {(name, status) for name in names}
            wait_until(lambda: wanted <= set(pager.events), 60.0, lambda: (wanted, pager.events, server.health()))

        def wait_fast_burn(name: str) -> None:
            """The critical one of the two alerts of this name."""
            query = f'ALERTS{{alertname="{name}",severity="critical",alertstate="firing"}}'
            wait_until(lambda: prometheus.query(query) != [], 60.0, lambda: prometheus.query("ALERTS"))

        server.wait_ready()
        stack.enter_context(fake_gpu(server))
        wait_scrapes(prometheus, 3)  # zeros: a counter's first sample is no increase
        usual_traffic(server)
        with slow_device(server):
            wait_fast_burn("MizzenTimeBetweenTokensBurn")
            wait_pages("firing", "MizzenTimeBetweenTokensBurn")
        down = ("MizzenEngineDown", "MizzenNotReady", "MizzenServerErrors")
        with hang(server):
            wait_pages("firing", "MizzenNoProgress", "MizzenRequestsFailing")
        with stuck_start(server):
            wait_pages("firing", *down)
        wait_pages("firing", "MizzenRestarted")
        overload = ("MizzenQueueGrowing", "MizzenRejecting", "MizzenKVCacheSaturated", "MizzenTimeToFirstTokenBurn")
        with flood(server, 60, max_tokens=250):
            wait_fast_burn("MizzenTimeToFirstTokenBurn")
            wait_pages("firing", *overload)
        usual_traffic(server)
        restart_again_and_again(server, "tokenizer-0", 3)
        wait_pages("firing", "MizzenRestarting")
        wait_pages("resolved", *overload, *down, "MizzenNoProgress", "MizzenRequestsFailing")
        wait_pages("resolved", "MizzenRestarted", "MizzenRestarting")
        drain(server)
        wait_until(lambda: ("MizzenDown", "firing") in pager.events, 60.0, lambda: pager.events)
        yield Day(prometheus, start_s, time.time(), pager.events)
