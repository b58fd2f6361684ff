"""The dashboards that are checked in are the generator's, and ask for nothing that does not exist."""

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

import generate
import panels
from mizzen.observability.metrics import METRICS
from monitoring import promql
from monitoring.stack import tool

ALL = [pytest.param(dashboard, id=dashboard.name) for dashboard in panels.DASHBOARDS]


def queries(dashboard: panels.Dashboard) -> list[tuple[str, panels.Query]]:
    return [
        (f"{dashboard.name}: {row.title}: {panel.title}", query)
        for row in dashboard.rows
        for panel in row.panels
        for query in panel.queries
    ]


def test_there_is_a_file_for_each_dashboard_and_no_other() -> None:
    assert {path.stem for path in generate.FOLDER.iterdir()} == {board.name for board in panels.DASHBOARDS}


@pytest.mark.parametrize("dashboard", ALL)
def test_the_json_is_what_the_generator_writes(dashboard: panels.Dashboard) -> None:
    checked_in = (generate.FOLDER / f"{dashboard.name}.json").read_text()
    assert checked_in == generate.text(dashboard), "run: python docker/grafana/generate.py"


@pytest.mark.parametrize("dashboard", ALL)
def test_every_query_asks_for_metrics_labels_and_buckets_that_exist(dashboard: panels.Dashboard) -> None:
    asked = queries(dashboard)
    assert len(asked) > 10
    wrong = {f"{title}: {query.expr}": list(promql.problems(query.expression)) for title, query in asked}
    wrong |= {name: list(promql.problems(query)) for name, _, query in dashboard.variables}
    assert {title: found for title, found in wrong.items() if found} == {}


def test_the_check_finds_what_does_not_exist() -> None:
    buckets = "mizzen_time_to_first_token_seconds_bucket"
    for bad in (
        "mizzen_nonsense_total",
        "mizzen_time_to_first_token_seconds",  # a histogram has no series of its own name
        'mizzen_ready{reason="x"}',
        buckets + '{le="0.9"}',
        'mizzen_requests_finished_total{reason="vanished"}',
        "sum by (route) (mizzen_ready)",
    ):
        assert list(promql.problems(bad)), bad
    assert not list(promql.problems(f'sum by (le, instance) (rate({buckets}{{le="1.0"}}[5m]))'))


@pytest.mark.parametrize("dashboard", ALL)
def test_every_query_is_limited_to_the_chosen_models_and_instances(dashboard: panels.Dashboard) -> None:
    for title, query in queries(dashboard):
        selectors = re.findall(r"mizzen_\w+(?:\{([^}]*)\})?", query.expression)
        assert selectors, title
        assert all(selector.startswith(panels.SELECTOR) for selector in selectors), (title, query.expression)


def test_every_metric_is_on_some_dashboard() -> None:
    asked = {
        name for board in panels.DASHBOARDS for _, query in queries(board) for name in promql.names(query.expression)
    }
    shown = {promql.SERIES[name][0].name for name in asked}
    assert {metric.name for metric in METRICS} - shown == set()


@pytest.mark.parametrize("dashboard", ALL)
def test_panels_have_an_id_a_place_and_a_description_of_their_own(dashboard: panels.Dashboard) -> None:
    rendered: list[dict[str, Any]] = json.loads(generate.text(dashboard))["panels"]
    assert len({panel["id"] for panel in rendered}) == len(rendered)
    shown = [panel for panel in rendered if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"].endswith(".") for panel in shown)
    assert all(target["refId"] for panel in shown for target in panel["targets"])
    for one, other in combinations([panel["gridPos"] for panel in rendered], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= generate.GRID_WIDTH for panel in rendered)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_json_is_valid_by_grafana_s_own_types_which_find_mistakes(tmp_path: Path) -> None:
    tool("node")
    tool("npm")
    root = Path(__file__).parents[2]
    done = subprocess.run(["make", "check-dashboards"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = generate.render(panels.ENGINE)
    shown = [panel for panel in rendered["panels"] if panel["type"] == "timeseries"]
    shown[0]["gridPos"]["width"] = 8
    shown[1]["options"]["legend"]["placement"] = "left"
    shown[2]["fieldConfig"]["defaults"]["custom"]["drawStyle"] = 1
    del shown[3]["type"]
    rendered["templating"]["list"][1]["kind"] = "query"
    mistaken = tmp_path / "mistaken.json"
    mistaken.write_text(json.dumps(rendered))
    command = ["node", "build/grafana-schema/check.mjs", str(mistaken)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for field in ("width", "placement", "drawStyle", "type", "kind"):
        assert field in done.stdout, done.stdout


def test_each_dashboard_has_variables_for_datasource_model_and_instance() -> None:
    for dashboard in panels.DASHBOARDS:
        variables = generate.render(dashboard)["templating"]["list"]
        assert [variable["name"] for variable in variables] == ["datasource", "model", "instance"]


def test_the_provisioned_data_source_is_a_prometheus() -> None:
    folder = generate.FOLDER.parent / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((folder / "dashboards" / "mizzen.yaml").read_text())["providers"]
    assert provider["type"] == "file"
