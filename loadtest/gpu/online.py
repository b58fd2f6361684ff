"""A trace of requests replayed over HTTP at rising speed: time to first token and between tokens against throughput.

    python -m loadtest.gpu.online MODEL_FOLDER --trace .device/azure_conv_2000.csv --speeds 2,4,8 \
        [--requests 1000] [--set NAME=VALUE ...] --json FILE

Starts ``mizzen serve`` (dummy weights unless --set load_format=... says otherwise) and measures its start too. Prompts
are random tokens, each speed's its own, so that no prefix cache can help. The server's log lies beside the JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import uvloop

from loadtest.offline import environment, parse_setting
from loadtest.replay import fitting, prepare, read_trace, replay, summary, table
from loadtest.served import Served, vocabulary

WARM_UP_REQUESTS = 32  # with the first lengths of the trace, at once
FIELDS = {"temperature": 0.6}
COUNTERS = ("mizzen_steps_total", "mizzen_preemptions_total", "mizzen_generation_tokens_total",
            "mizzen_prefix_cache_hits_total")  # fmt: skip


def counters(served: Served) -> dict[str, float]:
    scrape = served.metrics()
    return {name: scrape.total(name) for name in COUNTERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--speeds", default="2,4,8")
    parser.add_argument("--limit-s", type=float, default=180.0, help="longest run of one speed; then it is cut short")
    parser.add_argument("--ready-s", type=float, default=180.0, help="longest start of the server")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    rows = read_trace(args.trace, args.requests)
    # Nothing is refused for want of room in the queue: waiting shows as time to first token.
    settings = {"load_format": "dummy", "max_queued_requests": len(rows), **dict(map(parse_setting, args.set))}
    result: dict[str, Any] = {"model": args.model.name, "settings": settings, "trace": args.trace.name, "speeds": {}}
    with Served(args.model, args.json.with_suffix(".log"), **settings) as served:
        result["start"] = served.wait_ready(args.ready_s)
        print(f"ready after {result['start']['seconds']} s: {result['start']['phases']}", flush=True)
        kept = fitting(rows, served.max_model_len())
        result["dropped_too_long"] = len(rows) - len(kept)
        drawn_from = vocabulary(args.model)
        warm_up = prepare(kept[:WARM_UP_REQUESTS], 1e9, seed=0, vocabulary=drawn_from, **FIELDS)
        uvloop.run(replay(served.port, warm_up, limit_s=args.limit_s))
        for number, speed in enumerate(map(float, args.speeds.split(",")), 1):
            served.wait_idle(60.0)
            before = counters(served)
            requests = prepare(kept, speed, seed=number, vocabulary=drawn_from, **FIELDS)
            seen = summary(uvloop.run(replay(served.port, requests, limit_s=args.limit_s)), requests)
            served.wait_idle(60.0)
            seen["server"] = {name: value - before[name] for name, value in counters(served).items()}
            result["speeds"][speed] = seen
            args.json.write_text(json.dumps(result, indent=1) + "\n")  # a run that is cut off leaves what it had
            print(table({speed: seen}).splitlines()[-1], flush=True)
        result["exit_code"] = served.stop()
    result["environment"] = environment()  # last: it opens the GPU
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nstart {result['start']['seconds']} s; {result['dropped_too_long']} requests too long for the context")
    print(table(result["speeds"]))


if __name__ == "__main__":
    main()
