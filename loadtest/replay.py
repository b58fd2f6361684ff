"""An open loop: requests leave when they are due, whatever the server does; a late one shows as the client's own lag.

So time to first token counts from when a request was due, not from when it was sent. A gap is the time between two
arrivals of tokens of one stream; tokens that arrive together are one arrival, and ``tokens_per_arrival`` says how many.
"""

import asyncio
import csv
import gc
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.figures import percentiles
from loadtest.streams import CLOSED, COMPLETE, Stream, completion

TICK_S = 0.02  # how often the client asks itself how late it is
LATE_S = 0.005  # a P99 of lag above this: the client does not keep up, and its figures are not the server's


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a trace. ``due_s`` counts from the first one."""

    due_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Timed:
    """A request that is ready to be sent ``due_s`` after the start."""

    due_s: float
    body: bytes
    output_tokens: int


@dataclass(slots=True)
class Replay:
    """What was seen. ``start_s``: when the first request was due, by time.monotonic."""

    streams: list[Stream]
    start_s: float
    duration_s: float
    not_sent: int
    tick_lags_s: list[float]
    cpu_s: float


def read_trace(path: Path, count: int) -> list[Row]:
    """The first ``count`` requests of an Azure trace: TIMESTAMP, ContextTokens, GeneratedTokens."""
    with path.open(newline="") as file:
        lines = [line for line, _ in zip(csv.DictReader(file), range(count), strict=False)]
    times = [datetime.fromisoformat(line["TIMESTAMP"][:26]) for line in lines]  # it knows no more than microseconds
    return [
        Row((moment - times[0]).total_seconds(), int(line["ContextTokens"]), int(line["GeneratedTokens"]))
        for moment, line in zip(times, lines, strict=True)
    ]


def fitting(rows: Sequence[Row], max_model_len: int) -> list[Row]:
    """Those that the served context has room for."""
    return [row for row in rows if row.prompt_tokens + row.output_tokens <= max_model_len]


def prepare(rows: Sequence[Row], speed: float, *, seed: int, vocabulary: int, **fields: Any) -> list[Timed]:
    """Requests with random prompts, due ``speed`` times as fast as in the trace. ``fields`` go into every body."""
    source = np.random.default_rng(seed)
    return [
        Timed(
            row.due_s / speed,
            completion(source.integers(0, vocabulary, row.prompt_tokens).tolist(), row.output_tokens, **fields),
            row.output_tokens,
        )
        for row in rows
    ]


async def replay(port: int, requests: Sequence[Timed], *, limit_s: float) -> Replay:
    """Sends all requests in time, and returns once all have ended; after ``limit_s`` what is left is closed."""
    streams: list[Stream] = []
    tasks: list[asyncio.Task[Stream]] = []
    lags: list[float] = []
    gc.collect()
    gc.disable()  # a collection of all that is remembered here would hold up every stream
    cpu_s = time.process_time()
    start_s = time.monotonic() + TICK_S

    async def send() -> None:
        for request in requests:
            due_s = start_s + request.due_s
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            stream = Stream(request.body)
            stream.due_s = due_s
            streams.append(stream)
            tasks.append(asyncio.create_task(stream.run(port)))

    async def tick() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            lags.append(time.monotonic() - before - TICK_S)

    async def all_ended() -> None:
        await send()
        await asyncio.gather(*tasks)

    ticker = asyncio.create_task(tick())
    try:
        await asyncio.wait_for(all_ended(), limit_s + TICK_S)
    except TimeoutError:
        for stream in streams:
            stream.close()
        await asyncio.gather(*tasks, return_exceptions=True)  # they were cancelled, or end with their connection
    finally:
        ticker.cancel()
        gc.enable()
    duration_s = time.monotonic() - start_s
    return Replay(streams, start_s, duration_s, len(requests) - len(streams), lags, time.process_time() - cpu_s)


def summary(result: Replay, requests: Sequence[Timed]) -> dict[str, Any]:
    """Seconds throughout. Latencies are those of complete answers and of what the others gave until they ended."""
    streams = result.streams
    complete = [stream for stream in streams if stream.outcome == COMPLETE]
    unfinished = sum(stream.outcome == CLOSED for stream in streams)
    first_s = [stream.arrivals[0] - stream.due_s for stream in streams if stream.arrivals]
    gaps = [np.diff(stream.arrivals) for stream in streams if len(stream.arrivals) > 1]
    arrivals = np.concatenate([np.array(stream.arrivals) for stream in streams]) if streams else np.empty(0)
    tokens = sum(stream.tokens for stream in streams)
    span_s = requests[-1].due_s
    busy_s = max((stream.ended_s or 0.0 for stream in streams), default=0.0) - result.start_s
    loaded = float((arrivals <= result.start_s + span_s).mean()) * tokens if len(arrivals) else 0.0
    lag = percentiles([stream.sent_s - stream.due_s for stream in streams if stream.sent_s is not None])
    loop_lag = percentiles(result.tick_lags_s)
    wrong = sum(stream.tokens != request.output_tokens for stream, request in zip(streams, requests, strict=False)
                if stream.outcome == COMPLETE)  # fmt: skip
    stopped = f"time limit: {unfinished} unfinished, {result.not_sent} not sent" if unfinished + result.not_sent else ""
    return {
        "requests": len(requests),
        "complete": len(complete),
        "unfinished": unfinished,
        "not_sent": result.not_sent,
        "stopped_early": stopped,
        "errors": dict(Counter(stream.outcome for stream in streams if stream.outcome not in (COMPLETE, CLOSED))),
        "ended_once": all(stream.endings == 1 for stream in streams if stream.outcome != CLOSED),
        "wrong_token_counts": wrong,
        "offered_requests_per_s": len(requests) / span_s if span_s else None,
        "duration_s": busy_s,
        "requests_per_s": len(complete) / busy_s,
        "output_tokens_per_s": tokens / busy_s,
        # until the last request was due: without the tail, in which fewer and fewer run
        "output_tokens_per_s_while_arriving": loaded / span_s if span_s else None,
        "time_to_first_token_s": percentiles(first_s),
        "time_between_tokens_s": percentiles(np.concatenate(gaps) if gaps else []),
        "end_to_end_s": percentiles([(stream.ended_s or 0.0) - stream.due_s for stream in complete]),
        "tokens_per_arrival": tokens / len(arrivals) if len(arrivals) else None,
        "client": {
            "send_lag_s": lag,
            "loop_lag_s": loop_lag,
            "cpu_share": result.cpu_s / result.duration_s,
            "is_bottleneck": max(lag.get("p99", 0.0), loop_lag.get("p99", 0.0)) > LATE_S,
        },
    }  # fmt: skip


def table(summaries: dict[float, dict[str, Any]]) -> str:
    """A Markdown table, one row a speed."""

    def ms(values: dict[str, float]) -> str:
        return " / ".join(f"{values[name] * 1e3:,.1f}" for name in ("p50", "p90", "p99")) if values else "-"

    lines = [
        "| speed | requests/s offered / done | output tok/s while arriving | TTFT ms P50 / P90 / P99"
        " | TBT ms P50 / P90 / P99 | complete, errors | client lag ms P50 / P90 / P99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for speed, one in summaries.items():
        errors = ", ".join(f"{count} {kind}" for kind, count in one["errors"].items())
        ended = f"{one['complete']} of {one['requests']}" + (f", {errors}" if errors else "")
        if one["stopped_early"]:
            ended += f", {one['stopped_early']}"
        lag = ms(one["client"]["send_lag_s"]) + (" (bottleneck)" if one["client"]["is_bottleneck"] else "")
        lines.append(
            f"| {speed:g} | {one['offered_requests_per_s'] or 0:.1f} / {one['requests_per_s']:.1f} |"
            f" {one['output_tokens_per_s_while_arriving'] or 0:,.0f} | {ms(one['time_to_first_token_s'])} |"
            f" {ms(one['time_between_tokens_s'])} | {ended} | {lag} |"
        )
    return "\n".join(lines)
