"""One HTML file that says all of a result by itself: no script, no font, no picture from elsewhere."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from loadtest import terminal
from loadtest.client import UNFINISHED
from loadtest.plots import Plot, ratios

STYLE = """
:root{color-scheme:light}
body{font:15px/1.45 system-ui,sans-serif;color:#1e293b;background:#fff;max-width:1180px;margin:24px auto;padding:0 20px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px;border-top:1px solid #e2e8f0;padding-top:18px}
.sub{color:#475569;margin:0 0 14px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(480px,1fr));gap:14px}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.card{border:1px solid #e2e8f0;border-radius:8px;padding:8px 14px}
.card b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.card span{color:#475569;font-size:13px}
.warn{background:#fef3c7;border:1px solid #f59e0b;border-radius:8px;padding:8px 14px;margin:8px 0}
figure{margin:0;border:1px solid #e2e8f0;border-radius:8px;padding:10px}figcaption{font-weight:600;margin-bottom:4px}
svg{width:100%;height:auto;font:11px system-ui,sans-serif}svg text{fill:#475569}svg .title{fill:#1e293b;font-size:12px}
svg line.grid{stroke:#eef2f7}svg .axis{stroke:#64748b;fill:none}svg .line{fill:none;stroke-width:1.8}
svg .one{stroke:#1e293b}svg .bar{fill:#60a5fa}svg .mark{stroke:#dc2626;stroke-dasharray:3 3}
svg .marked{fill:#b91c1c}
svg .shade{fill:#f1f5f9}.none{color:#64748b}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{text-align:right;padding:3px 10px}
th{border-bottom:1px solid #94a3b8;font-weight:600}td:first-child,th:first-child{text-align:left}
tr:nth-child(even) td{background:#f8fafc}
pre{background:#f8fafc;border:1px solid #e2e8f0;border-radius:8px;padding:10px;overflow:auto;font-size:12px}
details{margin-top:14px}summary{cursor:pointer;font-weight:600}
"""
TITLES = {"run": "Load test", "sweep": "Sweep", "search": "Search for the highest rate", "compare": "Comparison",
          "soak": "Soak"}  # fmt: skip
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "max")


def render(result: dict[str, Any]) -> str:
    """The page of a result as ``--json`` writes it."""
    runs = result["runs"]
    first, mode = runs[0], result["mode"]
    scenario = first["scenario"]
    title = f"{TITLES[mode]}: {scenario['name']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">{escape(first["model"])} at {escape(first["base_url"])}, {escape(first["began"])}'
        f"{escape('. ' + scenario['about'] if scenario['about'] else '')}</p>",
    ]
    if mode == "run" and len(runs) == 1:
        parts.append(_one(first))
    elif mode == "soak":
        parts += [_verdict(result), _one(first)]
    else:
        parts += [f"<pre>{escape(terminal.table(result))}</pre>"]
        if mode in ("sweep", "search"):
            parts.append(_curves(result))
        if mode == "compare":
            parts.append(_ratios(result))
        for place, one in enumerate(runs):
            label = one["label"].strip() or f"run {place + 1}"
            named = escape(f"{label}: {terminal.load(one['scenario'])}")
            parts.append(f"<details><summary>{named}</summary>{_one(one)}</details>")
    parts.append(_reproduce(result))
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _verdict(result: dict[str, Any]) -> str:
    drift = ", ".join(f"{name} x{ratio:.3f}" for name, ratio in result["drifts"].items())
    state = "Steady" if result["steady"] else f"Not steady within {result['tolerance']:.0%}"
    return (
        f'<p class="{"sub" if result["steady"] else "warn"}"><b>{state}.</b> The last third over the first: {drift}</p>'
    )


def _one(run: dict[str, Any]) -> str:
    one = run["summary"]
    plots = [*_over_time(run), *_server(run), *_histograms(run)]
    drawn = "".join(plot.svg() for plot in plots)
    return f"""{_cards(run)}{_warnings(run)}{_latencies(one)}{_around(one)}
<h2>Over time</h2><p class="sub">Grey is not measured: warm-up before, and after the load has ended. Requests stand
where they were due, tokens where they arrived.</p><div class="plots">{drawn}</div>"""


def _cards(run: dict[str, Any]) -> str:
    one = run["summary"]
    number, ms = terminal.number, terminal.ms
    failed = sum(one["errors"].values())
    cards = [
        (terminal.load(run["scenario"]), "load"),
        (f"{one['complete']:,} of {one['requests']:,}", "requests complete"),
        (f"{number(one['requests_per_s_under_load'])}/s", "requests, under load"),
        (f"{number(one['output_tokens_per_s_under_load'])}/s", "output tokens, under load"),
        (f"{ms(one['ttft_s'].get('p50'))} / {ms(one['ttft_s'].get('p90'))} ms", "TTFT P50 / P90"),
        (f"{ms(one['tbt_s'].get('p50'))} / {ms(one['tbt_s'].get('p90'))} ms", "TBT P50 / P90"),
    ]
    if one["good_share"] is not None:
        cards.append((f"{number(one['goodput_requests_per_s'])}/s, {one['good_share']:.1%}", "goodput"))
    if one["tokens"]["cached_share"] is not None:
        cards.append((f"{one['tokens']['cached_share']:.1%}", "of prompt tokens cached"))
    if failed:
        cards.append((f"{failed:,}", "failed"))
    return '<div class="cards">' + "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in cards
    ) + "</div>"  # fmt: skip


def _warnings(run: dict[str, Any]) -> str:
    one, client = run["summary"], run["summary"]["client"]
    found = []
    if client["is_bottleneck"]:
        send, loop = (terminal.ms(client[key].get("p99")) for key in ("send_lag_s", "loop_lag_s"))
        found.append(
            f"{terminal.slow_client(client).capitalize()} (send lag P99 {send} ms, loop lag P99 {loop} ms,"
            f" {client['cpu_share']:.0%} of a core): these figures are partly its own."
        )
    if one["errors"].get(UNFINISHED):
        found.append(f"{terminal.cut_off(one).capitalize()}.")
    if one["interrupted"]:
        found.append("The run was interrupted: the figures are those until then.")
    if one["errors"]:
        found.append("Failed: " + ", ".join(f"{count:,} x {kind}" for kind, count in one["errors"].items()))
    if run.get("not_sent"):
        found.append(f"{run['not_sent']:,} rows of the trace were not sent, for want of time.")
    if run["dropped_too_long"]:
        found.append(f"{run['dropped_too_long']:,} prompts were left out: longer than {run['max_context']:,} tokens.")
    return "".join(f'<p class="warn">{escape(text)}</p>' for text in found)


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def _latencies(one: dict[str, Any]) -> str:
    rows = [["Latency, ms", "mean", "P50", "P90", "P95", "P99", "max", "count"]]
    for name, key in (("Time to first token (TTFT)", "ttft_s"), ("Time between tokens (TBT)", "tbt_s"),
                      ("Time per output token (TPOT)", "tpot_s"), ("End to end (E2E)", "e2e_s")):  # fmt: skip
        rows.append([name, *(terminal.ms(one[key].get(p)) for p in PERCENTILES), f"{one[key].get('count', 0):,}"])
    return table(rows)


def _around(one: dict[str, Any]) -> str:
    """What latencies cannot be read without: what was offered, over which time, and the client's own lag."""
    ms, number, client = terminal.ms, terminal.number, one["client"]
    offered = one["offered_requests_per_s"]
    text = (
        f"Load {number(one['load_s'])} s"
        + (f", {number(offered)} requests/s offered" if offered else "")
        + f"; until the last answer's end {number(one['requests_per_s'])} requests/s and"
        f" {number(one['output_tokens_per_s'])} output tokens/s. Client: send lag P99"
        f" {ms(client['send_lag_s'].get('p99'))} ms, loop lag P99 {ms(client['loop_lag_s'].get('p99'))} ms,"
        f" {client['cpu_share']:.0%} of a core."
    )
    return f'<p class="sub">{escape(text)}</p>'


def _timed(run: dict[str, Any], title: str, y_title: str, *, log_y: bool = False) -> Plot:
    start_s, end_s = run["measured_s"]
    plot = Plot(title, "seconds since the start", y_title, log_y=log_y)
    plot.shades = [(0.0, start_s, "warm-up"), (end_s, 1e12, "after the load")]
    return plot


def _over_time(run: dict[str, Any]) -> list[Plot]:
    line = run["timeline"]
    half = line["bin_s"][0] / 2
    at = [start + half for start in line["at_s"]]
    throughput = _timed(run, "Output tokens", "tokens a second")
    throughput.line("output tokens", at, line["output_tokens_per_s"])
    requests = _timed(run, "Requests", "requests a second")
    for name in ("due", "complete", "failed"):
        if name != "failed" or any(line[name]):
            requests.line(name, at, [value / line["bin_s"][0] for value in line[name]])
    plots = [throughput, requests]
    for title, key in (("Time to first token", "ttft"), ("Time between tokens", "tbt")):
        plot = _timed(run, f"{title}, percentiles over time", "milliseconds (logarithmic)", log_y=True)
        for name in ("p50", "p90", "p99"):
            values = [None if value is None else value * 1e3 for value in line[f"{key}_{name}_s"]]
            plot.line(name.upper(), at, values)
        plot.levels = _limit(run, key)
        plots.append(plot)
    flight = _timed(run, "Requests in flight, as the client sees it", "requests")
    flight.line("in flight", at, line["in_flight"])
    return [*plots, flight]


def _limit(run: dict[str, Any], key: str) -> list[tuple[float, str]]:
    """Of the SLO."""
    value = run["scenario"]["slo"][f"{key}_ms"]
    return [] if value is None else [(value, f"SLO {value:g} ms")]


def _server(run: dict[str, Any]) -> list[Plot]:
    line = run["server"].get("timeline")
    if not line:
        return []
    at, plots = line["at_s"], []
    if "running" in line:
        queue = _timed(run, "Server: running and waiting requests", "requests")
        for name in ("running", "waiting"):
            if name in line:
                queue.line(name, at, line[name])
        plots.append(queue)
    if "kv_usage" in line:
        usage = _timed(run, "Server: KV cache in use", "percent of its pages")
        usage.y_max = 100.0
        usage.line("KV cache", at, [None if value is None else value * 100 for value in line["kv_usage"]])
        plots.append(usage)
    if "step_tokens_per_s" in line and "steps_per_s" in line:
        batch = _timed(run, "Server: tokens a step", "tokens")
        pairs = zip(line["step_tokens_per_s"], line["steps_per_s"], strict=True)
        batch.line(
            "tokens a step", at, [tokens / steps if tokens is not None and steps else None for tokens, steps in pairs]
        )
        plots.append(batch)
    if "prefix_hits_per_s" in line and "prefix_queries_per_s" in line:
        hits = _timed(run, "Server: prefix cache hits", "percent of prompt tokens")
        hits.y_max = 100.0
        pairs = zip(line["prefix_hits_per_s"], line["prefix_queries_per_s"], strict=True)
        hits.line("hits", at, [100 * hit / asked if hit is not None and asked else None for hit, asked in pairs])
        plots.append(hits)
    return plots


def _histograms(run: dict[str, Any]) -> list[Plot]:
    plots = []
    for title, key in (("Time to first token", "ttft_s"), ("Time between tokens", "tbt_s"), ("End to end", "e2e_s")):
        data, known = run["histograms"][key], run["summary"][key]
        total = sum(data["counts"])
        plot = Plot(f"{title}: distribution", "milliseconds (logarithmic)", "percent", log_x=True)
        for start, end, count in zip(data["bounds_s"], data["bounds_s"][1:], data["counts"], strict=False):
            plot.bar(start * 1e3, end * 1e3, 100 * count / total)
        plot.marks = [(known[name] * 1e3, f"{name.upper()} {terminal.ms(known[name])}")
                      for name in ("p50", "p90", "p99") if known]  # fmt: skip
        plots.append(plot)
    return plots


def _ratios(result: dict[str, Any]) -> str:
    colors = {"better": "#059669", "worse": "#dc2626"}
    rows = [(name, ratio["mean"], ratio.get("low"), ratio.get("high"), colors.get(ratio["b_is"], "#94a3b8"))
            for name, ratio in result["ratios"].items()]  # fmt: skip
    a, b = result["names"]
    return ratios(f"{b} over {a}: green is better, red worse, grey not told apart", rows)


def _curves(result: dict[str, Any]) -> str:
    runs = sorted(result["runs"], key=lambda one: one["summary"]["output_tokens_per_s_under_load"] or 0)
    if result["mode"] == "sweep":
        runs = result["runs"]  # in the order of their loads: a curve that bends back is then seen to
    throughput = [one["summary"]["output_tokens_per_s_under_load"] for one in runs]
    plots = []
    for title, key in (("Time to first token", "ttft_s"), ("Time between tokens", "tbt_s"), ("End to end", "e2e_s")):
        plot = Plot(
            f"{title} against throughput",
            "output tokens a second, under load",
            "milliseconds (logarithmic)",
            log_y=True,
        )
        for name in ("p50", "p90", "p99"):
            values = [one["summary"][key].get(name) for one in runs]
            plot.line(name.upper(), throughput, [None if v is None else v * 1e3 for v in values], dots=True)
        plot.levels = _limit(runs[0], key.removesuffix("_s"))
        if result.get("knee") is not None:
            at = result["runs"][result["knee"]]
            plot.marks = [(at["summary"]["output_tokens_per_s_under_load"], f"knee: {terminal.load(at['scenario'])}")]
        plots.append(plot)
    offered = Plot(
        "Requests answered against requests offered", "offered, requests a second", "answered, requests a second"
    )
    pairs = sorted((one["summary"]["offered_requests_per_s"], one["summary"]["requests_per_s_under_load"])
                   for one in runs if one["summary"]["offered_requests_per_s"])  # fmt: skip
    if pairs:
        rates = [rate for rate, _ in pairs]
        offered.line("answered", rates, [done for _, done in pairs], dots=True)
        offered.line("as offered", [0.0, rates[-1]], [0.0, rates[-1]])
        plots.append(offered)
    return '<h2>Throughput and latency</h2><div class="plots">' + "".join(plot.svg() for plot in plots) + "</div>"


def _reproduce(result: dict[str, Any]) -> str:
    run = result["runs"][0]
    kept = {key: run[key] for key in ("scenario", "counting", "environment")}
    kept["server"] = run["server"].get("information", {})
    kept["client"] = run["summary"]["client"]
    kept["tokens"] = run["summary"]["tokens"]
    for key in ("settings", "start", "server_environment"):  # of a server that was started for it
        if key in result:
            kept[key] = result[key]
    return f"""<h2>How it was run</h2><p class="sub">Definitions of all figures: docs/loadtest.md. The command, the
scenario and the machines:</p><pre>{escape(json.dumps(kept, indent=1))}</pre>"""
