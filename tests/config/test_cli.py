"""The ``mizzen`` command: fast, and short with bad news."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import mizzen


def run(*arguments: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MIZZEN_")}
    return subprocess.run(
        [sys.executable, "-m", "mizzen.cli", *arguments],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version(tmp_path: Path) -> None:
    assert run("--version", folder=tmp_path).stdout == f"mizzen {mizzen.__version__}\n"


def test_settings_prints_what_was_resolved_and_no_key(tmp_path: Path) -> None:
    done = run("settings", "--page-size", "32", folder=tmp_path, MIZZEN_MODEL="a/b", MIZZEN_API_KEYS="secret")
    assert json.loads(done.stdout)["engine"]["cache"]["page_size"] == 32
    assert "secret" not in done.stdout


def test_wrong_settings_are_a_line_each_on_stderr_and_in_the_termination_log(tmp_path: Path) -> None:
    log = tmp_path / "termination.log"
    done = run("serve", "--page-size", "0", folder=tmp_path, MIZZEN_PRT="1", MIZZEN_TERMINATION_LOG=str(log))
    assert done.returncode == 78
    assert [line.split()[:2] for line in done.stderr.splitlines()] == [
        ["mizzen:", "MIZZEN_PRT"],
        ["mizzen:", "MIZZEN_PAGE_SIZE"],
    ]
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["MIZZEN_PRT", "MIZZEN_PAGE_SIZE"]


def test_a_taken_port_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "termination.log"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--model", "m", "--port", port, "--run-dir", str(tmp_path), "--termination-log", str(log)]
        done = run("serve", *flags, folder=tmp_path)
    assert done.returncode == 78
    [line] = done.stderr.splitlines()
    assert line.startswith("mizzen: MIZZEN_PORT")
    assert log.read_text() == line.removeprefix("mizzen: ") + "\n"
    assert not list(tmp_path.glob("mizzen-*"))


@pytest.mark.parametrize("run_dir", ["/nowhere", "long"])
def test_a_run_directory_that_cannot_serve_is_one_line(tmp_path: Path, run_dir: str) -> None:
    if run_dir == "long":
        run_dir = str(tmp_path / ("x" * 100))
        Path(run_dir).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = run("serve", "--model", "m", "--port", port, "--health-port", "0", "--run-dir", run_dir, folder=tmp_path)
    assert done.returncode == 78
    [line] = done.stderr.splitlines()
    assert line.startswith("mizzen: MIZZEN_RUN_DIR")


def test_the_command_does_not_load_torch_or_the_server(tmp_path: Path) -> None:
    program = (
        "import sys, mizzen.cli\n"
        "mizzen.cli.main(['settings', '--model', 'a/b'])\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'fastapi', 'zmq', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0


def test_a_download_ends_at_once_when_it_is_told_to_even_as_pid_1(tmp_path: Path) -> None:
    """As the default action, SIGTERM would end it too, but not PID 1: so by a handler, and an exit code of its own."""
    with socket.create_server(("127.0.0.1", 0)) as hub:  # takes the question, and never answers
        variables = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "mizzen.cli", "download", "--model", "org/model"]
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | variables, stderr=subprocess.DEVNULL)
        connection, _ = hub.accept()
        with connection:
            process.terminate()
            assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_download_says_where_the_model_is_and_refuses_what_is_none(smollm2: Path, tmp_path: Path) -> None:
    done = run("download", "--model", str(smollm2), folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{smollm2}\n")
    refused = run("download", "--model", "/nowhere", folder=tmp_path)
    assert (refused.returncode, refused.stderr) == (78, "mizzen: MIZZEN_MODEL: '/nowhere' does not exist\n")
