"""What a process that drives loads sets up: enough open files, the fast event loop if it is there, an end by signal."""

import asyncio
import resource
import signal
from collections.abc import Coroutine
from typing import Any

from loadtest import terminal
from loadtest.driver import Driver
from loadtest.scenario import Scenario


def start(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    _many_connections()
    try:
        import uvloop
    except ImportError:  # slower, but the same
        return asyncio.run(work)
    return uvloop.run(work)


async def watch(driver: Driver, scenario: Scenario, label: str) -> None:
    """Progress; Ctrl-C or SIGTERM ends the load and still gives its figures."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, driver.interrupt)
    try:
        await terminal.watch(driver, scenario, label)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _many_connections() -> None:
    """As many open files as this user may have: an open loop has as many requests in flight as it takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
