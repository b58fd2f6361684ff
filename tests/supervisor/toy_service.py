"""A supervisor over toys, in a process of its own, as a test sees it: from outside."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

DEADLINE_S = 30.0  # bounds every wait; no test's result depends on its length
MODES = {
    "api-0": "ok",
    "prepare": "prepare",
    "tokenizer-0": "ok",
    "detokenizer": "ok",
    "engine-0": "ok",
    "engine-1": "ok",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], what: str) -> Any:
    """Waits until ``condition`` is true, and returns what it returned."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"waited {DEADLINE_S:g} s for {what}")


class Service:
    """``modes`` replace those of MODES; ``ports`` are free ones if not given; the rest: fields of SupervisorConfig."""

    def __init__(
        self,
        folder: Path,
        modes: dict[str, str] | None = None,
        ports: dict[str, int] | None = None,
        **supervisor: Any,
    ) -> None:
        self.folder = folder
        ports = {"port": free_port(), "health_port": free_port()} | (ports or {})
        self.port, self.health_port = ports["port"], ports["health_port"]
        self.termination_log = folder / "termination.log"
        order = {
            "run_dir": str(folder),
            "settings": {**ports, "log_format": "json", "log_interval_s": 0.5},
            "supervisor": {"drain_timeout_s": 10.0, "termination_log": str(self.termination_log), **supervisor},
            "modes": MODES | (modes or {}),
        }
        self.stderr_path = folder / "stderr"
        with open(self.stderr_path, "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("run_toys.py")), json.dumps(order)],
                stderr=stderr,
                stdin=subprocess.DEVNULL,
            )

    # ---- what it says ----

    def health(self, probe: str = "ready") -> tuple[int, dict[str, Any]]:
        """Status and body; 0 if the port does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/health/{probe}", timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return 0, {}

    def ready(self) -> bool:
        return self.health()[0] == 200

    def wait_ready(self) -> "Service":
        until(self.ready, "readiness")
        return self

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the toy of this name recorded, all its lives together."""
        path = self.folder / f"{name}.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events(name) if event["event"] == "start"]

    def heard(self, name: str, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.events(name) if entry["event"] == event]

    def pid(self, name: str) -> int:
        return int(self.starts(name)[-1]["pid"])

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stderr_path.read_text().splitlines() if line.startswith("{")]

    # ---- what is done to it ----

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    # ---- what it leaves ----

    def family(self) -> list[psutil.Process]:
        """Every living process that has this service's folder on its command line, except the supervisor."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = any(str(self.folder) in word for word in process.cmdline())
                if mine and process.pid != self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def guard(self) -> psutil.Process | None:
        return next(
            (process for process in self.family() if any("guard.py" in word for word in process.cmdline())), None
        )

    def run_dirs(self) -> list[Path]:
        return list(self.folder.glob("mizzen-*"))

    def assert_nothing_left(self) -> None:
        until(lambda: not self.family(), "every process to be gone")
        until(lambda: not self.run_dirs(), "the run directory to be gone")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.assert_nothing_left()
