"""Toggles together: every two settings of them meet in some case, and each case renders alike, valid and whole."""

import itertools
import re
from typing import Any

import chart
import kubernetes_validate
import pytest
from chart import VERSIONS, kinds, mounts, pod_specs, render
from test_chart_custom import CRDS, validator
from test_chart_objects import is_custom

SHARED = {"accessModes": ["ReadWriteMany"]}
DOORS = {"networkPolicy": {"namespaces": ["gateway"], "ingressCidrs": ["10.0.0.0/8"]}}
INGRESS = {"ingress": {"enabled": True, "host": "llm.example.com", "tlsSecret": "tls"}, **DOORS}
ROUTE = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public", "port": 443}]}, **DOORS}
NOTHING: chart.Object = {}
TOGGLES: dict[str, dict[str, Any]] = {
    "version": {version: version for version in VERSIONS},
    "kind": {"Deployment": {"kind": "Deployment"}, "StatefulSet": {"kind": "StatefulSet"}},
    "devices": {
        "gpus": {"config": {"tensor_parallel_size": 4}},
        "mig": {"gpu": {"resource": "nvidia.com/mig-3g.71gb"}},
        "cpu": {"config": {"device": "cpu"}},
        "dra": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}]},
    },
    "model": {
        "named": NOTHING,
        "claim": {"model": {"existingClaim": "prepared"}},
        "image": {"model": {"image": "r/model:1"}},
        "path": {"config": {"model": "/mnt/model"}},
    },
    "caches": {
        "empty": NOTHING,
        "created": {"cache": {"models": {"create": True, **SHARED}, "compiled": {"create": True, **SHARED}}},
        "existing": {"cache": {"models": {"existingClaim": "m", **SHARED}, "compiled": {"create": True, **SHARED}}},
    },
    "scaling": {
        "one": NOTHING,
        "three": {"replicas": 3, "strategy": {"maxSurge": 0, "maxUnavailable": 1}},
        "hpa": {"autoscaling": {"kind": "hpa"}},
        "keda": {"autoscaling": {"kind": "keda"}},
    },
    "keys": {
        "none": NOTHING,
        "created": {"apiKeys": {"keys": ["a", "b"]}, "huggingface": {"token": "t"}},
        "existing": {"apiKeys": {"existingSecret": "k"}, "huggingface": {"existingSecret": "t"}},
    },
    "service": {
        "inside": NOTHING,
        "outside": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}, **DOORS},
    },
    "routing": {
        "none": NOTHING,
        "ingress": INGRESS,
        "route": ROUTE,
        "both": INGRESS | ROUTE,
        "alb": INGRESS | {"loadBalancer": "alb"},
        "gke-ingress": INGRESS | {"loadBalancer": "gke-ingress"},
        "gke-gateway": ROUTE | {"loadBalancer": "gke-gateway"},
    },
    "pool": {
        "off": NOTHING,
        "on": {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}},
    },
    "monitor": {
        "none": NOTHING,
        "pods": {"monitoring": {"podMonitor": True, "rules": True}},
        "service": {"monitoring": {"serviceMonitor": True, "dashboards": True}},
    },
    "policy": {
        "on": NOTHING,
        "strict": {"networkPolicy": {"sameNamespace": False}},
        "off": {"networkPolicy": {"enabled": False}},
    },
    "traces": {"off": NOTHING, "on": {"otlp": {"endpoint": "http://collector:4318"}}},
    "pre-stop": {"on": NOTHING, "off": {"preStopSeconds": 0}},
    "budget": {"on": NOTHING, "off": {"podDisruptionBudget": {"enabled": False}}},
    "account": {"created": NOTHING, "given": {"serviceAccount": {"create": False, "name": "mine"}}},
    "load-test": {"off": NOTHING, "on": {"loadTest": {"enabled": True}}},
    "queue": {"off": NOTHING, "on": {"queueName": "gpus", "doNotDisrupt": True}},
    "extras": {
        "off": NOTHING,
        "on": {
            "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
            "extraContainers": [{"name": "beside", "image": "busybox", "volumeMounts": []}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "priorityClassName": "serving",
        },
    },
}
Case = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]
TOO_OLD = {("model", "image"): ("1.28.0", "1.31.0"), ("devices", "dra"): ("1.28.0", "1.31.0")}  # refused there


def possible(pair: Pair) -> bool:
    (_, first), second = pair
    return first not in TOO_OLD.get(second, ())


def pairs() -> list[Pair]:
    every = itertools.combinations(TOGGLES, 2)
    both = [((a, x), (b, y)) for a, b in every for x in TOGGLES[a] for y in TOGGLES[b]]
    return [pair for pair in both if possible(pair)]


def cases() -> list[Case]:
    """Greedy: each case starts from a pair that has not met yet, and takes what makes most others meet."""
    missing = dict.fromkeys(pairs())
    found = []
    while missing:
        case: Case = dict(next(iter(missing)))
        for toggle in [name for name in TOGGLES if name not in case]:
            scores = {
                setting: sum(met(toggle, setting, *chosen) in missing for chosen in case.items())
                for setting in TOGGLES[toggle]
                if all(possible(met(toggle, setting, *chosen)) for chosen in case.items())
            }
            case[toggle] = max(scores, key=lambda setting: scores[setting])
        for pair in itertools.combinations([(name, case[name]) for name in TOGGLES], 2):
            missing.pop(pair, None)
        found.append(case)
    return found


ORDER = list(TOGGLES)


def met(toggle: str, setting: str, other: str, chosen: str) -> Pair:
    first, second = (toggle, setting), (other, chosen)
    return (first, second) if ORDER.index(toggle) < ORDER.index(other) else (second, first)


def merged(parts: list[chart.Object]) -> chart.Object:
    whole: chart.Object = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = merged([whole.get(key, {}), value]) if isinstance(value, dict) else value
    return whole


CASES = cases()


def rendered(case: Case, name: str) -> list[chart.Object]:
    return render(merged([TOGGLES[key][case[key]] for key in TOGGLES if key != "version"]), case["version"], name)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_case_renders_alike_and_valid(case: Case) -> None:
    objects = rendered(case, "helm4")
    assert objects == rendered(case, "helm3")
    for item in objects:
        if not is_custom(item):
            kubernetes_validate.validate(item, case["version"], strict=True)


@pytest.mark.crds
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_cases_custom_objects_are_what_their_definitions_allow(case: Case) -> None:
    for item in rendered(case, "helm4"):
        if item["kind"] in CRDS:
            check = validator(item["kind"], item["apiVersion"].split("/")[1])
            assert [error.message for error in check.iter_errors(item)] == []


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_case_names_nothing_that_is_not_there(case: Case) -> None:
    objects = rendered(case, "helm4")
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)
    ours = {name for kind, name in names if kind in ("Secret", "PersistentVolumeClaim")}
    workload = chart.workload(objects)
    claimed = {item["metadata"]["name"] for item in workload["spec"].get("volumeClaimTemplates", [])}
    for spec in pod_specs(objects):
        there = {volume["name"] for volume in spec["volumes"]} | (claimed if spec is chart.pod(objects) else set())
        for container in spec["containers"] + spec.get("initContainers", []):
            assert set(mounts(container)) <= there
        used = re.findall(r"'(?:secretName|claimName)': '(llm-mizzen[^']*)'", str(spec))
        assert set(used) <= ours
    labels = workload["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in chart.server(objects)["ports"]}
    for service in [item["spec"] for item in objects if item["kind"] == "Service"]:
        assert service["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["ports"]} <= ports
    if case["service"] == "outside":
        assert "health" not in {port["name"] for port in chart.one(objects, "Service", "llm-mizzen")["spec"]["ports"]}


def test_every_two_settings_meet_in_a_case_and_every_kind_of_object_appears() -> None:
    met_pairs = {pair for case in CASES for pair in itertools.combinations([(name, case[name]) for name in TOGGLES], 2)}
    assert set(pairs()) <= met_pairs
    assert all(possible(pair) for pair in met_pairs)
    seen = set().union(*(kinds(rendered(case, "helm4")) for case in CASES))
    templates = "".join(path.read_text() for path in (chart.CHART / "templates").rglob("*.yaml"))
    named = set(re.findall(r"^ *kind: ([A-Z]\w+)$", templates, re.MULTILINE)) | {"PodMonitor", "ServiceMonitor"}
    assert named | {"Deployment", "StatefulSet"} == seen
