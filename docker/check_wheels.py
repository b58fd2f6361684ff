"""Resolves what the cuda image installs, as its Python would: a wheel that is missing is found before a build.

Ubuntu 24.04 has Python 3.12. Only metadata is fetched, where the index has it apart from the wheels.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from requirements import constraints, requirements

ROOT = Path(__file__).parent.parent
PYTHON = "3.12"
GLIBC = range(17, 40)  # 2.39 and older


def main() -> int:
    pins = constraints([ROOT / "constraints.txt", ROOT / "docker" / "constraints-cuda.txt"])
    wanted = requirements(ROOT / "pyproject.toml", "cuda")
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    with tempfile.TemporaryDirectory() as scratch:
        constraint, report = Path(scratch) / "constraints.txt", Path(scratch) / "report.json"
        constraint.write_text("\n".join(pins))
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
        ]
        command += [f"--python-version={PYTHON}", "--implementation=cp", *platforms, f"--target={scratch}/none"]
        done = subprocess.run([*command, f"--report={report}", "-c", str(constraint), *wanted], check=False)
        if done.returncode != 0:
            return done.returncode
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    pinned = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    loose = sorted(
        f"{one['name']}=={one['version']}" for one in found if one["name"].lower().replace("_", "-") not in pinned
    )
    print(f"{len(found)} wheels for Python {PYTHON}; not pinned: {', '.join(loose) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
