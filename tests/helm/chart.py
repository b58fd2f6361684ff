"""The chart through the real Helm, and what it rendered as objects."""

import copy
import functools
import json
import os
import shutil
import subprocess
import sys
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

sys.path.insert(0, str(ROOT / "helm"))  # the generator behind `make chart`


def tool(name: str) -> str:
    """Its path. Skips, naming it, where there is none."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} on the PATH")
    return path


def run(command: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)


def helm(*arguments: str, name: str = "helm", given: str = "") -> subprocess.CompletedProcess[str]:
    return run([tool(name), *arguments], given)


@functools.cache
def _template(arguments: tuple[str, ...], version: str, name: str, given: str) -> list[Object]:
    base = ("template", "llm", str(CHART), "-n", "serving", "--kube-version", version)
    done = helm(*base, *arguments, name=name, given=given)
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.load_all(done.stdout, yaml.CSafeLoader) if found]


def template(*arguments: str, version: str = "1.35.0", name: str = "helm") -> list[Object]:
    return copy.deepcopy(_template(arguments, version, name, ""))


def render(values: Object | None = None, version: str = "1.35.0", name: str = "helm") -> list[Object]:
    """With these values, and a model if they name none."""
    given = values or {}
    mounted = {"existingClaim", "image"} & set(given.get("model", {}))
    given = given | {"config": {"model": "/models/model" if mounted else "org/model"} | given.get("config", {})}
    return copy.deepcopy(_template(("-f", "-"), version, name, json.dumps(given)))


def example(name: str, version: str = "1.35.0", helm_name: str = "helm") -> list[Object]:
    return template("-f", str(CHART / "examples" / f"{name}.yaml"), version=version, name=helm_name)


def refusal(*arguments: str, version: str = "1.35.0", name: str = "helm") -> str:
    done = helm("template", "llm", str(CHART), "--kube-version", version, *arguments, name=name)
    assert done.returncode != 0, "it was not refused"
    return done.stderr


def kinds(objects: list[Object]) -> set[str]:
    return {item["kind"] for item in objects}


def one(objects: list[Object], kind: str, name: str = "") -> Object:
    found = [item for item in objects if item["kind"] == kind and name in ("", item["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} of {kind}"
    return found[0]


def workload(objects: list[Object]) -> Object:
    """The Deployment or StatefulSet."""
    (found,) = [item for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    return found


def pod(objects: list[Object]) -> Object:
    return workload(objects)["spec"]["template"]["spec"]


def server(objects: list[Object]) -> Object:
    return pod(objects)["containers"][0]


def download(objects: list[Object]) -> Object:
    (found,) = pod(objects)["initContainers"]
    return found


def environment(objects: list[Object]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in server(objects)["env"]}


def volumes(objects: list[Object]) -> dict[str, Object]:
    return {volume["name"]: volume for volume in pod(objects)["volumes"]}


def mounts(container: Object) -> dict[str, Object]:
    return {mount["name"]: mount for mount in container["volumeMounts"]}


def pod_specs(objects: list[Object]) -> list[Object]:
    """Of everything that makes pods."""
    templates = [item["spec"]["template"] for item in objects if item["kind"] in ("Deployment", "StatefulSet", "Job")]
    return [found["spec"] for found in [*templates, *(item for item in objects if item["kind"] == "Pod")]]
