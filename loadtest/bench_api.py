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
from pathlib import Path
from typing import Any

import psutil
import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

import msgspec
from api_service import make_config
from fake_backend import ENGINE, healthy

from mizzen.config.config import MetricsConfig
from mizzen.ipc.channels import ZmqReceiver, ZmqSender, address, configure, encode
from mizzen.ipc.messages import (
    Delta,
    Deltas,
    Finish,
    Ready,
    RequestAccepted,
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
            finish = Finish("length", 10, tokens) if step == tokens - 1 else None
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens a second and stream; 0: unlimited")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-metrics", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mz-") as folder, socket.create_server(("127.0.0.1", 0)) as sock:
        run_dir = Path(folder)
        config = make_config(max_queued_requests=args.streams)
        config = msgspec.structs.replace(config, metrics=MetricsConfig(enabled=not args.no_metrics))
        (run_dir / "config.json").write_bytes(msgspec.json.encode(config))
        fake = multiprocessing.Process(
            target=backend, args=(run_dir, args.streams, args.tokens, args.rate), daemon=True
        )
        fake.start()
        command = [sys.executable, "-m", "mizzen.server.main", "--run-dir", folder, "--name", "api-0"]
        api = subprocess.Popen(
            [*command, "--parent", str(os.getpid()), "--fd", str(sock.fileno())], pass_fds=(sock.fileno(),)
        )
        try:
            while not (run_dir / "ready").exists():
                time.sleep(0.05)
            time.sleep(0.5)
            for _ in range(args.rounds):
                before, start = psutil.Process(api.pid).cpu_times(), time.perf_counter()
                events, reads = uvloop.run(measure(sock.getsockname()[1], args.streams))
                wall_s, after = time.perf_counter() - start, psutil.Process(api.pid).cpu_times()
                cpu_s = after.user + after.system - before.user - before.system
                print(
                    f"{events} events in {reads} reads, {wall_s:.2f} s: {events / wall_s:.0f} events/s;"
                    f" api CPU {cpu_s:.2f} s = {cpu_s / events * 1e6:.1f} us an event"
                    f" = {events / cpu_s:.0f} events a CPU-second"
                )
        finally:
            api.kill()
            api.wait()
            fake.kill()
            fake.join()


if __name__ == "__main__":
    main()
