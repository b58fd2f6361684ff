"""A ``mizzen serve`` of one's own, as its users run it: real processes on free loopback ports, seen through HTTP alone.

Whatever happens in the ``with`` block, no process of it is left.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from mizzen.top.window import Scrape

POLL_S = 0.02
STOP_TIMEOUT_S = 45.0  # a drain, and the end of all processes


class Failed(Exception):
    """The server did not do what a server must."""


class Served:
    """``settings`` are Mizzen's by their lower-case names; output of the server goes to ``log``."""

    def __init__(self, model: Path, log: Path, **settings: Any) -> None:
        self.port, self.health_port = _free_port(), _free_port()
        self.log_path = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="mz-")  # without a .env file, and a short path for sockets
        ours = {
            "model": model.resolve(),
            "served_model_name": "model",
            "port": self.port,
            "health_port": self.health_port,
            "run_dir": self._folder.name,
            "access_log": False,
            **settings,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MIZZEN_")}
        environment |= {f"MIZZEN_{name.upper()}": str(value) for name, value in ours.items()}
        with log.open("wb") as output:
            self.started_s = time.monotonic()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mizzen.cli", "serve"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._folder.name,
            )

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # its guard ends the others
            self.process.wait(10)
        self._folder.cleanup()

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Seconds from the start of the process to ready, and of each phase that the health port told on the way.

        Raises Failed with the end of the log."""
        phases: dict[str, float] = {}
        phase, since_s = "until the health port answers", self.started_s
        while True:
            health = self.health()
            now = time.monotonic()
            told = phase if health is None else "ready" if health["ready"] else health["phase"]
            if told != phase:
                phases[phase] = round(phases.get(phase, 0.0) + now - since_s, 3)
                phase, since_s = told, now
            if told == "ready":
                return {"seconds": round(now - self.started_s, 3), "phases": phases}
            if self.process.poll() is not None:
                raise Failed(f"the server ended with exit code {self.process.returncode}:\n{self.log_tail()}")
            if now > self.started_s + timeout_s:
                raise Failed(f"not ready after {timeout_s:g} s ({health}):\n{self.log_tail()}")
            time.sleep(POLL_S)

    def wait_idle(self, timeout_s: float) -> dict[str, Any]:
        """The health port's body, once it has told for a second that no request is left. Raises Failed."""
        deadline_s = time.monotonic() + timeout_s
        idle_s: float | None = None
        while True:
            health, now = self.health(), time.monotonic()
            if health is None or not health["ready"] or health["running"] or health["waiting"]:
                idle_s = None
            elif now >= (idle_s := idle_s or now) + 1.0:
                return health
            if now > deadline_s or self.process.poll() is not None:
                raise Failed(f"not idle after {timeout_s:g} s: {health}\n{self.log_tail()}")
            time.sleep(0.1)

    def health(self) -> dict[str, Any] | None:
        """None while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/health/ready", timeout=5) as answer:
                body: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:  # 503 has the same body
            body = json.load(error)
        except OSError:
            return None
        return body

    def max_model_len(self) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=5) as answer:
            return int(json.load(answer)["data"][0]["max_model_len"])

    def exposition(self) -> str:
        """/metrics as it is."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def metrics(self) -> Scrape:
        return Scrape.parse(self.exposition(), time.monotonic())

    def pids(self) -> dict[str, int]:
        """Its processes by name, as their command lines tell; "supervisor" is the first."""
        import psutil

        found = {"supervisor": self.process.pid}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                words = child.cmdline()
                if "--name" in words:
                    found[words[words.index("--name") + 1]] = child.pid
        return found

    def stop(self) -> int:
        """Ends it as an orchestrator does, and returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"still there {STOP_TIMEOUT_S:g} s after SIGTERM:\n{self.log_tail()}") from None

    def log_tail(self, count: int = 40) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])


def vocabulary(model: Path) -> int:
    """Token ids below this number make prompts: as many as the field's benchmarks draw from, if the model has them."""
    return min(10_000, int(json.loads((model / "config.json").read_text())["vocab_size"]))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
