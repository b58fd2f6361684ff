"""Real server, Prometheus and Alertmanager: every panel shows something, every alert's expression holds at its time."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import yaml

import panels
from monitoring import story
from monitoring.stack import PROMETHEUS, Alertmanager, Prometheus, Webhook, shorten, wait_until
from service.running import Server
from tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

# What no test here makes happen, and why.
NEVER_SEEN: dict[str, str] = {}


class Day(NamedTuple):
    prometheus: Prometheus
    start_s: float
    end_s: float
    pages: list[tuple[str, str]]  # what the pager heard: (alert, status)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """The whole story, once; Prometheus stays to be asked about it."""
    folder = tmp_path_factory.mktemp("day")
    model = make_tiny_model(folder / "model", rope_scaling=None, max_position_embeddings=16_384)
    with contextlib.ExitStack() as stack:
        pager = stack.enter_context(contextlib.closing(Webhook()))
        alertmanager = stack.enter_context(contextlib.closing(Alertmanager(folder / "alertmanager", pager.url)))
        server = stack.enter_context(contextlib.closing(Server(model, folder, **story.SETTINGS)))
        target = f"127.0.0.1:{server.port}"
        prometheus = stack.enter_context(
            contextlib.closing(Prometheus(folder / "prometheus", target, alertmanager.address))
        )
        start_s = time.time()
        server.wait_ready()
        story.wait_scrapes(prometheus, 3)  # zeros: a counter's first sample is no increase
        story.usual_traffic(server)
        story.slow_device(server, 10.0)
        story.hang(server, 8.0)
        story.ask_while_restarting(server)
        wait_until(lambda: ("MizzenRestarted", "firing") in pager.events, 30.0, lambda: pager.events)
        with story.flood(server, 48, max_tokens=600):
            wait_until(
                lambda: {("MizzenQueueGrowing", "firing"), ("MizzenRejecting", "firing")} <= set(pager.events),
                60.0,
                lambda: (pager.events, server.health()),
            )
        story.usual_traffic(server)
        story.restart_again_and_again(server, "tokenizer-0", 3)
        wait_until(
            lambda: all((name, "resolved") in pager.events for name in ("MizzenQueueGrowing", "MizzenRejecting")),
            60.0,
            lambda: pager.events,
        )
        wait_until(lambda: ("MizzenRestarted", "resolved") in pager.events, 60.0, lambda: pager.events)
        story.drain(server)
        time.sleep(4.0)  # scrapes that fail
        yield Day(prometheus, start_s, time.time(), pager.events)


def seen(day: Day, expression: str) -> list[float]:
    """Every value that ``expression`` had in any second of the day, NaN left out. Fails on a parse error."""
    for variable, value in {
        "$model": ".*",
        "$instance": ".*",
        "$__rate_interval": "5s",
        "$__range": "60s",
    }.items():
        expression = expression.replace(variable, value)
    assert "$" not in expression
    series = day.prometheus.query_range(expression, day.start_s, day.end_s)
    return [value for one in series for _, text in one["values"] if not math.isnan(value := float(text))]


def all_queries() -> list[tuple[str, str]]:
    return [
        (f"{board.name}: {row.title}: {panel.title}: {query.legend}", query.expression)
        for board in panels.DASHBOARDS
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    ]


def test_every_panel_s_every_query_shows_something_but_zero(day: Day) -> None:
    blank = {title: query for title, query in all_queries() if not any(seen(day, query)) and title not in NEVER_SEEN}
    assert blank == {}


def test_every_variable_has_something_to_choose(day: Day) -> None:
    for board in panels.DASHBOARDS:
        for _, _, query in board.variables:
            selector = query.removeprefix("label_values(").rpartition(",")[0]
            assert seen(day, selector), query


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_alert_s_expression_held_at_some_time_and_not_at_another(day: Day) -> None:
    never, always = [], []
    seconds = day.end_s - day.start_s
    for rule in alerts():
        held = seen(day, f"count({shorten(rule['expr'])})")
        if not held:
            never.append((rule["alert"], rule["expr"]))
        elif len(held) > 0.9 * seconds:
            always.append(rule["alert"])
    assert never == []
    assert always == []


def test_rules_are_evaluated_without_error(day: Day) -> None:
    rules = day.prometheus.rules()
    assert len(rules) > 20
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


@pytest.mark.parametrize("name", ["MizzenRestarted", "MizzenQueueGrowing", "MizzenRejecting"])
def test_an_alert_reaches_the_pager_and_clears(day: Day, name: str) -> None:
    statuses = [status for alert, status in day.pages if alert == name]
    assert statuses[0] == "firing"
    assert "resolved" in statuses
