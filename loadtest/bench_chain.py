"""The whole chain of processes with a null model: what HTTP, tokenizer, engine loop and detokenizer cost together.

Starts ``mizzen serve`` with MIZZEN_LOAD_FORMAT=null and reads many streams from a client in a process of its own, whose
CPU time is reported beside the result: both share the machine's cores.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import IO, Any

import numpy as np
import psutil

START_TIMEOUT_S = 60.0


class Stream:
    """What one streamed answer showed: arrival times of socket reads, tokens in each."""

    def __init__(self) -> None:
        self.sent_s = 0.0
        self.arrivals: list[tuple[float, int]] = []
        self.status = 0


async def read_stream(port: int, body: bytes, stream: Stream) -> None:
    """One request by hand: an HTTP library would cost more than the server does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    stream.sent_s = time.perf_counter()
    while data := await reader.read(65_536):
        if not stream.status:
            stream.status = int(data.split(b" ", 2)[1])
        if events := data.count(b'"text":'):
            stream.arrivals.append((time.perf_counter(), events))
    writer.close()


async def load(port: int, model: str, streams: int, tokens: int) -> dict[str, Any]:
    """``streams`` answers at once, each of ``tokens`` tokens."""
    bodies = [
        json.dumps(
            {
                "model": model,
                "prompt": [1000 + (number * 7 + k) % 20_000 for k in range(64)],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0.6,
            }
        ).encode()
        for number in range(streams)
    ]
    results = [Stream() for _ in range(streams)]
    start = time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.gather(*(read_stream(port, body, one) for body, one in zip(bodies, results, strict=True)))
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert all(one.status == 200 for one in results), {one.status for one in results}
    first = np.array([one.arrivals[0][0] - one.sent_s for one in results]) * 1e3
    gaps = np.concatenate([np.diff([at for at, _ in one.arrivals]) for one in results] or [np.zeros(1)]) * 1e3
    return {
        "streams": streams,
        "tokens_a_stream": tokens,
        "tokens_a_second": streams * tokens / wall,
        "events_a_second": sum(events for one in results for _, events in one.arrivals) / wall,
        "wall_s": wall,
        "client_cpu_s": after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime,
        "ttft_p50_ms": float(np.percentile(first, 50)),
        "ttft_p99_ms": float(np.percentile(first, 99)),
        "gap_p50_ms": float(np.percentile(gaps, 50)) if len(gaps) else 0.0,
        "gap_p99_ms": float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_null_server(
    model: str, settings: dict[str, str], *, stderr: IO[bytes] | None = None, without: tuple[str, ...] = ("MIZZEN_",)
) -> "tuple[subprocess.Popen[bytes], int]":
    """A ready server of the null model, and its port. ``without``: how the variables begin that it does not inherit."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(without)} | {
        "MIZZEN_MODEL": model,
        "MIZZEN_LOAD_FORMAT": "null",
        "MIZZEN_PORT": str(port),
        "MIZZEN_HEALTH_PORT": str(free_port()),
        "MIZZEN_MAX_RUNNING_REQUESTS": "256",
        "MIZZEN_MAX_BATCH_TOKENS": "8192",
        "MIZZEN_SERVED_MODEL_NAME": "null",
        **settings,
    }
    process = subprocess.Popen([sys.executable, "-m", "mizzen.cli", "serve"], env=environment, stderr=stderr)
    try:
        wait_ready(process, port)
    except BaseException:
        stop(process)
        raise
    return process, port


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(30)


def wait_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1):
                return
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {START_TIMEOUT_S} s")


def client_in_its_own_process(port: int, model: str, streams: int, tokens: int) -> dict[str, Any]:
    arguments = ["--client", str(port), model, str(streams), str(tokens)]
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.bench_chain", *arguments], stdout=subprocess.PIPE, check=True, timeout=300
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def cpu_s(pid: int) -> float:
    """CPU seconds that the server's processes have used: what others take of the machine is hardly in it."""
    server = psutil.Process(pid)
    times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def run(model: str, streams: int = 256, tokens: int = 2000, **settings: str) -> dict[str, Any]:
    """Throughput at ``streams`` streams, then the chain's latency with one request at a time.

    ``settings``: more MIZZEN_* variables.
    """
    process, port = start_null_server(model, {"MIZZEN_LOG_LEVEL": "warning", **settings})
    try:
        client_in_its_own_process(port, "null", 16, 20)  # warm-up
        before_s = cpu_s(process.pid)
        many = client_in_its_own_process(port, "null", streams, tokens)
        many["server_cpu_us_a_token"] = (cpu_s(process.pid) - before_s) * 1e6 / (streams * tokens)
        first = [client_in_its_own_process(port, "null", 1, 1)["ttft_p50_ms"] for _ in range(3)]
        alone = client_in_its_own_process(port, "null", 1, 500)
    finally:
        stop(process)
    return {"many": many, "alone": alone, "first_token_ms": float(np.median(first))}


def compare(model: str, rounds: int) -> dict[str, Any]:
    """Metrics on against off, in turns. Ratios over 1 are what metrics cost."""
    found: dict[str, list[dict[str, Any]]] = {"true": [], "false": []}
    for _ in range(rounds):
        for on, results in found.items():
            results.append(run(model, tokens=1000, MIZZEN_METRICS=on)["many"])
    rates, costs = (
        {on: [one[field] for one in results] for on, results in found.items()}
        for field in ("tokens_a_second", "server_cpu_us_a_token")
    )
    return {
        "tokens_a_second": {"on": rates["true"], "off": rates["false"]},
        "server_cpu_us_a_token": {"on": costs["true"], "off": costs["false"]},
        "throughput_ratio_of_best": max(rates["false"]) / max(rates["true"]),
        "cpu_ratio_of_best": min(costs["true"]) / min(costs["false"]),
        "cpu_ratio_of_medians": float(np.median(costs["true"]) / np.median(costs["false"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--client", nargs=4, metavar=("PORT", "MODEL", "STREAMS", "TOKENS"))
    parser.add_argument("--compare-metrics", type=int, metavar="ROUNDS", help="metrics on against off")
    args = parser.parse_args()
    if args.compare_metrics:
        print(json.dumps(compare(args.model, args.compare_metrics), indent=1))
    elif args.client:
        port, model, streams, tokens = args.client
        print(json.dumps(asyncio.run(load(int(port), model, int(streams), int(tokens)))))
    else:
        print(json.dumps(run(args.model), indent=1))


if __name__ == "__main__":
    main()
