"""A trace replayed at rising speed on a ``mizzen serve`` of one's own, with a report to keep (docs/loadtest.md).

    python -m loadtest.gpu.traces MODEL_FOLDER --trace FILE --trace-format azure --requests 1000 --speeds 1,2,4 \
        [--limit-s 150] [--total-s 480] [--set NAME=VALUE ...] --out loadtest/results/azure-14b

Starts the server (dummy weights unless --set load_format=... says otherwise) and writes OUT.json, OUT.html and OUT.log,
after each speed what it has. Prompts are token ids; each speed has other ones, so that no run finds the prefixes of the
one before. SIGTERM or Ctrl-C ends the speed that runs and still gives its figures.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from loadtest import modes, process, report, terminal, traces
from loadtest.arrivals import Closed, Replay
from loadtest.client import Target
from loadtest.offline import environment, parse_setting
from loadtest.run import FORMAT, Options, run
from loadtest.scenario import Scenario, Trace, convert
from loadtest.served import Served, vocabulary

WARM_UP_REQUESTS = 16  # the trace's first, at once and before all: what a first batch costs is no part of a speed
LEAST_S = 10.0  # less is not worth to begin a speed with
STOP_S = 15.0  # of --total-s, for the server's end and the report
# As the field's benchmarks sample; ids come back because text is held back while a character is incomplete.
FIELDS = {"temperature": 0.6, "return_token_ids": True}


def at_speed(scenario: Scenario, number: int, speed: float, span_s: float, limit_s: float) -> Scenario:
    """The scenario's run at ``speed``, which is over after ``limit_s``: rows due later than that, or than the
    scenario's own duration, are left out, and what has not ended by then is cut off. ``span_s``: of the trace's rows,
    by their own clock."""
    longest_s = min(limit_s, scenario.duration_s or limit_s)
    cut = span_s / speed >= longest_s
    load_s = longest_s if cut else span_s / speed
    drain_s = max(1.0, min(scenario.drain_s, limit_s - load_s))
    return replace(
        scenario,
        load=Replay(speed),
        seed=scenario.seed + number,
        duration_s=longest_s if cut else None,
        drain_s=drain_s,
    )


def counted(result: dict[str, Any], rows: int) -> dict[str, Any]:
    """With how many of the trace's rows were not sent, for want of time."""
    one = result["summary"]
    left = rows - result["dropped_too_long"] - one["requests"] - one["warmup_requests"]
    return {**result, "rows": rows, "not_sent": left}


def write(out: Path, result: dict[str, Any]) -> None:
    runs = result["runs"]
    result |= {"knee": modes.knee(runs), "saturated_from": modes.saturated_from(runs)}
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".html").write_text(report.render(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--trace-format", choices=["azure", "mooncake", "bailian"], required=True)
    parser.add_argument("--speeds", default="1,2,4", help="rising")
    parser.add_argument("--requests", type=int, default=1000, help="rows of the trace")
    parser.add_argument("--duration", type=float, help="of each speed: rows due later are left out")
    parser.add_argument("--limit-s", type=float, default=600.0, help="longest run of one speed; then it is cut off")
    parser.add_argument("--total-s", type=float, default=86400.0, help="of everything, the server's start included")
    parser.add_argument("--warmup", type=float, default=0.0, help="seconds of each speed to leave out of its figures")
    parser.add_argument("--drain", type=float, default=60.0, help="longest wait for answers after the last row was due")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tbt-ms", type=float, default=100.0)
    parser.add_argument("--ready-s", type=float, default=180.0, help="longest start of the server")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args, began_s = parse(), time.monotonic()
    rows = traces.read(Trace(str(args.trace), args.trace_format), args.requests)
    scenario = convert({
        "name": args.out.name, "about": f"{args.trace.name} on {args.model.name}", "endpoint": "completions",
        "prompt": "tokens", "vocabulary": vocabulary(args.model), "requests": args.requests,
        "duration_s": args.duration, "warmup_s": args.warmup, "drain_s": args.drain, "extra_body": FIELDS,
        "workload": {"kind": "trace", "path": str(args.trace), "format": args.trace_format},
        "slo": {"ttft_ms": args.ttft_ms, "tbt_ms": args.tbt_ms},
    })  # fmt: skip
    # Nothing is refused for want of room in the queue: waiting shows as time to first token.
    settings = {"load_format": "dummy", "max_queued_requests": len(rows), **dict(map(parse_setting, args.set))}
    speeds = sorted(float(speed) for speed in args.speeds.split(","))
    runs: list[dict[str, Any]] = []
    result: dict[str, Any] = {"format": FORMAT, "mode": "sweep", "settings": settings, "runs": runs, "skipped": []}
    with Served(args.model, args.out.with_suffix(".log"), **settings) as server:
        result["start"] = server.wait_ready(args.ready_s)
        print(f"ready after {result['start']['seconds']} s: {result['start']['phases']}", flush=True)
        options = Options(
            Target(f"http://127.0.0.1:{server.port}"),
            metrics_url=f"http://127.0.0.1:{server.health_port}/metrics",
            watch=process.watch,
        )
        count = min(WARM_UP_REQUESTS, len(rows))
        first = replace(scenario, load=Closed(count), requests=count, seed=scenario.seed + len(speeds))
        process.start(run(replace(first, duration_s=None, warmup_s=0.0), options, "warm-up "))
        for number, speed in enumerate(speeds):
            left_s = began_s + args.total_s - STOP_S - time.monotonic()
            if left_s < LEAST_S or modes.interrupted(runs):
                result["skipped"].append(speed)
                continue
            server.wait_idle(60.0)
            one = at_speed(scenario, number, speed, rows[-1].due_s, min(args.limit_s, left_s))
            runs.append(counted(process.start(run(one, options, f"speed {speed:g} ")), len(rows)))
            write(args.out, result)
            print(terminal.report(runs[-1]))
            print(f"not sent      {runs[-1]['not_sent']:,} rows, for want of time\n", flush=True)
        result["exit_code"] = server.stop()
    if not runs:
        raise SystemExit("no speed could begin within --total-s")
    result["server_environment"] = environment()  # last: it opens the GPU
    write(args.out, result)
    print(terminal.table(result))
    if result["skipped"]:
        print(f"skipped       speeds {', '.join(f'{speed:g}' for speed in result['skipped'])}: no time was left")


if __name__ == "__main__":
    main()
