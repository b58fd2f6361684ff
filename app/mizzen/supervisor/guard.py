"""Outlives the supervisor by a moment: when the pipe from it closes, kills what it left and removes its run directory.

Run as a script (``python -I -S guard.py RUN_DIR``, the pipe is stdin), so it imports nothing of the package: it stays
small and starts in milliseconds. Lines on the pipe: "+PGID" and "-PGID" as process groups come and go, "bye" at an
orderly end. Only groups that the supervisor made are ever killed.
"""

import contextlib
import os
import shutil
import signal
import sys
import time


def main() -> None:
    run_dir = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "bye":
            return
        if word.startswith("+"):
            groups.add(int(word[1:]))
        else:
            groups.discard(int(word[1:]))
    for _ in range(20):  # until all are gone: a process dying slowly might still write into the run directory
        for group in list(groups):
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                groups.discard(group)
        if not groups:
            break
        time.sleep(0.05)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(run_dir)


if __name__ == "__main__":
    main()
