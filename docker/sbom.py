"""Prints the bill of materials of the system that it runs in, as CycloneDX 1.6: Python's packages and Debian's.

`make sbom` hands it to the image's own Python, so that what is listed is what is there.
"""

import json
import platform
import subprocess
from importlib.metadata import distributions
from typing import Any


def component(kind: str, name: str, version: str, licence: str | None = None) -> dict[str, Any]:
    """``kind``: the type of a package URL."""
    purl = f"pkg:{kind}/{name}@{version.replace('+', '%2B').replace(':', '%3A')}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licence:
        found["licenses"] = [{"license": {"name": licence}}]
    return found


def python_packages() -> list[dict[str, Any]]:
    found = {}
    for distribution in distributions():
        metadata = distribution.metadata.json
        name = str(metadata["name"]).lower().replace("_", "-")
        # An old package's field may hold the whole text: its first line names it.
        licence = str(metadata.get("license_expression") or metadata.get("license", "")).partition("\n")[0][:80]
        found[name] = component("pypi", name, distribution.version, licence)
    return [found[name] for name in sorted(found)]


def system_packages() -> list[dict[str, Any]]:
    vendor = platform.freedesktop_os_release()["ID"]
    query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${db:Status-Status}\n"]
    lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    installed = [line.split() for line in lines if line.endswith(" installed")]
    return [component(f"deb/{vendor}", name, version) for name, version, _ in sorted(installed)]


def main() -> None:
    components = python_packages() + system_packages()
    print(
        json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}, indent=1)
    )


if __name__ == "__main__":
    main()
