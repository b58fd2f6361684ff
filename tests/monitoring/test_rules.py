"""Rules ask for what exists, can fire and can stop, and each alert has its page in the runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import panels
from monitoring import promql
from monitoring.stack import PROMETHEUS, Prometheus, tool, wait_until
from service.running import free_port

ROOT = PROMETHEUS.parents[1]
RUNBOOK_PARTS = ["**Meaning**", "**Look at**", "**Do**"]


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((PROMETHEUS / name).read_text())["groups"] for rule in group["rules"]]


ALERTS, RECORDED = rules("alerts.yml"), rules("recording.yml")
NAMES = sorted({rule["alert"] for rule in ALERTS})


def test_the_issue_s_alerts_exist() -> None:
    assert NAMES == [
        "MizzenDown",
        "MizzenDrainStuck",
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
        "MizzenTimeBetweenTokensBurn",
        "MizzenTimeToFirstTokenBurn",
    ]


def test_every_rule_asks_for_metrics_labels_and_buckets_that_exist() -> None:
    wrong = {rule["expr"]: list(promql.problems(rule["expr"])) for rule in ALERTS + RECORDED}
    assert {expression: found for expression, found in wrong.items() if found} == {}


def test_recorded_series_are_those_that_alerts_use() -> None:
    used = {name for rule in ALERTS for name in re.findall(r"\bmizzen:[\w:]+", rule["expr"])}
    assert used == {rule["record"] for rule in RECORDED}


def test_alerts_and_dashboards_mean_the_same_service_levels() -> None:
    for metric, bound in ((panels.TTFT, panels.TTFT_SLO), (panels.TBT, panels.TBT_SLO)):
        found = {
            match for rule in RECORDED for match in re.findall(rf'{metric}_bucket\{{[^}}]*le="([^"]*)"', rule["expr"])
        }
        assert found == {bound}


def test_every_selector_names_the_job_that_prometheus_scrapes() -> None:
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    for rule in ALERTS + RECORDED:
        selectors = re.findall(r"\bmizzen_\w+(?:\{([^}]*)\})?|\bup\{([^}]*)\}", rule["expr"])
        assert all(f'job="{job["job_name"]}"' in "".join(selector) for selector in selectors), rule["expr"]


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_a_severity_texts_and_a_section_in_the_runbook(name: str) -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", runbook, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert [part for part in RUNBOOK_PARTS if part in section[1]] == RUNBOOK_PARTS
    for rule in (rule for rule in ALERTS if rule["alert"] == name):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == "{{ $externalLabels.runbook }}#" + name.lower()


def test_where_the_runbook_is_is_said_once_and_by_default_it_is_there() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert config["global"]["external_labels"] == {"runbook": "${RUNBOOK_URL}"}
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["prometheus"]
    assert "--enable-feature=expand-external-labels" in compose["command"]
    default = re.fullmatch(r"\$\{RUNBOOK_URL:-(.*)\}", compose["environment"]["RUNBOOK_URL"])
    assert default is not None
    chart = yaml.safe_load((ROOT / "helm" / "mizzen" / "values.yaml").read_text())
    assert chart["monitoring"]["runbookUrl"] == default[1]
    assert (ROOT / default[1]).is_file()


def test_an_alert_links_to_the_page_that_the_environment_names(tmp_path: Path) -> None:
    prometheus = Prometheus(tmp_path, f"127.0.0.1:{free_port()}", runbook_url="https://docs.example/runbook.md")
    try:
        wait_until(lambda: bool(prometheus.alerts()), 30.0, prometheus.rules)
        [down] = prometheus.alerts()
        assert down["annotations"]["runbook_url"] == "https://docs.example/runbook.md#mizzendown"
    finally:
        prometheus.close()


def test_alerts_go_to_an_alertmanager() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (alertmanager,) = config["alerting"]["alertmanagers"]
    assert alertmanager["static_configs"] == [{"targets": ["alertmanager:9093"]}]


def test_the_runbook_names_alerts_metrics_settings_and_panels_that_exist() -> None:
    from mizzen.config.settings import Settings, variable

    text = (ROOT / "docs" / "runbook.md").read_text()
    assert set(re.findall(r"^## (Mizzen\w+)", text, re.MULTILINE)) == set(NAMES)
    metrics = {metric.name for metric, _ in promql.SERIES.values()}
    assert set(re.findall(r"`(mizzen_\w+)", text)) <= metrics
    assert set(re.findall(r"MIZZEN_\w+", text)) <= {variable(field) for field in Settings.model_fields}
    shown = {
        f"{board.title} / {panel.title}" for board in panels.DASHBOARDS for row in board.rows for panel in row.panels
    }
    named = set(re.findall(r"_((?:Overview|Engine|Processes) / [^_]+)_", text.replace("\n", " ")))
    assert len(named) > 10
    assert named <= shown


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_fires_in_one_story_and_is_silent_before_or_after(name: str) -> None:
    """Of promtool's test file: that it holds is promtool's to say, see below."""
    stories = yaml.safe_load((PROMETHEUS / "tests.yml").read_text())["tests"]
    assert any(
        {name in str(moment.get("exp_samples")) for moment in story["promql_expr_test"]} == {True, False}
        for story in stories
    )


@pytest.mark.parametrize(
    "command", [["check", "config", "prometheus.yml"], ["test", "rules", "tests.yml"]], ids=" ".join
)
def test_promtool_agrees(command: list[str]) -> None:
    done = subprocess.run(
        [tool("promtool"), *command], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_an_alert_that_fires_too_early(tmp_path: Path) -> None:
    for path in PROMETHEUS.iterdir():
        (tmp_path / path.name).write_text(path.read_text().replace("> 0.9\n", "> 0.6\n"))
    command = [tool("promtool"), "test", "rules", "tests.yml"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False).returncode == 1
