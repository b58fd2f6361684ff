"""The load tests' programs as users run them: processes of their own, in the repository's folder."""

import subprocess
import sys
from pathlib import Path


def run_program(module: str, *words: str | Path) -> str:
    """What it printed; fails unless it ends well within two minutes."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
