"""What the chart renders as a whole: both Helms alike, valid for each Kubernetes, settings that the server takes."""

import os
from typing import Any

import chart
import kubernetes_validate
import pytest
import yaml
from chart import EXAMPLES, VERSIONS, environment, example, pod, render

from mizzen.config.settings import Settings, is_secret, load_settings, variable

BUILT_IN = {"v1", "apps", "autoscaling", "batch", "networking.k8s.io", "policy"}


def is_custom(item: chart.Object) -> bool:
    return item["apiVersion"].split("/")[0] not in BUILT_IN


@pytest.mark.parametrize("name", ["helm3", "helm4"])
@pytest.mark.parametrize("values", EXAMPLES)
def test_lint_finds_nothing_in_an_example(values: str, name: str) -> None:
    path = chart.CHART / "examples" / f"{values}.yaml"
    done = chart.helm("lint", "--strict", str(chart.CHART), "-f", str(path), name=name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_both_helms_render_the_same() -> None:
    for values in EXAMPLES:
        assert example(values, helm_name="helm3") == example(values, helm_name="helm4")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", EXAMPLES)
def test_objects_are_valid_in_each_version_of_kubernetes(values: str, version: str) -> None:
    checked = [item for item in example(values, version) if not is_custom(item)]
    for item in checked:
        kubernetes_validate.validate(item, version, strict=True)
    assert {"Service", "ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "Pod"} < chart.kinds(checked)


def test_a_mistyped_field_is_invalid() -> None:
    item = chart.workload(example("h200"))
    item["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(item, "1.35.0", strict=True)


@pytest.mark.parametrize("values", EXAMPLES)
def test_every_object_is_named_for_the_release_and_in_its_namespace(values: str) -> None:
    objects = example(values)
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(names)) == len(names)
    for item in objects:
        assert item["metadata"]["name"].startswith("llm-mizzen")
        assert item["metadata"]["namespace"] == "serving"
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "llm"


def test_names_follow_the_release_and_the_overrides() -> None:
    def name(*arguments: str, release: str = "llm") -> str:
        done = chart.helm(
            "template", release, str(chart.CHART), *chart.LEAST, "-s", "templates/workload.yaml", *arguments
        )
        return str(yaml.safe_load(done.stdout)["metadata"]["name"])

    assert name() == "llm-mizzen"
    assert name(release="my-mizzen") == "my-mizzen"
    assert name("--set", "nameOverride=qwen") == "llm-qwen"
    assert name("--set", "fullnameOverride=qwen") == "qwen"
    assert len(name("--set", f"fullnameOverride={'x' * 60}")) == 50  # what is appended fits in 63


@pytest.mark.parametrize("values", EXAMPLES)
def test_the_server_accepts_the_pods_environment(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for container in pod(example(values))["containers"] + pod(example(values)).get("initContainers", []):
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        others = {name for name in given if not name.startswith(("MIZZEN_", "OTEL_", "HF_", "NCCL_"))}
        assert others <= {"NVIDIA_VISIBLE_DEVICES"}
        for name in [name for name in os.environ if name.startswith("MIZZEN_")]:
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        loaded = load_settings(env_file=None)  # refuses an unknown name, and a wrong value
        assert loaded.settings.model
        assert loaded.service_links == ()


def every_setting() -> dict[str, Any]:
    """A value for each that a values file may set."""
    special: dict[str, Any] = {
        "model": "org/model",
        "max_body_bytes": 52428800,
        "kv_cache_bytes": 68719476736,
        "memory_fraction": 0.85,
        "nvtx": True,
        "access_log": False,
        "attention_backend": "sdpa",
    }
    return {
        name: special.get(name, "1" if field.default is None else field.default)
        for name, field in Settings.model_fields.items()
        if not is_secret(field) and name != "api_keys_file"
    }


def test_every_setting_reaches_the_server_from_a_values_file() -> None:
    chosen = every_setting()
    given = environment(render({"config": chosen, "apiKeys": {"keys": ["secret"]}}))
    assert set(given) >= {variable(name) for name in chosen} | {"MIZZEN_API_KEYS_FILE"}
    assert given["MIZZEN_MAX_BODY_BYTES"] == "52428800"
    assert given["MIZZEN_KV_CACHE_BYTES"] == "68719476736"
    assert given["MIZZEN_MEMORY_FRACTION"] == "0.85"
    assert given["MIZZEN_NVTX"] == "true"
    assert given["MIZZEN_ACCESS_LOG"] == "false"


@pytest.mark.parametrize("way", ["-f", "--set", "--set-json"])
@pytest.mark.parametrize("name", ["helm3", "helm4"])
def test_large_integers_survive(way: str, name: str) -> None:
    size = {"-f": ("-f", "-"), "--set": ("--set", "config.max_body_bytes=52428800")}
    arguments = size.get(way, ("--set-json", "config.max_body_bytes=52428800"))
    base = ("template", "llm", str(chart.CHART), *chart.LEAST)
    done = chart.helm(*base, *arguments, name=name, given="config: {max_body_bytes: 52428800}")
    assert '- name: MIZZEN_MAX_BODY_BYTES\n              value: "52428800"\n' in done.stdout


def integers(schema: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], int]:
    """The largest value of every integer that the schema has."""
    found: dict[tuple[str, ...], int] = {}
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            found[path] = schema["maximum"]
        for option in schema.get("anyOf", []):
            found |= integers(option, path)
        for key, value in schema.get("properties", {}).items():
            found |= integers(value, (*path, key))
    return found


def test_every_integer_of_the_values_survives_at_its_largest() -> None:
    schema = yaml.safe_load((chart.CHART / "values.schema.json").read_text())
    largest = integers(schema)
    assert len(largest) > 30
    values: dict[str, Any] = {
        "autoscaling": {"kind": "keda"},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
        "otlp": {"endpoint": "http://collector:65535"},
    }
    for path, value in largest.items():
        place = values
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    values["gpu"]["perNode"] = values["config"]["tensor_parallel_size"]
    values["config"]["model"] = "org/model"
    done = chart.helm("template", "llm", str(chart.CHART), "-f", "-", given=yaml.safe_dump(values))
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stdout.splitlines() if "e+" in line.split("checksum")[0]]
    assert f'"{2**53}"' in done.stdout  # config.seed


@pytest.mark.parametrize("name", ["helm3", "helm4"])
def test_a_setting_taken_away_leaves_the_servers_own(name: str) -> None:
    given = environment(render({"config": {"log_format": None, "chat_template": None}}, name=name))
    assert not {"MIZZEN_LOG_FORMAT", "MIZZEN_CHAT_TEMPLATE"} & set(given)
    assert "MIZZEN_LOG_FORMAT" in environment(render(name=name))


def test_global_values_of_a_parent_chart_are_let_through() -> None:
    assert chart.template(*chart.LEAST, "--set", "global.team=search")
