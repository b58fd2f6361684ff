"""Scrapes on an interval and redraws until Ctrl-C. A server that does not answer is waited for."""

import argparse
import time

import httpx
from rich.console import Console
from rich.live import Live

from mizzen.errors import MizzenError
from mizzen.top.view import render
from mizzen.top.window import Scrape, Window

TIMEOUT_S = 5.0
WINDOW_S = 10.0  # what rates and percentiles are of


class NoMetrics(MizzenError):
    """The server gave no metrics; the message is one line for the user."""


def scrape(http: httpx.Client, url: str) -> Scrape:
    """Raises NoMetrics."""
    try:
        answer = http.get(f"{url}/metrics")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoMetrics(f"{url} does not answer: {error or type(error).__name__}") from error
    if answer.status_code != httpx.codes.OK:
        raise NoMetrics(f"{url}/metrics answers {answer.status_code}")
    try:
        found = Scrape.parse(answer.text, time.monotonic())
    except ValueError as error:
        raise NoMetrics(f"{url}/metrics is not in Prometheus' format") from error
    if "mizzen_ready" not in found.values:
        raise NoMetrics(f"{url}/metrics has no metrics of Mizzen's")
    return found


def _watch(http: httpx.Client, url: str, interval_s: float, console: Console) -> None:
    window = Window(WINDOW_S)
    with Live(render(url, window), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            problem = ""
            try:
                window.add(scrape(http, url))
            except NoMetrics as error:
                problem = str(error)
            live.update(render(url, window, problem), refresh=True)
            time.sleep(interval_s)


def _once(http: httpx.Client, url: str, interval_s: float, console: Console) -> None:
    window = Window(WINDOW_S)
    window.add(scrape(http, url))
    time.sleep(interval_s)
    window.add(scrape(http, url))
    console.print(render(url, window))


def main(arguments: list[str], console: Console | None = None) -> int:
    """Returns the exit code. Raises NoMetrics with ``--once``."""
    parser = argparse.ArgumentParser(prog="mizzen top", description="Shows what a server does.", allow_abbrev=False)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="the server's, or its health port's")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between scrapes [default: 1]")
    parser.add_argument("--once", action="store_true", help="print what happens in one interval, and end")
    parser.add_argument("--api-key", metavar="KEY", help="for a server with MIZZEN_METRICS_REQUIRE_KEY")
    args = parser.parse_args(arguments)
    if not args.interval >= 0.1:
        parser.error("--interval must be at least 0.1")
    url = args.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    show = _once if args.once else _watch
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers=headers) as http:
            show(http, url, args.interval, console or Console())
    except KeyboardInterrupt:
        return 0
    return 0
