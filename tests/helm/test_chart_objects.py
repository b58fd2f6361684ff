"""What the chart renders: valid for each version of Kubernetes, with the server's own settings, probes and drain."""

import math
import os
from typing import Any

import chart
import kubernetes_validate
import pytest
import yaml
from chart import EXAMPLES, LEAST, VERSIONS, environment, example, one, pod, server, template
from jsonschema import Draft202012Validator

from mizzen.config.settings import Settings, is_secret, load_settings, variable
from mizzen.observability.metrics import METRICS
from mizzen.supervisor.health import PROBES

CRDS = {
    "InferencePool": "inferencepools",
    "HTTPRoute": "httproutes",
    "ServiceMonitor": "servicemonitors",
    "PodMonitor": "podmonitors",
    "PrometheusRule": "prometheusrules",
    "ScaledObject": "scaledobjects",
}
MONITORED = ("--set", "monitoring.rules=true,monitoring.dashboards=true,monitoring.podMonitor=true")


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
    checked = 0
    for item in example(values, version):
        if item["kind"] not in CRDS:
            kubernetes_validate.validate(item, version, strict=True)
            checked += 1
    assert checked >= 5


def close(schema: Any) -> Any:
    """The CRD's schema, refusing what it does not name: the API server would drop that in silence."""
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
    schema = close(served["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return Draft202012Validator(schema)


@pytest.mark.crds
def test_custom_objects_are_what_their_definitions_allow() -> None:
    seen = set()
    for item in [found for values in EXAMPLES for found in example(values)]:
        if item["kind"] in CRDS:
            check = validator(item["kind"], item["apiVersion"].split("/")[1])
            assert [error.message for error in check.iter_errors(item)] == []
            assert list(check.iter_errors(item | {"spec": item["spec"] | {"mistyped": 1}}))
            seen.add(item["kind"])
    assert seen == set(CRDS)


@pytest.mark.parametrize("values", EXAMPLES)
def test_the_grace_period_holds_prestop_and_the_drain(values: str) -> None:
    objects = example(values)
    drain_s = float(environment(objects)["MIZZEN_DRAIN_TIMEOUT_S"])
    sleep_s = server(objects)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(objects)["terminationGracePeriodSeconds"] == sleep_s + math.ceil(drain_s) + 15


def test_a_fraction_of_a_second_to_drain_counts_as_a_second() -> None:
    objects = template(*LEAST, "--set-json", "config.drain_timeout_s=2.5", "--set", "preStopSeconds=0")
    assert pod(objects)["terminationGracePeriodSeconds"] == 3 + 15
    assert "lifecycle" not in server(objects)


def test_prestop_is_a_command_before_kubernetes_1_30() -> None:
    assert server(example("h200", "1.28.0"))["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "10"]}}
    assert server(example("h200", "1.30.0"))["lifecycle"]["preStop"] == {"sleep": {"seconds": 10}}


@pytest.mark.parametrize("values", EXAMPLES)
def test_probes_ask_paths_that_the_health_port_has(values: str) -> None:
    container = server(example(values))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name, path in (("startup", "startup"), ("readiness", "ready"), ("liveness", "live")):
        asked = container[f"{name}Probe"]["httpGet"]
        assert asked == {"path": f"/health/{path}", "port": "health"}
        assert asked["path"] in PROBES
    assert str(ports["health"]) == environment(example(values))["MIZZEN_HEALTH_PORT"]


def test_the_startup_budget_comes_from_the_models_size_or_is_given() -> None:
    derived = server(template(*LEAST, "--set", "model.sizeGiB=64"))["startupProbe"]
    assert derived["periodSeconds"] * derived["failureThreshold"] == 1800 + 64 * 60
    given = server(template(*LEAST, "--set", "startup.budgetSeconds=601"))["startupProbe"]
    assert given["periodSeconds"] * given["failureThreshold"] == 605


@pytest.mark.parametrize("values", EXAMPLES)
def test_the_server_accepts_the_pods_environment(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = environment(example(values))
    others = {name for name in given if not name.startswith("MIZZEN_")}
    assert others <= {
        "HF_TOKEN_PATH",
        "HF_HUB_OFFLINE",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_TRACES_SAMPLER",
        "OTEL_TRACES_SAMPLER_ARG",
    }
    for name in [name for name in os.environ if name.startswith("MIZZEN_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    loaded = load_settings(env_file=None)  # refuses an unknown name, and a wrong value
    assert loaded.settings.model
    assert loaded.service_links == ()


def test_every_setting_reaches_the_server_from_a_values_file(tmp_path: Any) -> None:
    special: dict[str, Any] = {
        "model": "org/model",
        "max_body_bytes": 52428800,
        "kv_cache_bytes": 68719476736,
        "memory_fraction": 0.85,
        "nvtx": True,
        "access_log": False,
        "attention_backend": "sdpa",
    }
    chosen: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        if not is_secret(field) and name != "api_keys_file":
            chosen[name] = special.get(name, "1" if field.default is None else field.default)
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"config": chosen, "apiKeys": {"keys": ["secret"]}}))
    given = environment(template("-f", str(path)))
    assert set(given) >= {variable(name) for name in chosen} | {"MIZZEN_API_KEYS_FILE"}
    assert given["MIZZEN_MAX_BODY_BYTES"] == "52428800"
    assert given["MIZZEN_KV_CACHE_BYTES"] == "68719476736"
    assert given["MIZZEN_MEMORY_FRACTION"] == "0.85"
    assert given["MIZZEN_NVTX"] == "true"
    assert given["MIZZEN_ACCESS_LOG"] == "false"


def test_pods_fit_the_restricted_security_standard() -> None:
    for values in EXAMPLES:
        objects = example(values)
        for spec in (pod(objects), one(objects, "Pod")["spec"]):
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] > 0
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert spec["automountServiceAccountToken"] is False
            assert spec["enableServiceLinks"] is False
            assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
            assert all("hostPath" not in volume for volume in spec.get("volumes", []))
            for container in spec["containers"] + spec.get("initContainers", []):
                held = container["securityContext"]
                assert held["allowPrivilegeEscalation"] is False
                assert held["capabilities"] == {"drop": ["ALL"]}
                assert held["readOnlyRootFilesystem"] is True


def test_gpus_follow_the_ranks_and_are_absent_on_cpus() -> None:
    assert server(example("h200-tp4"))["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert server(example("mig"))["resources"]["requests"]["nvidia.com/mig-3g.71gb"] == 1
    assert set(server(example("cpu"))["resources"]["limits"]) == {"memory"}
    claimed = template(
        *LEAST, "--set-json", 'resourceClaims=[{"name":"gpu"}]', "--set-json", 'resources.claims=[{"name":"gpu"}]'
    )
    assert set(server(claimed)["resources"]["limits"]) == {"memory"}
    assert server(claimed)["resources"]["claims"] == [{"name": "gpu"}]


def test_every_mount_has_its_volume_and_shared_memory_is_memory() -> None:
    for values in EXAMPLES:
        spec = pod(example(values))
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == set(volumes)
        for container in spec.get("initContainers", []):
            assert {mount["name"] for mount in container["volumeMounts"]} < set(volumes)
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_selectors_are_the_same_whatever_the_values() -> None:
    selectors = {yaml.safe_dump(one(example(values), "Deployment")["spec"]["selector"]) for values in EXAMPLES}
    assert len(selectors) == 1
    labels = one(example("fleet"), "Deployment")["spec"]["template"]["metadata"]["labels"]
    for item in example("fleet"):
        selector = item["spec"].get("selector", {}) if "spec" in item else {}
        wanted = selector.get("matchLabels", selector if item["kind"] == "Service" else {})
        assert wanted.items() <= labels.items()


def test_the_network_policy_opens_443_only_to_download() -> None:
    def ports(objects: list[chart.Object]) -> set[int]:
        rules = one(objects, "NetworkPolicy")["spec"]["egress"]
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert ports(example("h200")) == {53, 443}
    (download,) = pod(example("h200"))["initContainers"]
    assert "HF_HUB_OFFLINE" not in {entry["name"] for entry in download["env"]}
    assert "initContainers" not in pod(example("pvc"))
    assert environment(example("h200"))["HF_HUB_OFFLINE"] == "1"
    assert ports(example("pvc")) == {53, 4317, 4318}
    assert environment(example("pvc"))["HF_HUB_OFFLINE"] == "1"


def test_autoscalers_ask_for_metrics_that_the_server_has() -> None:
    names = {metric.name for metric in METRICS}
    triggers = one(example("fleet"), "ScaledObject")["spec"]["triggers"]
    asked = [trigger["metadata"]["query"] for trigger in triggers]
    assert [query.partition("mizzen_")[2].partition("{")[0] for query in asked] == [
        "requests_waiting",
        "kv_cache_usage_ratio",
    ]
    hpa = one(template(*LEAST, "--set", "autoscaling.kind=hpa"), "HorizontalPodAutoscaler")
    assert {metric["pods"]["metric"]["name"] for metric in hpa["spec"]["metrics"]} <= names
    assert {"mizzen_requests_waiting", "mizzen_kv_cache_usage_ratio"} <= names
    assert "replicas" not in one(example("fleet"), "Deployment")["spec"]


def test_a_route_waits_longer_than_the_server_and_goes_to_the_pool() -> None:
    rule = one(example("fleet"), "HTTPRoute")["spec"]["rules"][0]
    assert rule["timeouts"] == {"request": "310s"}
    assert rule["backendRefs"][0]["kind"] == "InferencePool"
    pool = one(example("fleet"), "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": 8000}]


def test_keys_and_tokens_are_files_and_never_in_the_environment() -> None:
    objects = template(*LEAST, "--set", "apiKeys.keys={one,two},huggingface.token=hf_x")
    held = {item["metadata"]["name"]: item["stringData"] for item in objects if item["kind"] == "Secret"}
    assert held == {"llm-mizzen-api-keys": {"keys": "one\ntwo"}, "llm-mizzen-huggingface": {"token": "hf_x"}}
    assert not {"one\ntwo", "hf_x"} & set(environment(objects).values())
    volumes = {volume["name"]: volume for volume in pod(objects)["volumes"]}
    assert volumes["api-keys"]["secret"]["secretName"] == "llm-mizzen-api-keys"
    assert volumes["huggingface"]["secret"]["secretName"] == "llm-mizzen-huggingface"


def test_rules_and_dashboards_are_the_repositorys_own() -> None:
    objects = template(*LEAST, *MONITORED, "--set", "monitoring.runbookUrl=https://x/r")
    groups = one(objects, "PrometheusRule")["spec"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    text = (chart.ROOT / "docker/prometheus/alerts.yml").read_text()
    alerts = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert [rule["expr"] for rule in rules if "alert" in rule] == [rule["expr"] for rule in alerts]
    assert all(rule["annotations"]["runbook_url"].startswith("https://x/r#") for rule in rules if "alert" in rule)
    boards = [item for item in objects if item["kind"] == "ConfigMap"]
    assert len(boards) == 3
    assert all(board["metadata"]["labels"]["grafana_dashboard"] == "1" for board in boards)
    endpoint = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "mizzen"}]
