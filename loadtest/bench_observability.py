"""What watching costs: everything on against everything off, in turns within one run, since others use the machine.

On: metrics (scraped once a round), traces (a tenth of the requests) to a collector on loopback, JSON logs with an
access line a request, the progress line. Off: none of these. The sides that are measured:

- engine: a step's host time without a device (bench_engine_host), with the reports that the engine's process makes;
- api: CPU time a token of the real api process before a backend that gives each stream a token at a fixed rate
  (bench_api), so that each token is an event of its own. The figure that depends least on others;
- chain: whole servers with a null model, two beside each other, one of which idles while the other answers as fast as
  it can. Tokens that are ready together share an event, so a slow moment makes tokens cheaper: a noisy figure.

    python -m loadtest.bench_observability [--rounds 7] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import uvloop
from msgspec import structs

from loadtest import bench_chain, bench_engine_host
from loadtest.bench_api import api_process, cpu_s, make_config, measure
from mizzen.config.config import LogConfig, MetricsConfig, TelemetryConfig

ON = {
    "MIZZEN_METRICS": "true",
    "MIZZEN_ACCESS_LOG": "true",
    "MIZZEN_LOG_FORMAT": "json",
    "MIZZEN_LOG_LEVEL": "info",
    "MIZZEN_LOG_INTERVAL_S": "1",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.1",
}
OFF = {
    "MIZZEN_METRICS": "false",
    "MIZZEN_ACCESS_LOG": "false",
    "MIZZEN_LOG_LEVEL": "info",
    "MIZZEN_LOG_INTERVAL_S": "0",
}


class Collector:
    """Takes OTLP over HTTP, and counts what arrives."""

    def __init__(self) -> None:
        self.exports = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                collector.exports += 1
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


class Server:
    """A null model's server; its log goes to a file."""

    def __init__(self, model: str, log: Path, settings: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self._process, self.port = bench_chain.start_null_server(
                model, settings, stderr=stderr, without=("MIZZEN_", "OTEL_")
            )

    def cpu_s(self) -> dict[str, float]:
        """By process: CPU seconds since its start. Processes of a kind share a key."""
        used: dict[str, float] = {}
        parent = psutil.Process(self._process.pid)
        for one in (parent, *parent.children(recursive=True)):
            command = one.cmdline()
            name = command[command.index("--name") + 1].split("-")[0] if "--name" in command else "supervisor"
            used[name] = used.get(name, 0.0) + cpu_s(one.pid)
        return used

    def close(self) -> None:
        bench_chain.stop(self._process)


@contextmanager
def server(model: str, log: Path, settings: dict[str, str]) -> Iterator[Server]:
    found = Server(model, log, settings)
    try:
        yield found
    finally:
        found.close()


def one_round(found: Server, streams: int, tokens: int, repeat: int, *, scraped: bool) -> dict[str, Any]:
    """``repeat`` times ``streams`` answers at once."""
    before = found.cpu_s()
    rates, events = [], 0.0
    for _ in range(repeat):
        result = bench_chain.client_in_its_own_process(found.port, "null", streams, tokens)
        rates.append(result["tokens_a_second"])
        events += result["events_a_second"] * result["wall_s"]
    if scraped:
        with urllib.request.urlopen(f"http://127.0.0.1:{found.port}/metrics", timeout=10) as answer:
            answer.read()
    time.sleep(1.0)  # spans and counts leave
    count = streams * tokens * repeat
    cost = {name: (value - before.get(name, 0.0)) * 1e6 / count for name, value in found.cpu_s().items()}
    return {
        "tokens_a_second": statistics.median(rates),
        "tokens_an_event": count / events,
        "cpu_us_a_token": sum(cost.values()),
        "cpu_us_an_event": sum(cost.values()) * count / events,
        "by_process": cost,
    }


def chain(model: str, rounds: int, streams: int, tokens: int, repeat: int) -> dict[str, Any]:
    collector = Collector()
    found: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mz-bench-")))
        settings = {"on": ON | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.endpoint}/v1/traces"}, "off": OFF}
        servers = {name: stack.enter_context(server(model, folder / name, settings[name])) for name in found}
        for one in servers.values():
            bench_chain.client_in_its_own_process(one.port, "null", streams, 20)  # warm-up
        for turn in range(rounds):
            for name in in_turns(turn):
                found[name].append(one_round(servers[name], streams, tokens, repeat, scraped=name == "on"))
        log = servers["on"].log.read_text()
    lines = {"access": log.count('"message": "request"'), "progress": log.count('"message": "engine"')}
    assert lines["access"] >= rounds * repeat * streams, lines
    assert lines["progress"], lines
    assert collector.exports, "nothing was exported"
    return {
        "streams": streams,
        "tokens_a_stream": tokens,
        "lines": lines,
        "exports": collector.exports,
        **compared(found, "cpu_us_an_event", "cpu_us_a_token", "tokens_a_second"),
        "tokens_an_event": {name: spread([row["tokens_an_event"] for row in rows]) for name, rows in found.items()},
        "by_process_us": {
            name: {
                one: statistics.median(round_["by_process"].get(one, 0.0) for round_ in rows)
                for one in rows[0]["by_process"]
            }
            for name, rows in found.items()
        },
    }


def api_side(rounds: int, streams: int, tokens: int, rate: float) -> dict[str, Any]:
    """The backend's processes take no part in what is measured, and the metrics process is not there: see chain."""
    collector = Collector()
    off = make_config(max_queued_requests=streams)
    off = structs.replace(
        off, metrics=MetricsConfig(enabled=False), log=LogConfig("info", "console", 0.0, access=False)
    )
    on = structs.replace(
        off,
        metrics=MetricsConfig(),
        log=LogConfig("info", "json", 1.0),
        telemetry=TelemetryConfig(traces="http/protobuf"),
    )
    environment = {name: value for name, value in ON.items() if name.startswith("OTEL_")}
    environment["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"{collector.endpoint}/v1/traces"
    found: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        arguments = {"on": (on, streams, tokens, rate, environment, log), "off": (off, streams, tokens, rate)}
        apis = {name: stack.enter_context(api_process(*arguments[name])) for name in found}
        for _, port in apis.values():
            uvloop.run(measure(port, streams))  # warm-up
        for turn in range(rounds):
            for name in in_turns(turn):
                pid, port = apis[name]
                before_s, start_s = cpu_s(pid), time.perf_counter()
                events, _ = uvloop.run(measure(port, streams))
                wall_s = time.perf_counter() - start_s
                time.sleep(1.0)  # spans leave
                used_s = cpu_s(pid) - before_s
                count = streams * tokens
                assert events >= count, f"{events} events of {count} tokens"
                found[name].append({"cpu_us_a_token": used_s * 1e6 / count, "tokens_a_second": count / wall_s})
        log.seek(0)
        lines = log.read().count(b'"message": "request"')
    assert lines == (rounds + 1) * streams, lines
    assert collector.exports, "nothing was exported"
    result = {"streams": streams, "tokens_a_stream": tokens, "tokens_a_second_and_stream": rate, "access_lines": lines}
    return result | {"exports": collector.exports} | compared(found, "cpu_us_a_token", "tokens_a_second")


def in_turns(turn: int) -> tuple[str, str]:
    """Which is first takes turns, too."""
    return ("on", "off") if turn % 2 else ("off", "on")


def engine_side(rounds: int, steps: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    for turn in range(rounds):
        for name in in_turns(turn):
            found[name].append(bench_engine_host.measure("decode", steps, metrics=name == "on"))
    return compared(found, "cpu_ms", "p50_ms")


def compared(found: dict[str, list[dict[str, Any]]], *fields: str) -> dict[str, Any]:
    """Of each field: its medians and spread, and on by off of each turn: median and spread of these."""
    result: dict[str, Any] = {}
    for field in fields:
        values = {name: [row[field] for row in rows] for name, rows in found.items()}
        ratios = [on / off for on, off in zip(values["on"], values["off"], strict=True)]
        result[field] = {name: spread(row) for name, row in values.items()} | {"on_by_off": spread(ratios)}
    return result


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": len(values)}


def run(model: str, rounds: int) -> dict[str, Any]:
    return {
        "engine": engine_side(3 * rounds, 2300),
        "api": api_side(rounds, 256, 250, 40),
        "chain": chain(model, 2 * rounds, 256, 2000, 1),
    }


def table(results: dict[str, Any]) -> str:
    lines = ["| on by off | median (spread) | on | off |", "|---|---|---|---|"]
    for part, fields in results.items():
        for field in ("cpu_ms", "p50_ms", "cpu_us_an_event", "cpu_us_a_token", "tokens_a_second"):
            if field not in fields:
                continue
            row = fields[field]
            ratio = row["on_by_off"]
            figure = f"{ratio['median']:.3f} ({ratio['least']:.3f}-{ratio['most']:.3f})"
            medians = f"{row['on']['median']:,.3f} | {row['off']['median']:,.3f}"
            lines.append(f"| {part}: {field.replace('_', ' ')} | {figure} | {medians} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct", help="for its tokenizer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from loadtest.bench_host import environment

    results = run(args.model, args.rounds)
    print(table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"environment": environment(), **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
