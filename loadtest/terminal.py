"""What a person sees: a bar while it runs, on standard error, and tables when it is done, on standard output."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from loadtest.client import UNFINISHED
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
                f"{label}{_bar(driver, scenario, passed_s)} {passed_s:,.0f} s  {live.sent:,} sent,"
                f" {live.ended:,} done{errors},"
                f" {live.sent - live.ended:,} running  {rate:,.0f} tok/s  {first}"
            )
            print(f"\r{line}\x1b[K" if tty else line, end="" if tty else "\n", file=sys.stderr, flush=True)
    finally:
        if tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _bar(driver: Driver, scenario: Scenario, passed_s: float) -> str:
    shares = []
    if scenario.duration_s is not None:
        shares.append(passed_s / scenario.duration_s)
    if driver.live.planned:
        shares.append(driver.live.conversations / driver.live.planned)
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
        lines.append(f"WARNING       {slow_client(client)}: these figures are partly its own")
    if one["errors"].get(UNFINISHED):
        lines.append(f"WARNING       {cut_off(one)}")
    if one["interrupted"]:
        lines.append("WARNING       interrupted: the figures are those until then")
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    """Whatever a command found."""
    return TABLES[result["mode"]](result)


def _repeated(result: dict[str, Any]) -> str:
    runs = result["runs"]
    parts = [report(one) for one in runs]
    if len(runs) > 1:
        rows = [["over repetitions", "mean", "95% from", "to"]]
        for name, known in result["figures"].items():
            show = ms if name.startswith(("T", "E")) else number
            rows.append([name + (", ms" if show is ms else ""), *(show(known[key]) for key in ("mean", "low", "high"))])
        parts.append(columns(rows))
    return "\n\n".join(parts)


def curve(runs: Sequence[dict[str, Any]], notes: Sequence[str]) -> str:
    """A line a run: throughput against latency."""
    rows = [["load", "req/s", "out tok/s", "TTFT P50", "P90", "P99 ms", "TBT P50", "P90", "P99 ms", "failed", "  "]]
    for one, note in zip(runs, notes, strict=True):
        figures = one["summary"]
        rows.append([
            load(one["scenario"]), number(figures["requests_per_s_under_load"]),
            number(figures["output_tokens_per_s_under_load"]),
            *(ms(figures[key].get(p)) for key in ("ttft_s", "tbt_s") for p in ("p50", "p90", "p99")),
            f"{sum(figures['errors'].values()):,}",
            note
            + (" cut off" if figures["errors"].get(UNFINISHED) else "")
            + (" client too slow" if figures["client"]["is_bottleneck"] else ""),
        ])  # fmt: skip
    return columns(rows)


def _sweep(result: dict[str, Any]) -> str:
    runs, notes = result["runs"], [""] * len(result["runs"])
    if result["knee"] is not None:
        notes[result["knee"]] = "< knee"
    if result["saturated_from"] is not None:
        notes[result["saturated_from"]] += " < saturated"
    lines = [curve(runs, notes), ""]
    if result["knee"] is not None:
        lines.append(
            f"knee          {load(runs[result['knee']]['scenario'])}: the most output for its end-to-end latency"
        )
    if result["saturated_from"] is not None:
        lines.append(
            f"saturated     from {load(runs[result['saturated_from']]['scenario'])}: answers less than is offered"
        )
    return "\n".join(lines)


def _search(result: dict[str, Any]) -> str:
    limits = {key: value for key, value in result["runs"][0]["scenario"]["slo"].items() if value is not None}
    said = ", ".join(f"{key.removesuffix('_ms').upper()} {value:g} ms" for key, value in limits.items())
    best, missed = result["highest_rate"], result["lowest_missed_rate"]
    found = "no rate that was tried keeps it" if best is None else f"{best:.3g} requests/s"
    if missed is not None:
        found += f" ({missed:.3g} does not)"
    notes = ["keeps it" if not why else "; ".join(why) for why in result["misses"]]
    return f"{curve(result['runs'], notes)}\n\n{result['percentile'].upper()} of {said}: {found}"


def _compare(result: dict[str, Any]) -> str:
    a, b = result["names"]
    rows = [[f"{b} over {a}", "ratio", "95% from", "to", b]]
    for name, ratio in result["ratios"].items():
        rows.append([name, *(f"{ratio[key]:.3f}" if key in ratio else "-" for key in ("mean", "low", "high")),
                     ratio["b_is"]])  # fmt: skip
    half = len(result["runs"]) // 2
    notes = [a] * half + [b] * half
    return f"{curve(result['runs'], notes)}\n\n{columns(rows)}"


def _soak(result: dict[str, Any]) -> str:
    (one,) = result["runs"]
    rows = [["from, s", "requests", "failed", "out tok/s", "TTFT P50", "P99 ms", "TBT P50", "P99 ms"]]
    for window in one["windows"]:
        rows.append([f"{window['at_s']:,.0f}", f"{window['requests']:,}", f"{window['failed']:,}",
                     number(window["output_tokens_per_s"]),
                     *(ms(window[key].get(p)) for key in ("ttft_s", "tbt_s") for p in ("p50", "p99"))])  # fmt: skip
    drift = ", ".join(f"{name} x{ratio:.3f}" for name, ratio in result["drifts"].items())
    verdict = "steady" if result["steady"] else f"NOT STEADY within {result['tolerance']:.0%}"
    return f"{report(one)}\n\n{columns(rows)}\n\n{verdict}: the last third over the first: {drift}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "run": _repeated, "sweep": _sweep, "search": _search, "compare": _compare, "soak": _soak,
}  # fmt: skip


def cut_off(one: dict[str, Any]) -> str:
    count = one["errors"][UNFINISHED]
    return f"{count:,} answers were cut off by the run's end (drain_s): true latencies are higher than these"


def slow_client(client: dict[str, Any]) -> str:
    return "the client did not keep up" + (", for others keep its machine busy" if client["machine_is_busy"] else "")


def load(scenario: dict[str, Any]) -> str:
    """In words."""
    spec = scenario["load"]
    if spec["kind"] == "closed":
        return f"{spec['concurrency']} users"
    if spec["kind"] == "replay":
        return f"replayed at speed {spec['speed']:g}"
    gaps = spec["gaps"] + (f" ({spec['burstiness']:g})" if spec["gaps"] == "gamma" else "")
    rising = f" to {spec['end_rate']:g}" if spec["end_rate"] is not None else ""
    return f"{spec['rate']:g}{rising} requests/s, {gaps}"
