"""Replicas over time: kinds of workload, their claims, updates, autoscaling; and what watches and tests them."""

import chart
import pytest
import yaml
from chart import EXAMPLES, example, kinds, mounts, one, pod, render, server, volumes, workload

from mizzen.observability.metrics import METRICS

NO_SURGE = {"strategy": {"maxSurge": 0, "maxUnavailable": 1}}
CREATED = {"cache": {"models": {"create": True, "size": "50Gi", "storageClassName": "fast"}}}


def test_a_deployment_replaces_its_pods_as_told() -> None:
    spec = workload(render({**NO_SURGE, "replicas": 3}))["spec"]
    assert spec["replicas"] == 3
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert not {"serviceName", "volumeClaimTemplates", "updateStrategy", "podManagementPolicy"} & set(spec)
    surge = workload(render())["spec"]["strategy"]["rollingUpdate"]
    assert surge == {"maxSurge": 1, "maxUnavailable": 0}  # never below capacity


def test_a_stateful_set_has_the_same_pod_and_starts_them_together() -> None:
    stateful = workload(render({"kind": "StatefulSet"}))
    assert stateful["kind"] == "StatefulSet"
    assert stateful["spec"]["template"] == workload(render())["spec"]["template"]
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"
    assert not {"strategy", "progressDeadlineSeconds", "volumeClaimTemplates"} & set(stateful["spec"])


def test_a_deployments_claim_is_the_releases_and_outlives_it() -> None:
    objects = render({**CREATED, **NO_SURGE})
    claim = one(objects, "PersistentVolumeClaim", "llm-mizzen-models")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "50Gi"}},
    }
    assert volumes(objects)["models"]["persistentVolumeClaim"] == {"claimName": "llm-mizzen-models"}
    assert volumes(objects)["compiled"]["emptyDir"] == {"sizeLimit": "10Gi"}
    plain = render({"cache": {"models": {"create": True}}, **NO_SURGE})
    assert "storageClassName" not in one(plain, "PersistentVolumeClaim")["spec"]
    assert "PersistentVolumeClaim" not in kinds(render())


def test_each_pod_of_a_stateful_set_has_a_claim_of_its_own() -> None:
    objects = render({**CREATED, "kind": "StatefulSet", "replicas": 3})
    (claim,) = workload(objects)["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "models"
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["metadata"]["labels"] == workload(objects)["spec"]["selector"]["matchLabels"]  # they cannot change
    assert "models" not in volumes(objects)
    assert mounts(server(objects))["models"]["mountPath"] == "/cache/models"
    assert "PersistentVolumeClaim" not in kinds(objects)


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_a_claim_that_exists_is_mounted_and_none_is_made(kind: str) -> None:
    cache = {"existingClaim": "mine", "create": True, "accessModes": ["ReadWriteMany"]}
    objects = render({"kind": kind, "replicas": 2, "cache": {"models": cache, "compiled": cache}})
    for name in ("models", "compiled"):
        assert volumes(objects)[name]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert "PersistentVolumeClaim" not in kinds(objects)
    assert "volumeClaimTemplates" not in workload(objects)["spec"]


def test_claims_are_the_same_whatever_else_the_values_say() -> None:
    """Kubernetes refuses to change a claim's spec or a template of one: these are fixed from the first release on."""
    models = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "200Gi"}}}
    compiled = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}
    create = {"cache": {"models": {"create": True}, "compiled": {"create": True}}}
    for values in EXAMPLES:
        text = (chart.CHART / "examples" / f"{values}.yaml").read_text()
        given = {**yaml.safe_load(text), **create, **NO_SURGE, "replicas": 1, "autoscaling": {"kind": "none"}}
        single = render({**given, "kind": "Deployment"})
        specs = {item["metadata"]["name"]: item["spec"] for item in single if item["kind"] == "PersistentVolumeClaim"}
        assert specs == {"llm-mizzen-models": models, "llm-mizzen-compiled": compiled}
        templates = workload(render({**given, "kind": "StatefulSet"}))["spec"]["volumeClaimTemplates"]
        labels = workload(render())["spec"]["selector"]["matchLabels"]
        assert templates == [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "labels": labels},
                "spec": spec,
            }
            for name, spec in (("compiled", compiled), ("models", models))
        ]


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet"])
def test_autoscalers_ask_for_metrics_that_the_server_has(kind: str) -> None:
    names = {metric.name for metric in METRICS}
    scaled = {"minReplicas": 2, "maxReplicas": 5, "waitingPerReplica": 3, "kvUsagePercent": 70, "cooldownSeconds": 7200}
    target = {"apiVersion": "apps/v1", "kind": kind, "name": "llm-mizzen"}
    calm = {"scaleDown": {"stabilizationWindowSeconds": 3600}}

    keda = render({"kind": kind, "autoscaling": {"kind": "keda", **scaled}})
    spec = one(keda, "ScaledObject")["spec"]
    assert spec["scaleTargetRef"] == target
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 5)
    assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == calm
    asked = [(trigger["metadata"]["query"], trigger["metadata"]["threshold"]) for trigger in spec["triggers"]]
    where = '{job="mizzen",namespace="serving",pod=~"llm-mizzen-.*"}'
    assert asked == [
        (f"sum(mizzen_requests_waiting{where})", "3"),
        (f"100 * sum(mizzen_kv_cache_usage_ratio{where})", "70"),
    ]

    hpa = render({"kind": kind, "autoscaling": {"kind": "hpa", **scaled}})
    spec = one(hpa, "HorizontalPodAutoscaler")["spec"]
    assert spec["scaleTargetRef"] == target
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert spec["behavior"] == calm
    asked = [(metric["pods"]["metric"]["name"], metric["pods"]["target"]["averageValue"]) for metric in spec["metrics"]]
    assert asked == [("mizzen_requests_waiting", "3"), ("mizzen_kv_cache_usage_ratio", "700m")]

    assert {"mizzen_requests_waiting", "mizzen_kv_cache_usage_ratio"} <= names
    assert "replicas" not in workload(keda)["spec"]
    assert "replicas" not in workload(hpa)["spec"]
    assert not {"ScaledObject", "HorizontalPodAutoscaler"} & kinds(render({"kind": kind}))


def test_a_disruption_budget_never_holds_up_a_node_for_a_pod_that_is_not_ready() -> None:
    budget = one(render({"podDisruptionBudget": {"maxUnavailable": 2}}), "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 2
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert "PodDisruptionBudget" not in kinds(render({"podDisruptionBudget": {"enabled": False}}))


@pytest.mark.parametrize(("kind", "field"), [("PodMonitor", "podMetricsEndpoints"), ("ServiceMonitor", "endpoints")])
def test_monitors_scrape_the_health_port_under_the_job_of_the_rules(kind: str, field: str) -> None:
    switch = kind[0].lower() + kind[1:]
    objects = render({"monitoring": {switch: True, "interval": "5s", "labels": {"release": "prometheus"}}})
    (endpoint,) = one(objects, kind)["spec"][field]
    relabelled = [{"targetLabel": "job", "replacement": "mizzen"}]
    assert endpoint == {"port": "health", "path": "/metrics", "interval": "5s", "relabelings": relabelled}
    assert one(objects, kind)["metadata"]["labels"]["release"] == "prometheus"
    assert {"PodMonitor", "ServiceMonitor"} & kinds(objects) == {kind}
    key = {"type": "Bearer", "credentials": {"name": "keys", "key": "prometheus"}}
    locked = render({"monitoring": {switch: True, "authorization": key}, "config": {"metrics_require_key": True}})
    assert one(locked, kind)["spec"][field][0]["authorization"] == key
    assert "release" not in one(locked, kind)["metadata"]["labels"]
    assert not {"PodMonitor", "ServiceMonitor", "PrometheusRule", "ConfigMap"} & kinds(render())


def test_rules_and_dashboards_are_the_repositorys_own() -> None:
    monitoring = {"rules": True, "dashboards": True, "runbookUrl": "https://x/r", "labels": {"release": "prometheus"}}
    objects = render({"monitoring": monitoring})
    rules = one(objects, "PrometheusRule")
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    assert "release" not in one(render({"monitoring": {"rules": True}}), "PrometheusRule")["metadata"]["labels"]
    made = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    expected = []
    for name in ("recording", "alerts"):
        text = (chart.ROOT / f"docker/prometheus/{name}.yml").read_text()
        expected += [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    assert [rule["expr"] for rule in made] == [rule["expr"] for rule in expected]
    assert all(rule["annotations"]["runbook_url"].startswith("https://x/r#") for rule in made if "alert" in rule)
    boards = [item for item in objects if item["kind"] == "ConfigMap"]
    files = sorted((chart.ROOT / "docker/grafana/dashboards").glob("*.json"))
    assert sorted(name for board in boards for name in board["data"]) == [path.name for path in files]
    for path, board in zip(files, sorted(boards, key=lambda item: str(item["metadata"]["name"])), strict=True):
        assert yaml.safe_load(board["data"][path.name]) == yaml.safe_load(path.read_text())
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_helm_test_has_a_pod_for_each_question() -> None:
    def questions(objects: list[chart.Object]) -> list[str]:
        return [item["spec"]["containers"][0]["args"][0] for item in objects if item["kind"] == "Pod"]

    objects = render({"apiKeys": {"existingSecret": "mine", "key": "file"}})
    assert questions(objects) == ["ready", "models", "completion", "streaming", "metrics"]
    for weight, item in enumerate(item for item in objects if item["kind"] == "Pod"):
        assert item["metadata"]["annotations"]["helm.sh/hook"] == "test"
        assert item["metadata"]["annotations"]["helm.sh/hook-weight"] == str(weight)
        assert item["spec"]["restartPolicy"] == "Never"
        keys = item["spec"]["containers"][0]["env"][-1]
        assert keys == {"name": "KEYS_FILE", "value": "/etc/mizzen/api-keys/file"}
        assert chart.mounts(item["spec"]["containers"][0])["api-keys"]["mountPath"] == "/etc/mizzen/api-keys"
        assert item["spec"]["volumes"][-1]["secret"]["secretName"] == "mine"
    unlocked = [item for item in render() if item["kind"] == "Pod"]
    assert all(
        "KEYS_FILE" not in {entry["name"] for entry in item["spec"]["containers"][0]["env"]} for item in unlocked
    )
    assert questions(render({"config": {"metrics": False}}))[-1] == "streaming"
    assert questions(render({"config": {"metrics_require_key": True}}))[-1] == "streaming"


def test_only_tests_are_hooks() -> None:
    for values in EXAMPLES:
        hooked = [item for item in example(values) if "helm.sh/hook" in item["metadata"].get("annotations", {})]
        assert {item["kind"] for item in hooked} == {"Pod"}


def test_a_load_test_is_a_job_and_other_arguments_make_another() -> None:
    assert "Job" not in kinds(render())

    def job(**values: object) -> chart.Object:
        return one(render({"loadTest": {"enabled": True, **values}}), "Job")

    made = job(args=["run", "--rate", "2"], resources={"requests": {"cpu": "3"}})
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["load", "run", "--rate", "2"]
    assert container["resources"]["requests"]["cpu"] == "3"
    assert made["spec"]["backoffLimit"] == 0
    names = {job(args=arguments)["metadata"]["name"] for arguments in (["a"], ["b"], ["a"])}
    assert len(names) == 2
    assert job(image="mine:1")["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:1"
    assert pod(render({"loadTest": {"enabled": True}})) == pod(render())
