"""How requests get to the pods: Services, Ingress, routes, clouds' load balancers, and the network policy's doors."""

from typing import Any

import chart
import pytest
from chart import example, kinds, one, render

GATEWAY = {"networkPolicy": {"namespaces": ["gateway"]}}
INGRESS = {"ingress": {"enabled": True}, **GATEWAY}
ROUTE = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}, **GATEWAY}
POOL = {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}
CLOUD = {"networkPolicy": {"ingressCidrs": ["130.211.0.0/22", "35.191.0.0/16"]}}
TIMES = {"config": {"request_timeout_s": 299.5, "drain_timeout_s": 60}}  # 310 s for an answer, 70 s to drain


def ports(service: chart.Object) -> dict[str, int]:
    return {port["name"]: port["port"] for port in service["spec"]["ports"]}


def test_only_a_service_of_the_cluster_shows_the_health_port() -> None:
    inside = render({"monitoring": {"serviceMonitor": True}})
    assert ports(one(inside, "Service")) == {"http": 80, "health": 8001}
    assert one(inside, "ServiceMonitor")["spec"]["endpoints"][0]["port"] == "health"
    assert client_urls(inside) == ("http://llm-mizzen:80", "http://llm-mizzen:8001")
    for kind in ("NodePort", "LoadBalancer"):
        outside = render({"service": {"type": kind}, "monitoring": {"serviceMonitor": True}, **CLOUD})
        assert one(outside, "Service")["spec"]["type"] == kind
        assert ports(one(outside, "Service")) == {"http": 80}
        assert one(outside, "ServiceMonitor")["spec"]["endpoints"][0]["port"] == "http"
        assert client_urls(outside) == ("http://llm-mizzen:80", "http://llm-mizzen:80")
        scraping = one(outside, "NetworkPolicy")["spec"]["ingress"][1]
        assert [port["port"] for port in scraping["ports"]] == ["health", "http"]
    assert "annotations" not in one(inside, "Service")["metadata"]
    annotated = one(render({"service": {"annotations": {"a": "b"}}}), "Service")
    assert annotated["metadata"]["annotations"] == {"a": "b"}


def client_urls(objects: list[chart.Object]) -> tuple[str, str]:
    (found,) = {
        (env["API"], env["HEALTH"])
        for item in objects
        if item["kind"] == "Pod"
        for env in [{entry["name"]: entry.get("value") for entry in item["spec"]["containers"][0]["env"]}]
    }
    return found


def test_a_stateful_set_has_a_service_of_its_pods_that_no_monitor_finds() -> None:
    objects = render({"kind": "StatefulSet", "monitoring": {"serviceMonitor": True}})
    service = one(objects, "Service", chart.workload(objects)["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    selector = one(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    found = [
        item for item in objects if item["kind"] == "Service" and selector.items() <= item["metadata"]["labels"].items()
    ]
    assert [item["metadata"]["name"] for item in found] == ["llm-mizzen"]
    assert len([item for item in render() if item["kind"] == "Service"]) == 1


def test_an_ingress_is_plain_and_takes_names_and_a_certificate() -> None:
    assert "Ingress" not in kinds(render())
    bare = one(render(INGRESS), "Ingress")
    (rule,) = bare["spec"]["rules"]
    assert "host" not in rule
    backend = {"service": {"name": "llm-mizzen", "port": {"name": "http"}}}
    assert rule["http"]["paths"] == [{"path": "/v1", "pathType": "Prefix", "backend": backend}]
    assert not {"ingressClassName", "tls"} & set(bare["spec"])
    assert "annotations" not in bare["metadata"]
    more = {"className": "traefik", "host": "llm.example.com", "tlsSecret": "tls", "annotations": {"a": "b"}}
    full = one(render({**INGRESS, "ingress": {"enabled": True, **more}}), "Ingress")
    assert full["spec"]["ingressClassName"] == "traefik"
    assert full["spec"]["rules"][0]["host"] == "llm.example.com"
    assert full["spec"]["tls"] == [{"secretName": "tls", "hosts": ["llm.example.com"]}]
    assert full["metadata"]["annotations"] == {"a": "b"}
    nameless = one(render({**INGRESS, "ingress": {"enabled": True, "tlsSecret": "tls"}}), "Ingress")
    assert nameless["spec"]["tls"] == [{"secretName": "tls"}]


def test_a_route_waits_longer_than_the_server() -> None:
    assert "HTTPRoute" not in kinds(render())
    route = one(render({**ROUTE, **TIMES}), "HTTPRoute")["spec"]
    assert route["rules"][0]["timeouts"] == {"request": "310s"}
    assert route["rules"][0]["backendRefs"] == [{"name": "llm-mizzen", "port": 80}]
    assert route["parentRefs"] == [{"name": "public"}]
    assert "hostnames" not in route
    assert one(render(ROUTE), "HTTPRoute")["spec"]["rules"][0]["timeouts"] == {"request": "610s"}
    named = {"httpRoute": {**ROUTE["httpRoute"], "hostnames": ["llm.example.com"]}}
    assert one(render({**ROUTE, **named}), "HTTPRoute")["spec"]["hostnames"] == ["llm.example.com"]


def test_a_pool_holds_the_pods_and_routes_go_to_it() -> None:
    assert "InferencePool" not in kinds(render())
    objects = render({**ROUTE, **POOL, "config": {"port": 9000}})
    pool = one(objects, "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": 9000}]
    assert pool["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert one(objects, "HTTPRoute")["spec"]["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llm-mizzen"}
    ]


CHECK = {"checkIntervalSec": 5, "timeoutSec": 5, "healthyThreshold": 1, "unhealthyThreshold": 2}


@pytest.mark.parametrize("pooled", [False, True])
def test_a_gke_gateway_checks_readiness_and_waits_for_answers(pooled: bool) -> None:
    objects = render({**ROUTE, **CLOUD, **TIMES, "loadBalancer": "gke-gateway", **(POOL if pooled else {})})
    target = {"group": "", "kind": "Service", "name": "llm-mizzen"}
    if pooled:
        target |= {"group": "inference.networking.k8s.io", "kind": "InferencePool"}
    asked = {"type": "HTTP", "httpHealthCheck": {"port": 8000, "requestPath": "/health/ready"}}
    assert one(objects, "HealthCheckPolicy")["spec"] == {"targetRef": target, "default": {**CHECK, "config": asked}}
    waits = {"timeoutSec": 310, "connectionDraining": {"drainingTimeoutSec": 70}}
    assert one(objects, "GCPBackendPolicy")["spec"] == {"targetRef": target, "default": waits}
    assert "BackendConfig" not in kinds(objects)
    assert "annotations" not in one(objects, "Service")["metadata"]


def test_a_gke_ingress_checks_readiness_and_waits_for_answers() -> None:
    values = {"loadBalancer": "gke-ingress", "service": {"annotations": {"a": "b"}}}
    objects = render({**INGRESS, **CLOUD, **TIMES, **values})
    assert one(objects, "BackendConfig")["spec"] == {
        "timeoutSec": 310,
        "connectionDraining": {"drainingTimeoutSec": 70},
        "healthCheck": {"type": "HTTP", "port": 8000, "requestPath": "/health/ready", **CHECK},
    }
    assert one(objects, "Service")["metadata"]["annotations"] == {
        "a": "b",
        "cloud.google.com/neg": '{"ingress":true}',
        "cloud.google.com/backend-config": '{"default":"llm-mizzen"}',
    }
    assert "HealthCheckPolicy" not in kinds(objects)


def test_an_alb_checks_readiness_and_waits_for_answers() -> None:
    theirs = "alb.ingress.kubernetes.io/"
    mine = {"enabled": True, "annotations": {f"{theirs}scheme": "internal", f"{theirs}success-codes": "200-204"}}
    objects = render({**CLOUD, **TIMES, "loadBalancer": "alb", "ingress": mine})
    given = one(objects, "Ingress")["metadata"]["annotations"]
    assert given[f"{theirs}healthcheck-path"] == "/health/ready"
    assert given[f"{theirs}target-type"] == "ip"
    assert given[f"{theirs}load-balancer-attributes"] == "idle_timeout.timeout_seconds=310"
    assert given[f"{theirs}target-group-attributes"].startswith("deregistration_delay.timeout_seconds=70,")
    assert given[f"{theirs}success-codes"] == "200-204"  # a person's own wins
    assert given[f"{theirs}scheme"] == "internal"
    assert not {"BackendConfig", "HealthCheckPolicy"} & kinds(objects)


def test_what_a_load_balancer_can_wait_is_its_limit() -> None:
    times = {"config": {"request_timeout_s": 86400, "drain_timeout_s": 86400}}
    given = one(render({**INGRESS, **CLOUD, **times, "loadBalancer": "alb"}), "Ingress")["metadata"]["annotations"]
    assert given["alb.ingress.kubernetes.io/load-balancer-attributes"].endswith("=4000")
    assert "=3600," in given["alb.ingress.kubernetes.io/target-group-attributes"]


def doors(objects: list[chart.Object]) -> list[Any]:
    return list(one(objects, "NetworkPolicy")["spec"]["ingress"][0]["from"])


def test_the_network_policy_lets_in_who_is_named() -> None:
    clients = {"app.kubernetes.io/instance": "llm", "app.kubernetes.io/component": "test"}
    tests = {"podSelector": {"matchLabels": clients}}
    assert doors(render()) == [tests, {"podSelector": {}}]
    closed = render({"networkPolicy": {"sameNamespace": False}, "loadTest": {"enabled": True}})
    assert doors(closed) == [tests]
    callers = [item for item in closed if item["kind"] == "Pod"] + [one(closed, "Job")["spec"]["template"]]
    assert all(clients.items() <= item["metadata"]["labels"].items() for item in callers)
    named = {"sameNamespace": False, "namespaces": ["gateway"], "ingressCidrs": ["10.0.0.0/8", "fd00::/8"]}
    assert doors(render({"networkPolicy": named})) == [
        tests,
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}},
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
        {"ipBlock": {"cidr": "fd00::/8"}},
    ]
    assert "NetworkPolicy" not in kinds(render({"networkPolicy": {"enabled": False}}))


def test_the_network_policy_lets_the_endpoint_picker_in() -> None:
    picker = {"name": "llm-epp", "podLabels": {"app": "picker"}}
    for given, labels in (({"name": "llm-epp"}, {"inferencepool": "llm-epp"}), (picker, {"app": "picker"})):
        objects = render(
            {"networkPolicy": {"sameNamespace": False}, "inferencePool": {"enabled": True, "endpointPicker": given}}
        )
        assert doors(objects)[1:] == [{"podSelector": {"matchLabels": labels}}]


def test_the_network_policy_lets_prometheus_scrape() -> None:
    scraping = one(render(), "NetworkPolicy")["spec"]["ingress"][1]
    assert scraping["ports"] == [{"port": "health", "protocol": "TCP"}]
    assert scraping["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert len(one(render({"networkPolicy": {"monitoringNamespaces": []}}), "NetworkPolicy")["spec"]["ingress"]) == 1


def ways_out(objects: list[chart.Object]) -> dict[int, Any]:
    rules = one(objects, "NetworkPolicy")["spec"]["egress"]
    return {port["port"]: rule.get("to") for rule in rules for port in rule["ports"]}


def test_the_network_policy_opens_443_only_to_download() -> None:
    assert set(ways_out(example("h200"))) == {53, 443}
    assert ways_out(example("h200"))[443] == [{"ipBlock": {"cidr": cidr}} for cidr in ("0.0.0.0/0", "::/0")]
    assert set(ways_out(example("pvc"))) == {53, 4318}
    proxy = render({"networkPolicy": {"downloadCidrs": ["10.1.0.0/16"]}})
    assert ways_out(proxy)[443] == [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    assert set(ways_out(render({"networkPolicy": {"downloadCidrs": []}}))) == {53}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector.observability:4318", 4318),
        ("http://collector:4317/", 4317),
        ("https://traces.example.com", 443),
        ("http://collector/otlp", 80),
        ("http://[fd00::1]:4318", 4318),
    ],
)
def test_the_network_policy_opens_the_collectors_port(endpoint: str, port: int) -> None:
    offline = {"model": {"existingClaim": "prepared"}}
    assert set(ways_out(render({"otlp": {"endpoint": endpoint}, **offline}))) == {53, port}
    assert set(ways_out(render(offline))) == {53}


def test_more_ways_out_can_be_given() -> None:
    rule = {"ports": [{"port": 5353, "protocol": "UDP"}]}
    objects = render({"networkPolicy": {"extraEgress": [rule]}})
    assert one(objects, "NetworkPolicy")["spec"]["egress"][-1] == rule
