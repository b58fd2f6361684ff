"""k8s/: the chart's manifests for those without Helm, a base and what each example changes in it.

An overlay is the difference between two renderings, written as strategic merge patches: `kubectl kustomize` of it gives
the example's objects again, which a test checks.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package

CHART = Path(__file__).parent / "mizzen"
NAMESPACE = "mizzen"
BASE = ("--set", "config.model=Qwen/Qwen3-8B")
OVERLAYS = ("cpu", "h200", "h200-tp4")  # examples of the chart
HELMS_OWN = re.compile(r"^# Source:|helm\.sh/chart:|managed-by: Helm")
NOTE = "# Made of helm/mizzen by `make chart`: do not edit.\n"
# By what elements of a list are told apart when kubectl merges; other lists are replaced whole.
MERGE_KEYS = dict.fromkeys(("containers", "initContainers", "env", "volumes"), "name") | {"volumeMounts": "mountPath"}

Object = dict[str, Any]


def render(*values: str, helm: str = "helm") -> str:
    """As `helm template` gives it, for the oldest Kubernetes, without test pods and what only Helm needs."""
    command = [helm, "template", "mizzen", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.28.0"]
    done = subprocess.run([*command, "--skip-tests", *values], check=True, capture_output=True, text=True)
    return "\n".join(line for line in done.stdout.splitlines() if not HELMS_OWN.search(line)) + "\n"


def identity(item: Object) -> str:
    return f"{item['kind']}-{item['metadata']['name']}".lower()


def objects(*values: str, helm: str = "helm") -> dict[str, Object]:
    """By kind and name."""
    found: dict[str, Object] = {}
    for item in yaml.safe_load_all(render(*values, helm=helm)):
        if item:
            annotations = item["metadata"].get("annotations", {})
            annotations.pop("helm.sh/resource-policy", None)
            if not annotations:
                item["metadata"].pop("annotations", None)
            found[identity(item)] = item
    return found


def example(name: str, helm: str = "helm") -> dict[str, Object]:
    return objects("--values", str(CHART / "examples" / f"{name}.yaml"), helm=helm)


def difference(base: Object, wanted: Object) -> Object:
    """The strategic merge patch that makes ``wanted`` of ``base``."""
    patch: Object = {key: None for key in base if key not in wanted}
    for key, value in wanted.items():
        old = base.get(key)
        if value == old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            patch[key] = difference(old, value)
        elif isinstance(value, list) and isinstance(old, list) and key in MERGE_KEYS:
            patch[key] = _elements(old, value, MERGE_KEYS[key])
        else:
            patch[key] = value
    return patch


def _elements(base: list[Object], wanted: list[Object], by: str) -> list[Object]:
    old, new = ({element[by]: element for element in elements} for elements in (base, wanted))
    gone = [{by: name, "$patch": "delete"} for name in old if name not in new]
    changed = [{by: name} | difference(old.get(name, {}), new[name]) for name in new if new[name] != old.get(name)]
    return changed + gone


def overlay(base: dict[str, Object], wanted: dict[str, Object]) -> dict[str, Any]:
    """File names and contents: a patch for each object that differs, a resource for each that the base lacks."""
    files: dict[str, Any] = {}
    patches, resources = [], ["../base"]
    for name in sorted(base | wanted):
        if name not in base:
            files[f"{name}.yaml"] = wanted[name]
            resources.append(f"{name}.yaml")
        elif wanted.get(name) != base[name]:
            kind = {key: base[name][key] for key in ("apiVersion", "kind")}
            named = {"metadata": {key: base[name]["metadata"][key] for key in ("name", "namespace")}}
            change = difference(base[name], wanted[name]) if name in wanted else {"$patch": "delete"}
            files[f"{name}.yaml"] = kind | named | change
            patches.append({"path": f"{name}.yaml"})
    return {"kustomization.yaml": kustomization(resources, patches)} | files


def kustomization(resources: list[str], patches: list[Object]) -> Object:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": NAMESPACE}
    return head | {"resources": resources} | ({"patches": patches} if patches else {})


def files(helm: str = "helm") -> dict[str, str]:
    """Every file below k8s/."""
    base = objects(*BASE, helm=helm)
    made = {"base/mizzen.yaml": NOTE + render(*BASE)}
    made["base/kustomization.yaml"] = dump(kustomization(["mizzen.yaml"], []))
    for name in OVERLAYS:
        for path, content in overlay(base, example(name, helm)).items():
            made[f"{name}/{path}"] = dump(content)
    return made


def dump(content: Object) -> str:
    return NOTE + str(yaml.safe_dump(content, sort_keys=False, width=150))
