"""The chart through the real Helm, and what it rendered as objects."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "mizzen"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
VERSIONS = ("1.28.0", "1.31.0", "1.35.0", "1.37.0")
SCHEMAS = Path(os.environ.get("TEST_CRDS") or ROOT.parent / "shared" / "schemas")
LEAST = ("--set-json", 'config.model="org/model"')
Object = dict[str, Any]


def helm(*arguments: str, name: str = "helm") -> subprocess.CompletedProcess[str]:
    """Skips, naming it, where there is no Helm."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} on the PATH")
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)


def template(*arguments: str, version: str = "1.35.0", name: str = "helm") -> list[Object]:
    done = helm("template", "llm", str(CHART), "-n", "serving", "--kube-version", version, *arguments, name=name)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def example(name: str, version: str = "1.35.0", helm_name: str = "helm") -> list[Object]:
    return template("-f", str(CHART / "examples" / f"{name}.yaml"), version=version, name=helm_name)


def refusal(*arguments: str, version: str = "1.35.0", name: str = "helm") -> str:
    done = helm("template", "llm", str(CHART), "--kube-version", version, *arguments, name=name)
    assert done.returncode != 0, "it was not refused"
    return done.stderr


def one(objects: list[Object], kind: str) -> Object:
    found = [item for item in objects if item["kind"] == kind]
    assert len(found) == 1, f"{len(found)} of {kind}"
    return found[0]


def pod(objects: list[Object]) -> Object:
    return one(objects, "Deployment")["spec"]["template"]["spec"]


def server(objects: list[Object]) -> Object:
    return pod(objects)["containers"][0]


def environment(objects: list[Object]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in server(objects)["env"]}
