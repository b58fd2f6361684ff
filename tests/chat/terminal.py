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

# A session leader that opens a terminal gets it as its own.
_ON_TERMINAL = """
import os, sys
terminal = os.open(sys.argv[1], os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Terminal:
    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, 100))
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, os.ttyname(slave), *command],
            env={"PATH": os.defpath, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "LANG": "C.UTF-8", **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._slave = slave  # kept open: else reading fails once the program has ended
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
        while self.process.poll() is None:
            if select.select([self._master], [], [], 0.02)[0]:
                self._read(1.0, "the end")
            assert time.monotonic() < deadline, f"it does not end; it shows {self.shown!r}"
        while select.select([self._master], [], [], 0)[0]:
            self._read(1.0, "the end")
        return self.process.returncode

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
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads its own session: nobody else is in its group
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)
