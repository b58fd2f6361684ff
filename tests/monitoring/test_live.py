"""Real server, Prometheus and Alertmanager: every panel shows something, every alert's expression holds at its time."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import panels
from monitoring import story
from monitoring.stack import PROMETHEUS, shorten
from monitoring.story import Day, a_day

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    """The whole story, once; Prometheus stays to be asked about it."""
    with a_day(tmp_path_factory.mktemp("day")) as lived:
        yield lived


def seen(day: Day, expression: str) -> list[float]:
    """Every value that ``expression`` had in any second of the day, NaN left out. Fails on a parse error."""
    series = day.prometheus.query_range(story.fill(expression), day.start_s, day.end_s)
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
    """Those of GPUs show a fake: see story.fake_gpu."""
    blank = {title: query for title, query in all_queries() if not any(seen(day, query))}
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


@pytest.mark.parametrize(
    "name",
    [
        "MizzenEngineDown",
        "MizzenKVCacheSaturated",
        "MizzenNoProgress",
        "MizzenNotReady",
        "MizzenQueueGrowing",
        "MizzenRejecting",
        "MizzenRequestsFailing",
        "MizzenRestarted",
        "MizzenRestarting",
        "MizzenServerErrors",
        "MizzenTimeToFirstTokenBurn",
    ],
)
def test_an_alert_reaches_the_pager_and_clears(day: Day, name: str) -> None:
    statuses = [status for alert, status in day.pages if alert == name]
    assert statuses[0] == "firing"
    assert "resolved" in statuses


@pytest.mark.parametrize("name", ["MizzenDown", "MizzenDrainStuck", "MizzenTimeBetweenTokensBurn"])
def test_an_alert_reaches_the_pager(day: Day, name: str) -> None:
    assert (name, "firing") in day.pages
