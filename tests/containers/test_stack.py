"""``docker compose up`` with the CPU override: Mizzen, Prometheus and Alertmanager, used through the published port.

Images that no registry gives here are built of Debian's packages, under the names that the compose file has.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from containers.docker_host import REPOSITORY, Done, compose_command, docker
from service.running import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
STAND_INS = {"prometheus": "prom/prometheus:v3.5.0", "alertmanager": "prom/alertmanager:v0.28.1"}


class Stack:
    def __init__(self, image: str, model: Path) -> None:
        self.port = free_port()
        self._environment = os.environ | {
            "COMPOSE_PROJECT_NAME": "mizzen-test",
            "CPU_IMAGE": image,
            "CPU_MODEL": f"/models/{model.name}",
            "MODEL_DIR": str(model.parent),
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "",
            "PUBLISH_PORT": str(self.port),
        }
        files = ["-f", "docker-compose.yml", "-f", "docker/compose.cpu.yml"]
        self._command = [*compose_command(), *files, "--profile", "alerts"]

    def run(self, *arguments: str, timeout_s: float = 240.0) -> Done:
        command = [*self._command, *arguments]
        where: Any = {"cwd": REPOSITORY, "env": self._environment}
        done = subprocess.run(command, **where, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def prometheus(self, path: str) -> Any:
        """Prometheus publishes no port: it is asked from inside."""
        done = self.run("exec", "-T", "prometheus", "wget", "-qO-", f"http://127.0.0.1:9090/api/v1/{path}")
        return json.loads(done.stdout)["data"]


@pytest.fixture(scope="module")
def stack(image: str, smollm2: Path) -> Iterator[Stack]:
    base = os.environ.get("CPU_BASE", "debian:bookworm-slim")
    for target, name in STAND_INS.items():
        what = ["--target", target, "--build-arg", f"BASE={base}", "-f", str(HERE / "monitoring.Dockerfile")]
        docker("build", *what, "-t", name, str(HERE), timeout_s=600)
    running = Stack(image, smollm2)
    try:
        running.run("up", "-d", "--wait", "--no-build", "--pull", "never", "mizzen", *STAND_INS)
        yield running
    finally:
        running.run("down", "--volumes", "--timeout", "5")


def wait_until(holds: Any, within_s: float = 45.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(1.0)


def test_it_answers_and_is_watched_and_drains(stack: Stack) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none", max_retries=0)
    [model] = [found.id for found in client.models.list()]
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(model=model, temperature=0, max_tokens=16, messages=question)
    assert "Paris" in (answer.choices[0].message.content or "")

    def up() -> bool:
        found = stack.prometheus("query?query=up")["result"]
        return [(series["metric"]["job"], series["value"][1]) for series in found] == [("mizzen", "1")]

    wait_until(up)
    wait_until(lambda: bool(stack.prometheus("query?query=mizzen_generation_tokens_total%3E0")["result"]))
    alerts = [rule for group in stack.prometheus("rules?type=alert")["groups"] for rule in group["rules"]]
    assert len(alerts) > 5
    assert {rule["health"] for rule in alerts} == {"ok"}
    wait_until(lambda: len(stack.prometheus("alertmanagers")["activeAlertmanagers"]) == 1)

    stream = client.completions.create(
        model=model, prompt="Once", max_tokens=64, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    stopping = threading.Thread(target=stack.run, args=("stop", "mizzen"))
    stopping.start()
    rest = list(stream)
    stopping.join()
    assert not first.choices[0].finish_reason
    assert rest[-1].choices[0].finish_reason == "length"
    [state] = map(json.loads, stack.run("ps", "--all", "--format", "json", "mizzen").stdout.splitlines())
    assert (state["State"], state["ExitCode"]) == ("exited", 0)
