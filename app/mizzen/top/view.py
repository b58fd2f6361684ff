"""What the terminal shows of a window: pure rendering, no clock and no network."""

import math

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mizzen.top.window import Window

LATENCIES = {
    "time to first token": "mizzen_time_to_first_token_seconds",
    "time between tokens": "mizzen_inter_token_latency_seconds",
    "end to end": "mizzen_request_duration_seconds",
    "queue": "mizzen_request_queue_time_seconds",
    "step": "mizzen_step_duration_seconds",
    "host, a step": "mizzen_step_host_time_seconds",
}
QUANTILES = (0.5, 0.9, 0.99)
BAR_WIDTH = 24


def render(url: str, window: Window, problem: str = "") -> RenderableType:
    """``problem``: why the newest scrape is not of now."""
    panels = [_traffic(window), _latencies(window), _memory(window), _processes(window)]
    if window.newest.values.get("mizzen_gpu_memory_capacity_bytes"):
        panels.append(_gpus(window))
    return Group(_head(url, window, problem), Columns(panels))


def _number(value: float, unit: str = "") -> str:
    if math.isnan(value):
        return "-"
    text = f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _head(url: str, window: Window, problem: str) -> Text:
    newest = window.newest
    if not newest.values:
        return Text(f"{url}  {problem or 'waiting for the first answer'}", style="red" if problem else "dim")
    model = ", ".join(newest.by("mizzen_ready", "model_name"))
    version = ", ".join(newest.by("mizzen_build_info", "version"))
    phase = next((phase for phase, value in newest.by("mizzen_phase", "phase").items() if value), "unknown")
    ready = bool(newest.total("mizzen_ready"))
    head = Text.assemble(
        (model, "bold"),
        f"  {url}  Mizzen {version}  ",
        ("ready" if ready else "not ready", "green" if ready else "red"),
        f", {phase} for {newest.total('mizzen_phase_duration_seconds'):.0f} s",
    )
    if newest.total("mizzen_draining"):
        head.append("  draining", "yellow")
    if problem:
        head.append(f"  {problem}", "red")
    return head


def _table(*columns: str) -> Table:
    table = Table(box=None, show_header=any(columns), padding=(0, 1))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _traffic(window: Window) -> Panel:
    table = _table("", "")
    newest = window.newest
    ended = "mizzen_requests_finished_total"
    rows = {
        "requests running": _running(window),
        "requests waiting": _number(newest.total("mizzen_requests_waiting")),
        "answers finished": _number(window.rate(ended, "reason", "stop", "length"), "/s"),
        "answers failed": _number(window.rate(ended, "reason", "error", "timeout"), "/s"),
        "clients left": _number(window.rate("mizzen_requests_aborted_total"), "/s"),
        "requests refused": _number(window.rate("mizzen_requests_rejected_total"), "/s"),
        "prompt tokens": _number(window.rate("mizzen_prompt_tokens_total"), "/s"),
        "generated tokens": _number(window.rate("mizzen_generation_tokens_total"), "/s"),
        "steps": _number(window.rate("mizzen_steps_total"), "/s"),
        "device busy": _percent(window.rate("mizzen_device_busy_seconds_total")),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for reason, count in newest.by("mizzen_requests_waiting", "reason").items():
        if count:
            table.add_row(f"  waiting for {reason}", _number(count))
    for reason in window.increases("mizzen_requests_rejected_total", "reason"):
        if rate := window.rate("mizzen_requests_rejected_total", "reason", reason):
            table.add_row(f"  refused by {reason}", _number(rate, "/s"))
    return Panel(table, title="traffic")


def _running(window: Window) -> str:
    """And how many may run."""
    running = _number(window.newest.total("mizzen_requests_running"))
    allowed = ", ".join(window.newest.by("mizzen_config_info", "max_running_requests"))
    return f"{running} of {allowed}" if allowed else running


def _latencies(window: Window) -> Panel:
    table = _table("", *(f"p{quantile * 100:g}" for quantile in QUANTILES))
    for name, histogram in LATENCIES.items():
        table.add_row(name, *map(_seconds, window.quantiles(histogram, *QUANTILES)))
    return Panel(table, title="latency")


def _memory(window: Window) -> Panel:
    newest = window.newest
    usage = newest.total("mizzen_kv_cache_usage_ratio")
    table = _table("", "")
    table.add_row("in use", _percent(usage))
    table.add_row("", ProgressBar(total=1.0, completed=usage, width=BAR_WIDTH))
    for state, pages in newest.by("mizzen_kv_cache_pages", "state").items():
        table.add_row(f"pages {state}", _number(pages))
    hits = window.ratio("mizzen_prefix_cache_hits_total", "mizzen_prefix_cache_queries_total")
    table.add_row("prefix hits", _percent(hits))
    table.add_row("preemptions", _number(window.rate("mizzen_preemptions_total"), "/s"))
    return Panel(table, title="KV cache")


def _processes(window: Window) -> Panel:
    newest = window.newest
    ages = newest.by("mizzen_process_heartbeat_age_seconds", "process")
    restarts = newest.by("mizzen_process_restarts_total", "process")
    table = _table("process", "", "heartbeat", "restarts")
    for name, ready in sorted(newest.by("mizzen_process_ready", "process").items()):
        group = "engine" if name.startswith("engine-") else name  # ranks are restarted together
        state = Text("ready", "green") if ready else Text("down", "red")
        table.add_row(name, state, _seconds(ages.get(name, math.nan)), _number(restarts.get(group, 0.0)))
    return Panel(table, title="processes")


def _gpus(window: Window) -> Panel:
    newest = window.newest
    used = newest.by("mizzen_gpu_memory_used_bytes", "rank")
    busy = newest.by("mizzen_gpu_utilization_ratio", "rank")
    table = _table("rank", "memory", "of GiB", "busy")
    for rank, capacity in newest.by("mizzen_gpu_memory_capacity_bytes", "rank").items():
        share = used.get(rank, math.nan) / capacity if capacity else math.nan
        table.add_row(rank, _percent(share), _number(capacity / 2**30), _percent(busy.get(rank, math.nan)))
    return Panel(table, title="GPUs")
