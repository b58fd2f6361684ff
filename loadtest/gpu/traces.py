"""A trace replayed at rising speed on a ``mizzen serve`` of one's own, with a report to keep (docs/loadtest.md).

    python -m loadtest.gpu.traces MODEL_FOLDER --trace FILE --trace-format mooncake --speeds 1,2,4 \
        [--requests 2000] [--duration 120] [--warmup 20] [--set NAME=VALUE ...] --out loadtest/results/mooncake-14b

Starts the server (dummy weights unless --set load_format=... says otherwise) and writes OUT.json, OUT.html and OUT.log.
Prompts are token ids; each speed has other ones, so that no run finds the prefixes of the one before.
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from loadtest import modes, report, terminal
from loadtest.client import Target
from loadtest.offline import parse_setting
from loadtest.run import FORMAT, Options, run
from loadtest.scenario import Scenario, convert
from loadtest.served import Served, vocabulary


async def replays(scenario: Scenario, options: Options, speeds: list[float], seen: list[dict[str, Any]]) -> None:
    for number, speed in enumerate(speeds):
        load = msgspec.structs.replace(scenario.load, speed=speed)
        one = msgspec.structs.replace(scenario, load=load, seed=scenario.seed + number)
        seen.append(await run(one, options, f"speed {speed:g} "))
        print(terminal.report(seen[-1]), end="\n\n", flush=True)
        await asyncio.sleep(modes.PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--trace-format", choices=["azure", "mooncake", "bailian"], required=True)
    parser.add_argument("--speeds", default="1,2,4")
    parser.add_argument("--requests", type=int, default=2000, help="rows of the trace")
    parser.add_argument("--duration", type=float, help="of one speed; by default until the last row is due")
    parser.add_argument("--warmup", type=float, default=10.0)
    parser.add_argument("--drain", type=float, default=60.0)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tbt-ms", type=float, default=100.0)
    parser.add_argument("--ready-s", type=float, default=180.0, help="longest start of the server")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    scenario = convert({
        "name": args.out.name, "about": f"{args.trace.name} on {args.model.name}", "endpoint": "completions",
        "prompt": "tokens", "vocabulary": vocabulary(args.model), "requests": args.requests,
        "duration_s": args.duration, "warmup_s": args.warmup, "drain_s": args.drain,
        "workload": {"kind": "trace", "path": str(args.trace), "format": args.trace_format},
        "load": {"kind": "replay"}, "slo": {"ttft_ms": args.ttft_ms, "tbt_ms": args.tbt_ms},
    })  # fmt: skip
    settings = {"load_format": "dummy", "max_queued_requests": args.requests, **dict(map(parse_setting, args.set))}
    runs: list[dict[str, Any]] = []
    with Served(args.model, args.out.with_suffix(".log"), **settings) as server:
        started = server.wait_ready(args.ready_s)
        print(f"ready after {started['seconds']} s: {started['phases']}", flush=True)
        options = Options(
            Target(f"http://127.0.0.1:{server.port}"), metrics_url=f"http://127.0.0.1:{server.health_port}/metrics"
        )
        try:
            uvloop.run(replays(scenario, options, [float(speed) for speed in args.speeds.split(",")], runs))
        finally:  # a run that is cut off leaves what it had
            if runs:
                found = {"knee": modes.knee(runs), "saturated_from": modes.saturated_from(runs)}
                result = {
                    "format": FORMAT,
                    "mode": "sweep",
                    "runs": runs,
                    **found,
                    "start": started,
                    "settings": settings,
                }
                args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
                args.out.with_suffix(".html").write_text(report.render(result))
                print(terminal.table(result))
        server.stop()


if __name__ == "__main__":
    main()
