"""What a streamed chunk costs in the api process: the real process and sockets, a fake backend that never waits.

Three processes: the api (as the supervisor starts it), the backend (supervisor, tokenizer and detokenizer in one), and
this one, which opens the streams and counts events. The figure that does not depend on who else uses the machine is the
api's CPU time a chunk; chunks a second are reported too.

    python loadtest/bench_api.py --streams 256 --tokens 200 --rate 20
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

import msgspec
from api_service import make_config
from fake_backend import ENGINE, healthy

from mizzen.config.config import Config, MetricsConfig
from mizzen.ipc.channels import ZmqReceiver, ZmqSender, address, configure, encode
from mizzen.ipc.messages import (
    Delta,
    Deltas,
    Finish,
    Ready,
    RequestAccepted,
    Timings,
    TokenizeRequest,
    TokenizerInbox,
    ToSupervisor,
)


def backend(run_dir: Path, streams: int, tokens: int, rate: float) -> None:
    """Accepts ``streams`` requests, then gives each a token ``rate`` times a second (0: as fast as it can)."""
    context: zmq.Context[Any] = zmq.Context()
    control = context.socket(zmq.ROUTER)
    configure(control)
    control.bind(address(run_dir, "control"))
    receiver = ZmqReceiver(context, run_dir, "tokenizer-0", TokenizerInbox)
    api = ZmqSender(context, run_dir, "api-0")
    decode = msgspec.msgpack.Decoder(ToSupervisor).decode
    engine = msgspec.structs.replace(ENGINE, max_running_requests=streams)
    while not isinstance(decode(control.recv_multipart()[1]), Ready):
        pass

    def tell() -> None:
        control.send_multipart([b"api-0", encode(healthy(engine=engine))])

    tell()
    (run_dir / "ready").touch()
    while True:
        ids: list[str] = []
        while len(ids) < streams:
            tell()
            if isinstance(request := receiver.recv(0.2), TokenizeRequest):
                api.send(RequestAccepted(request.request_id, [10]))
                ids.append(request.request_id)
        due_s = time.monotonic()
        for step in range(tokens):
            last = step == tokens - 1
            finish = Finish("length", 10, tokens, timings=Timings(*[time.monotonic()] * 9)) if last else None
            api.send(Deltas([Delta(key, 0, " token", 1, finish=finish) for key in ids]))
            due_s += 1 / rate if rate else 0.0
            time.sleep(max(0.0, due_s - time.monotonic()))
            if step % 16 == 0:
                tell()


async def stream(port: int, body: bytes) -> tuple[int, int]:
    """The events and the writes (reads that gave data) of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    events = reads = 0
    while data := await reader.read(65536):
        events += data.count(b"data: ")
        reads += 1
    writer.close()
    return events, reads


async def measure(port: int, streams: int) -> tuple[int, int]:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    results = await asyncio.gather(*(stream(port, body) for _ in range(streams)))
    return sum(events for events, _ in results), sum(reads for _, reads in results)


@contextmanager
def api_process(
    config: Config,
    streams: int,
    tokens: int,
    rate: float,
    environment: Mapping[str, str] | None = None,
    log: Any = None,
) -> Iterator[tuple[int, int]]:
    """The api before its backend, ready: its pid and port. ``log`` is a file for its log."""
    with tempfile.TemporaryDirectory(prefix="mz-") as folder, socket.create_server(("127.0.0.1", 0)) as sock:
        run_dir = Path(folder)
        (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
        spawn = multiprocessing.get_context("spawn")  # a fork would have this process's threads in unknown states
        fake = spawn.Process(target=backend, args=(run_dir, streams, tokens, rate), daemon=True)
        fake.start()
        command = [sys.executable, "-m", "mizzen.server.main", "--run-dir", folder, "--name", "api-0"]
        api = subprocess.Popen(
            [*command, "--parent", str(os.getpid()), "--fd", str(sock.fileno())],
            pass_fds=(sock.fileno(),),
            env={**os.environ, **(environment or {})},
            stderr=log,
        )
        try:
            deadline_s = time.monotonic() + 60
            while not (run_dir / "ready").exists():
                assert api.poll() is None, "the api process ended"
                assert time.monotonic() < deadline_s, "the api process was not ready after 60 s"
                time.sleep(0.05)
            time.sleep(0.5)
            yield api.pid, sock.getsockname()[1]
        finally:
            api.kill()
            api.wait()
            fake.kill()
            fake.join()


def cpu_s(pid: int) -> float:
    """What a process has used, to the nanosecond: times(2) counts hundredths of a second."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of a process, as clock_getcpuclockid(3) makes it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens a second and stream; 0: unlimited")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-metrics", action="store_true")
    args = parser.parse_args()
    config = make_config(max_queued_requests=args.streams)
    config = msgspec.structs.replace(config, metrics=MetricsConfig(enabled=not args.no_metrics))
    with api_process(config, args.streams, args.tokens, args.rate) as (pid, port):
        for _ in range(args.rounds):
            before_s, start = cpu_s(pid), time.perf_counter()
            events, reads = uvloop.run(measure(port, args.streams))
            wall_s, used_s = time.perf_counter() - start, cpu_s(pid) - before_s
            print(
                f"{events} events in {reads} reads, {wall_s:.2f} s: {events / wall_s:.0f} events/s;"
                f" api CPU {used_s:.2f} s = {used_s / events * 1e6:.1f} us an event"
                f" = {events / used_s:.0f} events a CPU-second"
            )


if __name__ == "__main__":
    main()
