"""Prints what one layer of an image installs, from pyproject.toml and the constraints: versions are written once.

The cuda image takes the versions that were measured on GPUs (constraints-cuda.txt) before those of constraints.txt.
"""

import argparse
import re
import tomllib
from pathlib import Path

EXTRAS = {"cpu": ["modelscope"], "cuda": ["gpu", "flashinfer", "flash-attn", "modelscope"]}


def name_of(requirement: str) -> str:
    """The project's name, normalized: "Jinja2>=3.1" is "jinja2"."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def requirements(pyproject: Path, flavor: str) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in EXTRAS[flavor] for line in extras[extra])]


def constraints(files: list[Path]) -> list[str]:
    """The lines of all files; where two name the same project, the later file's."""
    pinned: dict[str, str] = {}
    for file in files:
        for line in file.read_text().splitlines():
            if requirement := line.partition("#")[0].strip():
                pinned[name_of(requirement)] = requirement
    return list(pinned.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["requirements", "constraints"])
    parser.add_argument("flavor", choices=sorted(EXTRAS))
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    args = parser.parse_args()
    if args.what == "requirements":
        lines = requirements(args.root / "pyproject.toml", args.flavor)
    else:
        files = [args.root / "constraints.txt"]
        if args.flavor == "cuda":
            files.append(args.root / "docker" / "constraints-cuda.txt")
        lines = constraints(files)
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
