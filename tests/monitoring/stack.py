"""A real Prometheus and Alertmanager, with the configuration of docker/prometheus, on loopback in a temporary folder.

In here a minute is a second: every duration in the rules is divided by 60 (and no range is under ``SHORTEST_S``, which
holds enough scrapes for a rate), so that what takes a quarter of an hour in production takes 15 s in a test.
"""

import contextlib
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.running import free_port

PROMETHEUS = Path(__file__).parents[2] / "docker" / "prometheus"
START_TIMEOUT_S = 30.0
SHORTEST_S = 4
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_RANGE = re.compile(r"(\[|offset )(\d+[smhd])")


def tool(name: str) -> str:
    """The program's path; skips the test, naming it, where it is not installed."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}: apt-get install prometheus prometheus-alertmanager nodejs npm")
    return path


def seconds(duration: str) -> int:
    return int(duration[:-1]) * UNITS_S[duration[-1]]


def shorten(expression: str) -> str:
    """Ranges in seconds where they were in minutes."""
    return _RANGE.sub(lambda found: f"{found[1]}{max(SHORTEST_S, seconds(found[2]) // 60)}s", expression)


def short_rules(path: Path) -> dict[str, Any]:
    rules: dict[str, Any] = yaml.safe_load(path.read_text())
    for group in rules["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["expr"] = shorten(rule["expr"])
            for name in ("for", "keep_firing_for"):
                if name in rule:
                    rule[name] = f"{max(1, seconds(rule[name]) // 60)}s"
    return rules


class _Program:
    """A program with an HTTP port, its log beside its data."""

    def __init__(
        self, folder: Path, port: int, command: list[str], ready: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log_path = folder / f"{Path(command[0]).name}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, **(environment or {})},
            )
        try:
            self._wait(ready)
        except BaseException:
            self.close()
            raise

    def _wait(self, ready: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + ready, timeout=5).status_code == 200:
                    return
            assert self._process.poll() is None, self._log_path.read_text()
            assert time.monotonic() < deadline, self._log_path.read_text()
            time.sleep(0.1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


class Prometheus(_Program):
    """Scrapes ``target`` every second, with docker/prometheus's rules a minute of which is a second."""

    def __init__(
        self, folder: Path, target: str, alertmanager: str | None = None, runbook_url: str = "docs/runbook.md"
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "mizzen")
        job["static_configs"] = [{"targets": [target]}]
        config["scrape_configs"] = [job]
        config.pop("alerting", None)
        if alertmanager is not None:
            config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
        for name in config["rule_files"]:
            (folder / name).write_text(yaml.safe_dump(short_rules(PROMETHEUS / name)))
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = free_port()
        command = [
            tool("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=expand-external-labels",
        ]
        super().__init__(folder, port, command, "/-/ready", {"RUNBOOK_URL": runbook_url})

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """The series of an instant query; fails on a parse error."""
        found: list[dict[str, Any]] = self._get("query", query=expression, **({} if at is None else {"time": at}))[
            "result"
        ]
        return found

    def query_range(self, expression: str, start: float, end: float, step_s: float = 1.0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("query_range", query=expression, start=start, end=end, step=step_s)[
            "result"
        ]
        return found

    def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing ones."""
        found: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]


class Alertmanager(_Program):
    """Sends what fires, and what clears, to ``webhook`` at once."""

    def __init__(self, folder: Path, webhook: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        route = {"receiver": "test", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s"}
        receiver = {"name": "test", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
        (folder / "alertmanager.yml").write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}))
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        command = [
            tool("prometheus-alertmanager"),
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--storage.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
            "--cluster.listen-address=",
        ]
        super().__init__(folder, port, command, "/-/ready")


class Webhook:
    """What an operator's pager would hear: ``events`` are (alert's name, "firing" or "resolved") in order."""

    def __init__(self) -> None:
        events: list[tuple[str, str]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                events.extend((alert["labels"]["alertname"], alert["status"]) for alert in body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass  # the events are the log

        self.events = events
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def wait_until(holds: Callable[[], bool], within_s: float, what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)
