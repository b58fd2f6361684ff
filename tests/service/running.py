"""A whole Mizzen as its users run it: ``mizzen serve`` as a process, on free loopback ports."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """``settings`` are MIZZEN_* values by their lower-case names."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        self.port = int(settings.get("port", free_port()))
        self.health_port = int(settings.get("health_port", free_port()))
        self.url = f"http://127.0.0.1:{self.port}"
        self.health_url = f"http://127.0.0.1:{self.health_port}"
        self.run_parent = folder / "run"
        self.run_parent.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        self.termination_log = folder / "termination-log"
        defaults = {
            "model": model,
            "port": self.port,
            "health_port": self.health_port,
            "run_dir": self.run_parent,
            "termination_log": self.termination_log,
            "served_model_name": "test-model",
            "threads": 1,
            "kv_cache_bytes": 2**27,
            "max_restarts": 20,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MIZZEN_")}
        environment |= {f"MIZZEN_{name.upper()}": str(value) for name, value in {**defaults, **settings}.items()}
        self._log = self.log_path.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mizzen.cli", "serve"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=folder,  # no .env file of the repository's
            start_new_session=True,  # a process group of its own, in which nothing may be left
        )
        self.group = self.process.pid

    # ---- what it is doing ----

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def health(self, which: str = "ready", *, url: str | None = None) -> tuple[int, dict[str, Any]]:
        answer = httpx.get(f"{url or self.health_url}/health/{which}", timeout=5)
        return answer.status_code, answer.json()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.log()}"
            with contextlib.suppress(httpx.HTTPError):
                # both: the api answers from a snapshot that it gets a moment later
                if all(self.health(url=url)[0] == 200 for url in (self.health_url, self.url)):
                    return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log()}")

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Until the engine holds no request and no page, in all snapshots of a second (it beats 4 times a second, so
        one of them is of now); returns the last."""
        deadline = time.monotonic() + timeout_s
        idle_s: float | None = None
        while True:
            now = time.monotonic()
            status, body = self.health()
            if status == 200 and body["running"] == body["waiting"] == body["kv_pages_used"] == 0:
                idle_s = idle_s or now
                if now >= idle_s + 1.0 and body["kv_pages_total"] > 0:
                    return body
            else:
                idle_s = None
            assert now < deadline, f"still busy: {body}"
            time.sleep(0.1)

    def pids(self) -> dict[str, int]:
        """The children by name, as their command lines tell."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "--name" in words:
                    found[words[words.index("--name") + 1]] = child.pid
        return found

    # ---- using it ----

    def chat(self, content: str = "What is the capital of France?", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: Any = "The capital of France is", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def post(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        body = {"model": "test-model", "temperature": 0, "max_tokens": 16, **fields}
        return httpx.post(self.url + path, json={k: v for k, v in body.items() if v is not ...}, timeout=60)

    def stream(self, path: str = "/v1/completions", **fields: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer; the last may be an error. Ends at [DONE] or where the connection ends."""
        body = {"model": "test-model", "temperature": 0, "max_tokens": 16, "stream": True, **fields}
        with httpx.stream("POST", self.url + path, json=body, timeout=60) as answer:
            if answer.status_code != 200:
                answer.read()
                raise AssertionError(f"{answer.status_code}: {answer.text}")
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    # ---- ending it ----

    def stop(self, sig: signal.Signals = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit code. ``close`` is still to be called."""
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Whatever state it is in: nothing of it goes on."""
        self.process.kill()
        self.process.wait(10)
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._log.close()

    def family(self) -> list[psutil.Process]:
        """Every living process of it. Children have groups of their own, but the session is one; the guard has a
        session of its own, but the run directory on its command line."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                ours = os.getsid(process.pid) == self.group or any(str(self.run_parent) in w for w in process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def leftovers(self) -> list[str]:
        """Processes and entries of the run directory that are still there."""
        processes = []
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                processes.append(f"{process.pid}: {' '.join(process.cmdline())}")
        return processes + [str(path) for path in self.run_parent.iterdir()]

    def wait_nothing_left(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while left := self.leftovers():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
