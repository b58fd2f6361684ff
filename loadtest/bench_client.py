"""How many streamed tokens a second the load tester takes on one core, each token an event and a packet of its own.

    python -m loadtest.bench_client [--streams 200] [--rate 150] [--seconds 5] [--json FILE]

The server is a process of its own that writes prepared bytes, so that what is measured is the client: its tokens a
second, the share of a core that they took, and how late its loop was.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from loadtest.client import Target
from loadtest.run import Options, run
from loadtest.scenario import convert

_MODELS = b'{"data":[{"id":"model"}]}'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1796096751,"model":"model",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
_END = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Stream(asyncio.Protocol):
    """Answers requests one after another: ``max_tokens`` tokens, ``rate`` a second."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS))
            return
        self._left = self._count = int(data.split(b'"max_tokens":')[1].split(b",")[0])
        self._transport.write(_HEAD)
        self._loop, self._token = asyncio.get_running_loop(), chunk(_EVENT)
        self._due_s = self._loop.time()
        self._next()

    def _next(self) -> None:
        if self._transport.is_closing():
            return
        if not self._left:
            self._transport.write(chunk(_END % self._count) + b"0\r\n\r\n")
            return
        self._left -= 1
        self._transport.write(self._token)
        self._due_s += 1 / self._rate
        self._loop.call_at(self._due_s, self._next)


def serve(rate: float, port: Connection) -> None:
    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Stream(rate), "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(forever())


def measure(streams: int, rate: float, seconds: float) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(rate, theirs), daemon=True)
    server.start()
    try:
        work: Coroutine[Any, Any, dict[str, Any]] = run(
            convert({
                "name": "client", "duration_s": seconds, "warmup_s": 1.0, "drain_s": 30.0,
                "workload": {"input_tokens": 8, "output_tokens": max(2, int(rate * 2))},
                "load": {"kind": "closed", "concurrency": streams, "ramp_s": 1.0},
            }),
            Options(Target(f"http://127.0.0.1:{ours.recv()}"), metrics_url=""),
        )  # fmt: skip
        return uvloop.run(work)
    finally:
        server.kill()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=150.0, help="tokens a second of each")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began_s = time.process_time()
    result = measure(args.streams, args.rate, args.seconds)
    one, cpu_s = result["summary"], time.process_time() - began_s
    client, tokens = one["client"], one["tokens"]["output"]
    print(
        f"{one['output_tokens_per_s_under_load']:,.0f} tokens/s, {one['tokens']['per_arrival']:.2f} an arrival,"
        f" {client['cpu_share']:.0%} of a core ({cpu_s / tokens * 1e6:.1f} us a token with its figures);"
        f" loop lag P99 {client['loop_lag_s']['p99'] * 1e3:.1f} ms; bottleneck: {client['is_bottleneck']}"
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
