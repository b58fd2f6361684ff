"""Wrong values are refused before anything is installed, by their key; and what is generated is up to date."""

import importlib.util
import json
import tomllib
from types import ModuleType
from typing import Any

import chart
import pytest
import yaml
from chart import LEAST, refusal

WRONG: list[tuple[str, Any]] = [
    ("config.model", 7),
    ("config.page_sise", 16),
    ("config.page_size", 0),
    ("config.page_size", "sixteen"),
    ("config.dtype", "int3"),
    ("config.port", 70000),
    ("config.health_port", 0),
    ("config.tensor_parallel_size", 1.5),
    ("config.memory_fraction", 1.1),
    ("config.drain_timeout_s", -1),
    ("config.max_body_bytes", 10),
    ("config.metrics", "yes"),
    ("config.log_level", "loud"),
    ("config.api_keys", "secret"),
    ("config.engine_cpus", "a,b"),
    ("replica", 2),
    ("replicas", -1),
    ("replicas", "two"),
    ("image.digest", "sha256:12"),
    ("image.pullPolicy", "Sometimes"),
    ("gpu.resource", "gpu"),
    ("gpu.perNode", 0),
    ("shm.sizeLimit", "4GB"),
    ("cache.models.accessModes", ["ReadOften"]),
    ("preStopSeconds", 1000),
    ("service.type", "Headless"),
    ("networkPolicy.downloadCidrs", ["everywhere"]),
    ("otlp.endpoint", "collector:4317"),
    ("otlp.sampleRatio", 2),
    ("autoscaling.kind", "cpu"),
    ("monitoring.interval", "often"),
    ("tolerations", "all"),
]


@pytest.mark.parametrize("name", ["helm3", "helm4"])
@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}={value}" for key, value in WRONG])
def test_a_wrong_value_is_refused_by_its_key(key: str, value: Any, name: str) -> None:
    said = refusal(*LEAST, "--set-json", f"{key}={json.dumps(value)}", name=name)
    assert key.split(".")[-1] in said


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ("config.model=", "config.model is empty"),
        ("config.tensor_parallel_size=16", "a model over more than one node is not supported yet"),
        ("model.existingClaim=a,model.image=b", "exclude each other"),
        ("cache.models.create=true,replicas=2", "cache.models is a ReadWriteOnce claim, which 2 replicas cannot share"),
        ("cache.compiled.existingClaim=a", "cache.compiled is a ReadWriteOnce claim: set strategy.maxSurge to 0"),
        ("cache.models.create=true,autoscaling.kind=hpa", "which 4 replicas cannot share"),
        ("strategy.maxSurge=0", "nothing could ever be replaced"),
        ("monitoring.podMonitor=true,monitoring.serviceMonitor=true", "choose one"),
        ("monitoring.podMonitor=true,config.metrics_require_key=true", "monitoring.authorization must name a key"),
        ("autoscaling.kind=hpa,config.metrics=false", "config.metrics is false: monitors and autoscaling need it"),
        ("autoscaling.kind=keda,autoscaling.minReplicas=9", "autoscaling.maxReplicas is below"),
        ("inferencePool.enabled=true", "inferencePool.endpointPicker.name is empty"),
        ("httpRoute.enabled=true", "httpRoute.parentRefs is empty"),
    ],
)
def test_what_could_never_work_is_refused_in_a_line(values: str, line: str) -> None:
    assert line in refusal(*LEAST, "--set", values)


def test_an_image_volume_needs_kubernetes_1_35() -> None:
    said = refusal(*LEAST, "--set", "model.image=registry/model:1", version="1.34.9")
    assert "model.image needs Kubernetes 1.35, this is v1.34.9" in said
    objects = chart.template(*LEAST, "--set", "model.image=registry/model:1", version="1.35.0")
    assert {"name": "model", "image": {"reference": "registry/model:1", "pullPolicy": "IfNotPresent"}} in chart.pod(
        objects
    )["volumes"]


def test_global_values_of_a_parent_chart_are_let_through() -> None:
    assert chart.template(*LEAST, "--set", "global.team=search")


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart_generate", chart.ROOT / "helm" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_charts_schema_and_copies_are_up_to_date() -> None:
    for path, text in generator().generated().items():
        assert path.read_text() == text, f"{path} is old: run `make chart`"


def test_every_value_has_a_schema_and_every_schema_but_the_settings_a_value() -> None:
    def paths(tree: Any, prefix: str = "") -> set[str]:
        if not isinstance(tree, dict) or not tree:
            return {prefix}
        return set().union(*(paths(value, f"{prefix}.{key}") for key, value in tree.items()))

    def named(schema: Any, prefix: str = "") -> set[str]:
        if "properties" not in schema:
            return {prefix}
        return set().union(*(named(value, f"{prefix}.{key}") for key, value in schema["properties"].items()))

    open_ones = (
        ".config.",
        ".global",
        ".resources",
        ".podSecurityContext",
        ".securityContext",
        ".monitoring.dashboardLabels",
    )
    values = paths(yaml.safe_load((chart.CHART / "values.yaml").read_text()))
    schema = named(json.loads((chart.CHART / "values.schema.json").read_text()))
    assert {path for path in values if not path.startswith(open_ones)} == {
        path for path in schema if not path.startswith(open_ones)
    }


def test_the_chart_installs_the_version_beside_it() -> None:
    project = tomllib.loads((chart.ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((chart.CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


@pytest.mark.parametrize("name", ["cpu", "h200", "h200-tp4"])
def test_plain_manifests_are_what_the_chart_renders(name: str) -> None:
    chart.helm("version")
    objects = list(yaml.safe_load_all((chart.ROOT / "k8s" / name / "mizzen.yaml").read_text()))
    assert objects == list(yaml.safe_load_all(generator().plain(name))), "run `make chart`"
    assert not {"Pod", "Secret"} & {item["kind"] for item in objects}
