"""A server of the shell's own, a child in its process group: the keyboard never reaches it, and it never outlives us.

Ctrl-C and Ctrl-Z go to every process of the terminal's foreground group. The child starts with those signals blocked
(a mask survives exec, whatever handlers the program installs), so that Ctrl-C stops an answer and nothing else.
If the shell is killed, the kernel sends the child SIGTERM, on which it drains and ends.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from mizzen.errors import EXIT_FAILED, MizzenError

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
KILL_GRACE_S = 5.0  # beyond the drain
_PR_SET_PDEATHSIG = 1
_KEYBOARD = {signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP}


class EngineFailed(MizzenError):
    """The server ended before it was ready. ``exit_code`` is for the shell to end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OwnEngine:
    """Starts ``command`` with ``environment``; as a context manager, ends it. The log is kept only if it failed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, drain_timeout_s: float) -> None:
        self._command, self._environment = command, environment
        self._drain_timeout_s = drain_timeout_s
        log, path = tempfile.mkstemp(prefix="mizzen-engine-", suffix=".log")  # 0600: logs may tell of prompts
        self.log_path = Path(path)
        try:
            self._process = self._start(log)
        finally:
            os.close(log)

    def _start(self, log: int) -> subprocess.Popen[bytes]:
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        shell = os.getpid()

        def before_exec() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, _KEYBOARD)
            if libc is not None:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != shell:  # it died before prctl took effect
                    os._exit(EXIT_FAILED)

        # preexec_fn is unsafe beside other threads only: this runs before the prompt has any.
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=before_exec,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        failed = bool(self.fate())
        self._process.terminate()
        try:
            self._process.wait(self._drain_timeout_s + KILL_GRACE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()  # what it had started dies with it
            self._process.wait()
        if not failed:
            self.log_path.unlink()

    def fate(self) -> str:
        """Why the server is gone for good, or nothing while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the engine {how}; its log is {self.log_path}{self._last_line()}"

    def wait_until_ready(self, health_url: str, show: Callable[[str], None]) -> None:
        """Shows the loading phase until the server is ready. Raises EngineFailed if it ends before."""
        started_s = time.monotonic()
        with httpx.Client(base_url=health_url, timeout=2.0, trust_env=False) as http:
            while True:
                if why := self.fate():
                    code = self._process.returncode
                    raise EngineFailed(why, code if code > 0 else EXIT_FAILED)
                try:
                    response = http.get("/health/ready")
                    if response.status_code == httpx.codes.OK:
                        return
                    show(loading_line(response.json()))
                except (httpx.TransportError, ValueError):  # not listening yet
                    show(loading_line({"phase": "start", "phase_s": time.monotonic() - started_s}))
                time.sleep(POLL_S)

    def _last_line(self) -> str:
        lines = self.log_path.read_text(errors="replace").split("\n")
        return next((f"\n  {line}" for line in reversed(lines) if line.strip()), "")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on. (Whoever takes one meanwhile makes the start fail, no more.)"""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def loading_line(health: dict[str, Any]) -> str:
    """Such as "load 40%, 12 s: layer 12 of 30"."""
    fraction = health.get("fraction")
    line = str(health.get("phase", "start"))
    if fraction is not None:
        line += f" {fraction:.0%}"
    line += f", {health.get('phase_s', 0.0):.0f} s"
    detail = health.get("detail")
    return f"{line}: {detail}" if detail else line
