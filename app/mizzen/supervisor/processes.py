"""Spawns, kills and reaps: the only place that touches process ids. Nothing outlives this one, even if it is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mizzen.supervisor import guard
from mizzen.supervisor.spec import ProcessSpec


class Processes:
    """The children, each in a process group of its own, and the guard that cleans up if this process is killed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}  # by pid
        # What a child needs of the settings is in config.json: no key leaks through the environment.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("MIZZEN_")}
        self._guard = self._start_guard()

    def spawn(self, spec: ProcessSpec, *arguments: str) -> int:
        """Starts the process and returns its pid. Raises OSError if the system refuses."""
        child = subprocess.Popen(
            [*spec.command, "--run-dir", str(self._run_dir), "--name", spec.name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,  # stderr: a child has nothing to say on the service's stdout
            env=self._environment,
            pass_fds=spec.fds,
            process_group=0,  # Ctrl-C reaches the supervisor alone; killing the group gets the child's own children
        )
        self._children[child.pid] = (spec.name, child)
        self._tell_guard(f"+{child.pid}")
        return child.pid

    def kill(self, name: str) -> None:
        for pid, (running, _) in self._children.items():
            if running == name:
                _kill_group(pid)

    def reap(self) -> list[tuple[str, int]]:
        """Names and exit codes (negative: signal) of those that ended; as PID 1, other people's orphans too."""
        ended: list[tuple[str, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            code = os.waitstatus_to_exitcode(status)
            if pid == self._guard.pid:
                self._guard.returncode = code
                self._replace_guard()
            elif pid in self._children:
                name, child = self._children.pop(pid)
                child.returncode = code  # tells Popen that there is nothing left to wait for
                _kill_group(pid)  # what the child had started itself
                self._tell_guard(f"-{pid}")
                ended.append((name, code))

    @property
    def running(self) -> list[str]:
        return [name for name, _ in self._children.values()]

    def close(self) -> None:
        """Kills and reaps whatever is left, then sends the guard home."""
        for pid in self._children:
            _kill_group(pid)
        deadline = time.monotonic() + 2.0
        while self._children and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.01)
        self._tell_guard("bye")
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        try:
            self._guard.wait(timeout=1.0)
        except subprocess.TimeoutExpired:  # a busy machine: its work is done here already
            self._guard.kill()
            self._guard.wait()

    # ---- the guard ----

    def _start_guard(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(self._run_dir)],
            stdin=subprocess.PIPE,
            stdout=2,
            env=self._environment,
            start_new_session=True,  # a signal to the supervisor's group or terminal must not take the guard along
        )

    def _replace_guard(self) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard = self._start_guard()
        for pid in self._children:
            self._tell_guard(f"+{pid}")

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: reap() is about to replace it and tell it all
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
