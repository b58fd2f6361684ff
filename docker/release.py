"""A release has one version, in every file that says one, and notes: python docker/release.py v0.1.0 > notes.md

Exit code 1, with a line for each file that says another. Without a tag the files are compared with each other.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSION = r"(\d+\.\d+\.\d+(?:-rc\d+)?)"
PLACES = {  # file, to what stands around the version in it
    "pyproject.toml": r'^version = "{}"$',
    "app/mizzen/version.py": r'^__version__ = "{}"$',
    "helm/mizzen/Chart.yaml": r"^(?:version|appVersion): {}$",
    "docker-compose.yml": r"mizzen:{}-cuda",
    "docker/compose.cpu.yml": r"mizzen:{}-cpu",
    ".env.example": r"mizzen:{}-(?:cuda|cpu)",
    "docs/containers.md": r"mizzen:{}-(?:cuda|cpu)",
}


def versions(root: Path) -> list[tuple[str, str]]:
    """(file, the version that it says), as often as it does; "none" where it says none."""
    found = []
    for file, around in PLACES.items():
        said = re.findall(around.replace("{}", VERSION), (root / file).read_text(), re.MULTILINE)
        found += [(file, version) for version in said or ["none"]]
    return found


def notes(changelog: str, version: str) -> str:
    """The section of ``version``: what stands below its heading, "## 0.1.0" and perhaps a date."""
    section = re.search(rf"^## {re.escape(version)}( [^\n]*)?\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return section[2].strip() if section is not None else ""


def check(root: Path, tag: str | None) -> tuple[list[str], str]:
    """What is wrong, a line each, and the tag's notes."""
    found = versions(root)
    version = found[0][1] if tag is None else tag.removeprefix("v")
    wrong = [f"{file} says {said}, not {version}" for file, said in dict.fromkeys(found) if said != version]
    if tag is None:
        return wrong, ""
    if not re.fullmatch(f"v{VERSION}", tag):
        wrong.append(f"{tag} is no tag of a release: v0.1.0 is one, and v0.1.0-rc1")
    text = notes((root / "CHANGELOG.md").read_text(), version)
    if not text:
        wrong.append(f"CHANGELOG.md has no section {version}")
    return wrong, text


def main() -> int:
    wrong, text = check(ROOT, sys.argv[1] if len(sys.argv) > 1 else None)
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    print(text, end="\n" if text else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
