"""Wrong values are refused before anything is installed, by their key; those that cannot work together, in a line."""

import json
from typing import Any

import chart
import pytest
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
    ("config.tensor_parallel_size", "auto"),
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
    ("tolerations", [{"kye": "gpu"}]),
    ("kind", "DaemonSet"),
    ("gpu", None),
    ("config.drain_timeout_s", None),
    ("loadBalancer", "nginx"),
    ("model.accessModes", []),
    ("inferencePool.endpointPicker.failureMode", "Panic"),
    ("httpRoute.parentRefs", [{"namespce": "gateway"}]),
    ("networkPolicy.ingressCidrs", ["10.0.0.1"]),
    ("loadTest.args", "--rate 1"),
    ("loadTest.args", []),
    ("resourceClaims", [{"claim": "gpu"}]),
]


@pytest.mark.parametrize("name", ["helm3", "helm4"])
@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}={value}" for key, value in WRONG])
def test_a_wrong_value_is_refused_by_its_key(key: str, value: Any, name: str) -> None:
    said = refusal(*LEAST, "--set-json", f"{key}={json.dumps(value)}", name=name)
    for part in key.split("."):
        assert part in said


MOUNTED = "config.model=/models/m,model.existingClaim=a,"
NO_SURGE = ",strategy.maxSurge=0,strategy.maxUnavailable=1"
OUTSIDE = "requests from outside would not get in: name the gateway's namespace in networkPolicy.namespaces"
POOL = "inferencePool.enabled=true,inferencePool.endpointPicker.name=picker"
ROUTE = "httpRoute.enabled=true,httpRoute.parentRefs[0].name=public"


@pytest.mark.parametrize("name", ["helm3", "helm4"])
@pytest.mark.parametrize(
    ("values", "line"),
    [
        ("config.model=", "config.model is empty"),
        ("config.tensor_parallel_size=16", "a model over more than one node is not supported yet"),
        ("config.tensor_parallel_size=2,gpu.perNode=1", "a node has 1 GPUs (gpu.perNode)"),
        ("model.existingClaim=a", "config.model is org/model, but nothing is downloaded beside model.existingClaim"),
        ("model.image=a", "name a folder below /models"),
        (MOUNTED + "model.image=b", "model.existingClaim and model.image exclude each other"),
        ("cache.models.create=true,replicas=2", "cache.models is a ReadWriteOnce claim, which 2 replicas cannot share"),
        ("cache.compiled.existingClaim=a", "cache.compiled is a ReadWriteOnce claim: set strategy.maxSurge to 0"),
        ("cache.models.create=true,autoscaling.kind=hpa", "which 4 replicas cannot share"),
        ("kind=StatefulSet,cache.models.existingClaim=a,replicas=2", "which 2 replicas cannot share"),
        (MOUNTED + "model.accessModes={ReadWriteOnce},replicas=2", "model is a ReadWriteOnce claim"),
        (MOUNTED + "model.accessModes={ReadWriteOnce}", "model is a ReadWriteOnce claim: set strategy"),
        ("strategy.maxSurge=0", "nothing could ever be replaced"),
        ("monitoring.podMonitor=true,monitoring.serviceMonitor=true", "choose one"),
        ("monitoring.podMonitor=true,config.metrics_require_key=true", "monitoring.authorization must name a key"),
        ("monitoring.serviceMonitor=true,config.metrics=false", "config.metrics is false"),
        ("autoscaling.kind=hpa,config.metrics=false", "config.metrics is false: monitors, autoscaling and"),
        (POOL + ",config.metrics=false", "config.metrics is false"),
        ("autoscaling.kind=keda,autoscaling.minReplicas=9", "autoscaling.maxReplicas is below"),
        ("inferencePool.enabled=true", "inferencePool.endpointPicker.name is empty"),
        ("httpRoute.enabled=true", "httpRoute.parentRefs is empty"),
        ("ingress.enabled=true", OUTSIDE),
        (ROUTE, OUTSIDE),
        ("service.type=LoadBalancer", OUTSIDE),
        ("service.type=NodePort", OUTSIDE),
        ("loadBalancer=gke-gateway", "loadBalancer is gke-gateway: httpRoute.enabled must be true"),
        ("loadBalancer=gke-ingress", "loadBalancer is gke-ingress: ingress.enabled must be true"),
        ("loadBalancer=alb", "loadBalancer is alb: ingress.enabled must be true"),
        ("loadBalancer=alb,ingress.enabled=true,networkPolicy.namespaces={a}", "networkPolicy.ingressCidrs is empty"),
    ],
)
def test_what_could_never_work_is_refused_in_a_line(values: str, line: str, name: str) -> None:
    assert line in refusal(*LEAST, "--set", values, name=name)


@pytest.mark.parametrize(
    "values",
    [
        "config.device=cpu,config.tensor_parallel_size=16",  # ranks on the CPU are no GPUs of a node
        "config.tensor_parallel_size=16,gpu.perNode=16",
        "cache.models.create=true" + NO_SURGE,
        "cache.models.create=true,replicas=2,cache.models.accessModes={ReadWriteMany}",
        "cache.models.create=true,kind=StatefulSet,replicas=2",
        "cache.models.existingClaim=a,kind=StatefulSet",
        MOUNTED + "replicas=2",
        MOUNTED + "model.accessModes={ReadWriteMany},replicas=2",
        MOUNTED + "model.accessModes={ReadWriteOnce}" + NO_SURGE,
        "kind=StatefulSet,strategy.maxSurge=0",
        "config.metrics=false",
        POOL,
        "config.metrics_require_key=true",
        "monitoring.podMonitor=true,config.metrics_require_key=true,monitoring.authorization.type=Bearer",
        "autoscaling.kind=keda,autoscaling.minReplicas=4",
        "autoscaling.minReplicas=9",
        "ingress.enabled=true,networkPolicy.namespaces={traefik}",
        ROUTE + ",networkPolicy.ingressCidrs={10.0.0.0/8}",
        "service.type=LoadBalancer,networkPolicy.enabled=false",
        "loadBalancer=alb,ingress.enabled=true,networkPolicy.enabled=false",
    ],
)
def test_what_can_work_is_not_refused(values: str) -> None:
    assert chart.template(*LEAST, "--set", values)


@pytest.mark.parametrize(
    ("values", "line", "before", "since"),
    [
        ("config.model=/models/m,model.image=r/model:1", "model.image needs Kubernetes 1.35", "1.34.9", "1.35.0"),
        ("resourceClaims[0].name=gpu", "resourceClaims needs Kubernetes 1.34", "1.33.9", "1.34.0"),
    ],
)
def test_what_a_cluster_is_too_old_for_is_refused(values: str, line: str, before: str, since: str) -> None:
    assert f"{line}, this is v{before}" in refusal(*LEAST, "--set", values, version=before)
    assert chart.template(*LEAST, "--set", values, version=since)


def test_a_cluster_older_than_the_chart_is_refused() -> None:
    assert "1.28.0" in refusal(*LEAST, version="1.27.9")
