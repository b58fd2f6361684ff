"""Custom objects against their own definitions, closed first: an API server drops what it does not know."""

import copy
from collections.abc import Iterator
from typing import Any

import chart
import pytest
import yaml
from chart import EXAMPLES, example
from jsonschema import Draft202012Validator

CRDS = {
    "InferencePool": "inferencepools",
    "HTTPRoute": "httproutes",
    "ServiceMonitor": "servicemonitors",
    "PodMonitor": "podmonitors",
    "PrometheusRule": "prometheusrules",
    "ScaledObject": "scaledobjects",
}
FREE = {"labels", "annotations", "matchLabels"}  # any key is right there; and in a trigger's metadata


def close(schema: Any) -> Any:
    """The CRD's schema, refusing what it does not name."""
    if isinstance(schema, list):
        return [close(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(part) for key, part in schema.items()}
    free = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not free:
        closed["additionalProperties"] = False
    return closed


def validator(kind: str, version: str) -> Draft202012Validator:
    crd = next(
        found
        for found in yaml.safe_load_all((chart.SCHEMAS / f"{CRDS[kind]}.yaml").read_text())
        if found and found["kind"] == "CustomResourceDefinition"
    )
    served = next(entry for entry in crd["spec"]["versions"] if entry["name"] == version)
    assert served["served"]
    schema = close(served["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key whose name means something."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            if key not in FREE and (key != "metadata" or "triggers" not in path):
                yield from places(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from places(value, (*path, index))


def mistyped(item: chart.Object, path: tuple[Any, ...]) -> chart.Object:
    changed = copy.deepcopy(item)
    parent: Any = changed
    for step in path[:-1]:
        parent = parent[step]
    parent[f"{path[-1]}s_"] = parent.pop(path[-1])
    return changed


def custom_objects() -> dict[str, list[chart.Object]]:
    found: dict[str, list[chart.Object]] = {kind: [] for kind in CRDS}
    for values in EXAMPLES:
        for item in example(values):
            if item["kind"] in CRDS:
                found[item["kind"]].append(item)
    return found


@pytest.mark.crds
@pytest.mark.parametrize("kind", CRDS)
def test_custom_objects_are_what_their_definitions_allow(kind: str) -> None:
    objects = custom_objects()[kind]
    assert objects
    for item in objects:
        check = validator(kind, item["apiVersion"].split("/")[1])
        assert [error.message for error in check.iter_errors(item)] == []


@pytest.mark.crds
@pytest.mark.parametrize("kind", CRDS)
def test_any_mistyped_field_of_a_custom_object_is_found(kind: str) -> None:
    item = custom_objects()[kind][0]
    if kind == "PrometheusRule":  # dozens of rules alike: the first of each group
        for group in item["spec"]["groups"]:
            del group["rules"][1:]
    check = validator(kind, item["apiVersion"].split("/")[1])
    spec = [("spec", *path) for path in places(item["spec"])]
    assert len(spec) > 5
    assert [path for path in spec if check.is_valid(mistyped(item, path))] == []
