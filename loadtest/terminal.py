"""What a person sees: a bar while it runs, on standard error, and tables when it is done, on standard output."""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from loadtest.driver import Driver
from loadtest.scenario import Scenario

BAR = 24
LINE_S = 10.0  # between lines where standard error is no terminal
REFRESH_S = 0.5


async def watch(driver: Driver, scenario: Scenario, label: str) -> None:
    """Shows progress until it is cancelled."""
    live, tty = driver.live, sys.stderr.isatty()
    period_s, began_s, tokens = (REFRESH_S if tty else LINE_S), time.monotonic(), 0
    try:
        while True:
            await asyncio.sleep(period_s)
            passed_s = time.monotonic() - began_s
            recent, live.first_token_s = live.first_token_s[-1000:], []
            first = f"TTFT P50 {np.median(recent) * 1e3:,.0f} ms" if recent else "TTFT -"
            rate, tokens = (live.tokens - tokens) / period_s, live.tokens
            errors = f", {live.failed:,} failed" if live.failed else ""
            line = (
                f"{label}{_bar(live.ended, scenario, passed_s)} {passed_s:,.0f} s  {live.sent:,} sent,"
                f" {live.ended:,} done{errors},"
                f" {live.sent - live.ended:,} running  {rate:,.0f} tok/s  {first}"
            )
            print(f"\r{line}\x1b[K" if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)
    finally:
        if tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _bar(ended: int, scenario: Scenario, passed_s: float) -> str:
    shares = []
    if scenario.duration_s is not None:
        shares.append(passed_s / scenario.duration_s)
    if scenario.requests is not None:
        shares.append(ended / scenario.requests)
    if not shares:
        return ""
    filled = round(BAR * min(1.0, max(shares)))
    return f"[{'#' * filled}{'-' * (BAR - filled)}]"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head; the first column is text, the others are numbers."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) if place else cell.ljust(width)
                       for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in rows]  # fmt: skip
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:,.2f}" if value < 0.1 else f"{value * 1e3:,.1f}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"


def report(result: dict[str, Any]) -> str:
    """One run."""
    one, scenario = result["summary"], result["scenario"]
    rows = [["latency, ms", "mean", "P50", "P90", "P95", "P99", "max", "n"]]
    for name, key in (("time to first token", "ttft_s"), ("time between tokens", "tbt_s"),
                      ("time per output token", "tpot_s"), ("end to end", "e2e_s")):  # fmt: skip
        figures = one[key]
        rows.append([name, *(ms(figures.get(p)) for p in ("mean", "p50", "p90", "p95", "p99", "max")),
                     f"{figures.get('count', 0):,}"])  # fmt: skip
    tokens, client = one["tokens"], one["client"]
    lines = [
        f"{scenario['name']}: {result['model']} at {result['base_url']}, {load(scenario)}",
        "",
        columns(rows),
        "",
        f"requests      {one['complete']:,} of {one['requests']:,} complete"
        + (f" ({one['warmup_requests']:,} more as warm-up)" if one["warmup_requests"] else "")
        + (f"; offered {number(one['offered_requests_per_s'])}/s" if one["offered_requests_per_s"] else "")
        + f"; done {number(one['requests_per_s'])}/s,"
        f" under load {number(one['requests_per_s_under_load'])}/s",
        f"tokens        output {number(one['output_tokens_per_s'])}/s, under load"
        f" {number(one['output_tokens_per_s_under_load'])}/s; input {number(one['input_tokens_per_s'])}/s",
    ]
    if one["good_share"] is not None:
        lines.append(f"goodput       {number(one['goodput_requests_per_s'])}/s: {one['good_share']:.1%} keep"
                     f" {', '.join(f'{k} {v:g}' for k, v in scenario['slo'].items() if v is not None)}")  # fmt: skip
    if tokens["cached"] is not None:
        promised = tokens["cached_promised"]
        shared = f" ({tokens['cached_where_promised']:,} where {promised:,} are shared)" if promised else ""
        lines.append(f"prefix cache  {tokens['cached']:,} of {tokens['input']:,} prompt tokens cached{shared}")
    lines += [f"failed        {count:,} x {kind}" for kind, count in one["errors"].items()]
    if result["dropped_too_long"]:
        lines.append(f"dropped       {result['dropped_too_long']:,} longer than {result['max_context']:,} tokens")
    if tokens["answers_with_another_input_length"]:
        lines.append(
            f"input length  {tokens['answers_with_another_input_length']:,} prompts counted differently:"
            f" {tokens['input_of_those_asked']:,} tokens where {tokens['input_asked']:,} were meant"
        )
    if tokens["answers_with_another_output_length"]:
        lines.append(f"output length {tokens['answers_with_another_output_length']:,} answers are not as long as asked")
    lines.append(f"client        send lag P99 {ms(client['send_lag_s'].get('p99'))} ms, loop lag P99"
                 f" {ms(client['loop_lag_s'].get('p99'))} ms, {client['cpu_share']:.0%} of a core")  # fmt: skip
    if client["is_bottleneck"]:
        lines.append("WARNING       the client did not keep up: these figures are partly its own")
    if one["interrupted"]:
        lines.append("WARNING       interrupted: the figures are those until then")
    return "\n".join(lines)


def load(scenario: dict[str, Any]) -> str:
    """In words."""
    spec = scenario["load"]
    if spec["kind"] == "closed":
        return f"{spec['concurrency']} users"
    if spec["kind"] == "replay":
        return f"replayed {spec['speed']:g} times as fast"
    gaps = spec["gaps"] + (f" ({spec['burstiness']:g})" if spec["gaps"] == "gamma" else "")
    rising = f" to {spec['end_rate']:g}" if spec["end_rate"] is not None else ""
    return f"{spec['rate']:g}{rising} requests/s, {gaps}"
