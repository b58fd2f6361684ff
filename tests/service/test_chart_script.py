"""The script of `helm test`, against the real server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.running import Server

SCRIPT = Path(__file__).parents[2] / "helm" / "mizzen" / "files" / "test.py"


def run(server: Server, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    given = {"API": server.url, "HEALTH": server.health_url, "WAIT_S": "0"} | variables
    command = [sys.executable, "-I", str(SCRIPT), *arguments]
    return subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=60, check=False)


def test_helm_test_passes_on_a_server_that_serves(server: Server) -> None:
    done = run(server)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "ready",
        "models",
        "completion",
        "streaming",
        "metrics",
    ]


@pytest.mark.parametrize("name", ["ready", "models", "completion", "streaming", "metrics"])
def test_each_test_of_helm_test_fails_where_nothing_serves_and_alone_passes_where_something_does(
    server: Server, name: str
) -> None:
    assert run(server, name, API="http://127.0.0.1:1", HEALTH="http://127.0.0.1:1").returncode != 0
    done = run(server, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(name)
    assert len(done.stdout.splitlines()) == 1


def test_the_load_test_waits_until_the_release_is_ready(server: Server) -> None:
    never = run(server, "load", "run", HEALTH="http://127.0.0.1:1")
    assert never.returncode != 0
    assert "not ready" in never.stderr


@pytest.mark.slow
def test_the_load_test_runs_to_its_end(server: Server) -> None:
    """With the chart's own arguments, but for the size."""
    usual = yaml.safe_load((SCRIPT.parents[1] / "values.yaml").read_text())["loadTest"]["args"]
    small = ["--concurrency", "2", "--duration", "3", "--warmup", "0", "--output-tokens", "4"]
    done = run(server, "load", *usual, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["runs"][0]["summary"]["complete"] > 0


@pytest.mark.slow
def test_helm_test_uses_the_first_key_of_the_file(smollm2: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst\nsecond\n")
    locked = Server(smollm2, tmp_path, max_model_len=512, api_keys_file=keys)
    try:
        locked.wait_ready()
        assert run(locked).returncode != 0
        done = run(locked, KEYS_FILE=str(keys))
        assert done.returncode == 0, done.stderr
    finally:
        locked.close()
