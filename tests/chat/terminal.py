"""A program on a real pseudo-terminal, which it controls: Ctrl-C there is SIGINT to its whole process group."""

import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

# What a login shell is to a program: the leader of the session, which gets the terminal by opening it, and stays.
_LEADER = """
import os, signal, subprocess, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
signal.signal(signal.SIGINT, lambda *_: None)
program = subprocess.Popen(sys.argv[2:], stdin=terminal, stdout=terminal, stderr=terminal)
print(program.pid, flush=True)
print(program.wait(), flush=True)
sys.stdin.read()
"""


class Terminal:
    """``pid`` is the program's, ``group`` that of its process group."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._master, self._slave = os.openpty()
        termios.tcsetwinsize(self._slave, (24, 100))
        self._leader = subprocess.Popen(
            [sys.executable, "-c", _LEADER, os.ttyname(self._slave), *command],
            env={"PATH": os.defpath, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "LANG": "C.UTF-8", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.group = self._leader.pid
        assert self._leader.stdout is not None
        self._says = self._leader.stdout
        self.pid = int(self._says.readline())
        self.shown = ""

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str, timeout_s: float = 30.0) -> str:
        """Waits until ``text`` is shown; returns what was shown up to its end, and forgets it."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            self._read(deadline - time.monotonic(), text)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit code. What is shown meanwhile can be expected afterwards."""
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([self._master, self._says], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"it does not end; it shows {self.shown!r}"
            if self._master in ready:
                self._read(1.0, "the end")
            else:
                return int(self._says.readline())

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, as it does between programs that take each key themselves."""
        return bool(termios.tcgetattr(self._slave)[3] & termios.ECHO)

    def _read(self, timeout_s: float, wanted: str) -> None:
        ready, _, _ = select.select([self._master], [], [], max(0.0, timeout_s))
        assert ready, f"{wanted!r} is not shown, but {self.shown!r}"
        self.shown += os.read(self._master, 65536).decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.killpg(self.group, signal.SIGKILL)  # the leader still leads it: nobody else can have its number
        self._leader.communicate()
        os.close(self._master)
        os.close(self._slave)
