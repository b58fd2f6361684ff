"""Names that the chart has of the server's: its variables, paths, ports, metrics and their labels are really there.

The server is a real one, started with nothing but the environment that the chart gives its pod.
"""

import functools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chart
import httpx
import pytest
from chart import EXAMPLES, environment, example, pod, render
from prometheus_client.parser import text_string_to_metric_families
from test_chart_matrix import CASES, rendered

from mizzen.config.settings import Settings, is_secret, load_settings, variable
from mizzen.observability.metrics import BY_NAME
from service.running import Server, free_port

SETTINGS = {variable(name) for name in Settings.model_fields}
# Read by OpenTelemetry's SDK, Hugging Face's client, NCCL and the NVIDIA container runtime.
ALLOWED = re.compile(
    r"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT|OTEL_TRACES_SAMPLER(_ARG)?|HF_HUB_OFFLINE|HF_TOKEN_PATH|NCCL_[A-Z_]+|"
    r"NVIDIA_VISIBLE_DEVICES"
)
TARGET_LABELS = {"job", "instance", "namespace", "pod"}  # Prometheus adds them to what it scrapes
NEED_GPU = {"mizzen_gpu_memory_used_bytes", "mizzen_gpu_memory_capacity_bytes", "mizzen_gpu_utilization_ratio"}
# What the endpoint picker of the inference extension asks each pod for, unless it is told other names.
PICKER = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}

DOORS = {"networkPolicy": {"ingressCidrs": ["10.0.0.0/8"]}}
ROUTED = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]}}
ENTERED = {"ingress": {"enabled": True, "host": "llm.example.com"}}
POOLED = {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}
WATCHED = {"monitoring": {"podMonitor": True, "rules": True, "dashboards": True}}
VARIANTS: list[chart.Object] = [  # every object that names a path, a port or a metric is in one of them
    {"autoscaling": {"kind": "keda"}, "loadBalancer": "gke-gateway", **DOORS, **ROUTED, **POOLED, **WATCHED},
    {"autoscaling": {"kind": "hpa"}, "loadBalancer": "gke-ingress", "kind": "StatefulSet", **DOORS, **ENTERED},
    {"loadBalancer": "alb", **DOORS, **ENTERED, "monitoring": {"serviceMonitor": True}},
    {"service": {"type": "LoadBalancer"}, **DOORS, "monitoring": {"serviceMonitor": True}},
]


# ---- the environment ----


def unknown(objects: list[chart.Object]) -> set[str]:
    containers = pod(objects)["containers"][:1] + pod(objects).get("initContainers", [])
    given = {entry["name"] for container in containers for entry in container["env"]}
    return {name for name in given - SETTINGS if not ALLOWED.fullmatch(name)}


@pytest.mark.parametrize("values", EXAMPLES)
def test_every_variable_of_an_examples_pod_is_a_setting_or_another_reader_is_known(values: str) -> None:
    assert unknown(example(values)) == set()


def test_every_variable_of_a_pod_is_a_setting_or_allowed_whatever_is_switched_on() -> None:
    for case in CASES:
        assert unknown(rendered(case, "helm")) == set()


def test_a_variable_that_nobody_reads_is_found() -> None:
    assert unknown(render({"extraEnv": [{"name": "HF_HUB_OFLINE", "value": "1"}]})) == {"HF_HUB_OFLINE"}


def test_what_calls_the_release_gets_the_variables_that_its_script_reads() -> None:
    script = (chart.CHART / "files" / "test.py").read_text()
    read = set(re.findall(r'environ(?:\[|\.get\()"(\w+)"', script)) - {"OPENAI_API_KEY"}  # it sets this one
    objects = render({"loadTest": {"enabled": True}, "apiKeys": {"keys": ["k"]}})
    clients = chart.pod_specs(objects)[1:]
    assert len(clients) == 6
    for spec in clients:
        given = {entry["name"] for entry in spec["containers"][0]["env"]}
        assert given == read | {"NVIDIA_VISIBLE_DEVICES"}


def another(name: str) -> Any:
    """A value for a setting which is not its default."""
    given: dict[str, Any] = {
        "model": "org/model",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "engine_cpus": "1,2",
        "kernels_off": "linear,silu_mul",
        "attention_backend": "sdpa",
        "kv_cache_bytes": 2**36,
    }
    field = Settings.model_fields[name]
    if name in given:
        return given[name]
    options = re.findall(r"'([^']+)'", str(field.annotation)) if "Literal" in str(field.annotation) else []
    if field.annotation is bool:
        return not field.default
    if isinstance(field.default, float):
        return field.default / 2
    if isinstance(field.default, int):  # also the sizes
        return field.default + 1 if name != "health_port" else 8002
    others = [option for option in options if option not in ("auto", field.default)]
    if others:
        return others[0]
    return 2 if "int" in str(field.annotation) else f"/{name}"


def test_every_setting_can_be_set_from_the_chart_to_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {
        name: another(name)
        for name, field in Settings.model_fields.items()
        if not is_secret(field) and name != "api_keys_file"
    }
    objects = render({"config": chosen, "apiKeys": {"keys": ["k"]}})
    for name in [name for name in os.environ if name.startswith("MIZZEN_")]:
        monkeypatch.delenv(name)
    for name, value in environment(objects).items():
        monkeypatch.setenv(name, value)
    loaded = load_settings(env_file=None).settings
    assert {name: getattr(loaded, name) for name in chosen} == chosen
    assert not {name for name in chosen if getattr(loaded, name) == Settings.model_fields[name].default}
    # Keys are secrets: the chart has them as a file, never in the environment.
    mounted = chart.mounts(chart.server(objects))["api-keys"]["mountPath"]
    assert loaded.api_keys_file == f"{mounted}/keys"


# ---- the running server ----


class Running:
    """A server with the environment that the chart gives the pod of these ``objects``."""

    def __init__(self, server: Server, objects: list[chart.Object]) -> None:
        self.server, self.objects = server, objects
        self.ports = {port["name"]: port["containerPort"] for port in chart.server(objects)["ports"]}

    def get(self, port: str | int, path: str) -> httpx.Response:
        number = self.ports[port] if isinstance(port, str) else port
        return httpx.get(f"http://127.0.0.1:{number}{path}", timeout=30)

    @functools.cached_property
    def series(self) -> dict[str, list[dict[str, str]]]:
        """Labels of each series by its name, of the /metrics that a monitor scrapes."""
        monitor = chart.one(self.variants[0], "PodMonitor")["spec"]["podMetricsEndpoints"][0]
        found: dict[str, list[dict[str, str]]] = {}
        for family in text_string_to_metric_families(self.get(monitor["port"], monitor["path"]).text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
        return found

    @functools.cached_property
    def variants(self) -> list[list[chart.Object]]:
        return [render({**self.values, **variant}) for variant in VARIANTS]

    @property
    def values(self) -> chart.Object:
        return {"config": {"model": "/models/model", "port": self.ports["http"], "health_port": self.ports["health"]}}


@pytest.fixture(scope="module")
def running(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pod")
    config = {
        "model": str(smollm2),
        "served_model_name": "test-model",
        "device": "cpu",
        "port": free_port(),
        "health_port": free_port(),
        "run_dir": str(folder / "run"),
        "termination_log": str(folder / "termination-log"),
        "threads": 1,
        "kv_cache_bytes": 2**27,
        "max_model_len": 512,
    }
    objects = render({"config": config})
    given = environment(objects)
    settings = {name.removeprefix("MIZZEN_").lower(): value for name, value in given.items() if name in SETTINGS}
    with pytest.MonkeyPatch.context() as patch:
        for name in given.keys() - SETTINGS:
            patch.setenv(name, given[name])
        server = Server(Path(settings.pop("model")), folder, **settings)
    try:
        server.wait_ready()
        assert list(server.stream(prompt="Once", max_tokens=4))
        assert server.chat(max_tokens=4).status_code == 200
        server.wait_idle()
        yield Running(server, objects)
        assert server.stop() == 0, server.log()
    finally:
        server.close()


def found(tree: Any, key: str) -> Iterator[Any]:
    """Every value of ``key`` in it, at any depth."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from found(value, key)
    elif isinstance(tree, list):
        for part in tree:
            yield from found(part, key)


@pytest.mark.slow
def test_each_probe_is_answered_on_its_port_and_path(running: Running) -> None:
    container = chart.server(running.objects)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        answer = running.get(asked["port"], asked["path"])
        assert answer.status_code == 200
        assert "phase" in answer.json()
    assert running.get("health", "/health/alive").status_code == 404


@pytest.mark.slow
def test_the_health_checks_of_load_balancers_are_answered_by_the_port_that_they_ask(running: Running) -> None:
    checks = [
        (check["port"], check["requestPath"])
        for objects in running.variants
        for key in ("healthCheck", "httpHealthCheck")
        for check in found(objects, key)
    ]
    alb = chart.one(running.variants[2], "Ingress")["metadata"]["annotations"]
    checks.append(("http", alb["alb.ingress.kubernetes.io/healthcheck-path"]))
    assert len(checks) == 3
    for port, path in checks:
        assert running.get(port, path).status_code == 200


@pytest.mark.slow
def test_every_port_of_services_monitors_pools_and_policies_is_one_that_the_server_listens_on(running: Running) -> None:
    for objects in running.variants:
        exposed = {
            port["name"]: port for item in objects if item["kind"] == "Service" for port in item["spec"]["ports"]
        }
        named = {port["targetPort"] for port in exposed.values()}
        for item in objects:
            if item["kind"] == "PodMonitor":
                named |= {end["port"] for end in item["spec"]["podMetricsEndpoints"]}
            elif item["kind"] == "ServiceMonitor":
                named |= {exposed[end["port"]]["targetPort"] for end in item["spec"]["endpoints"]}
            elif item["kind"] == "InferencePool":
                named |= {port["number"] for port in item["spec"]["targetPorts"]}
            elif item["kind"] == "NetworkPolicy":
                named |= {port["port"] for rule in item["spec"]["ingress"] for port in rule["ports"]}
        assert "http" in named
        for port in named:
            assert running.get(port, "/health/ready").status_code == 200


@pytest.mark.slow
def test_every_path_that_is_routed_is_served(running: Running) -> None:
    routed = {
        value
        for objects in running.variants
        for item in objects
        for value in (
            [path["path"] for path in found(item, "paths") for path in path]
            if item["kind"] == "Ingress"
            else [path["value"] for path in found(item, "path")]
            if item["kind"] == "HTTPRoute"
            else []
        )
    }
    assert routed == {"/v1"}
    assert running.get("http", "/v1/models").json()["data"][0]["id"] == "test-model"


@pytest.mark.slow
def test_monitors_and_endpoint_pickers_find_the_metrics_that_they_scrape(running: Running) -> None:
    scraped = []
    for objects in running.variants:
        services = [item for item in objects if item["kind"] == "Service"]
        targets = {port["name"]: port["targetPort"] for item in services for port in item["spec"]["ports"]}
        for item in objects:
            if item["kind"] == "PodMonitor":
                scraped += [(end["port"], end["path"]) for end in item["spec"]["podMetricsEndpoints"]]
            elif item["kind"] == "ServiceMonitor":
                scraped += [(targets[end["port"]], end["path"]) for end in item["spec"]["endpoints"]]
    assert {port for port, _ in scraped} == {"health", "http"}
    for port, path in scraped:
        assert "mizzen_ready" in running.get(port, path).text
    (pool,) = [item for item in running.variants[0] if item["kind"] == "InferencePool"]
    (port,) = [port["number"] for port in pool["spec"]["targetPorts"]]
    names = {family.name for family in text_string_to_metric_families(running.get(port, "/metrics").text)}
    assert names >= PICKER


# ---- queries ----

_WORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "group_left", "group_right", "offset", "bool"}
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_NAME = re.compile(r"(?<![\w.$:])([A-Za-z_:][\w:]*+)(\{[^}]*\})?(?!\s*\()")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


def asked(query: str) -> dict[str, set[str]]:
    """Names of metrics in a query, with the labels that its selectors and groupings want of each."""
    query = re.sub(r"label_values\((.+), (\w+)\)", r"sum by (\2) (\1)", query)  # Grafana's own
    shared = {label for group in _GROUPING.findall(query) for label in re.split(r"[,\s]+", group) if label}
    bare = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", query))
    wanted: dict[str, set[str]] = {}
    for name, selector in _NAME.findall(bare):
        if name not in _WORDS:
            wanted.setdefault(name, set(shared)).update(label for label, _, _ in _MATCHER.findall(selector))
    return wanted


def queries(objects: list[chart.Object]) -> list[str]:
    """All that the chart asks Prometheus, or an adapter for it."""
    gathered = []
    for item in objects:
        if item["kind"] == "HorizontalPodAutoscaler":
            gathered += [metric["pods"]["metric"]["name"] for metric in item["spec"]["metrics"]]
        elif item["kind"] == "ScaledObject":
            gathered += [trigger["metadata"]["query"] for trigger in item["spec"]["triggers"]]
        elif item["kind"] == "PrometheusRule":
            gathered += list(found(item, "expr"))
        elif item["kind"] == "ConfigMap":
            for text in item["data"].values():
                board = json.loads(text)
                gathered += list(found(board["panels"], "expr"))
                gathered += [kind["query"]["query"] for kind in board["templating"]["list"] if "refId" in kind["query"]]
    return gathered


def problems(query: str, series: dict[str, list[dict[str, str]]], recorded: set[str]) -> list[str]:
    wrong = []
    for name, labels in asked(query).items():
        if name in recorded | NEED_GPU | {"up"}:
            continue
        if name not in series:
            wrong.append(f"the server has no {name}")
        elif missing := labels - TARGET_LABELS - set().union(*series[name]):
            wrong.append(f"{name} has no label {', '.join(sorted(missing))}")
    return wrong


@pytest.mark.slow
def test_every_query_of_autoscalers_rules_and_dashboards_asks_for_what_the_server_says(running: Running) -> None:
    every = [query for objects in running.variants for query in queries(objects)]
    recorded = set(found(running.variants[0], "record"))
    assert len(every) > 100
    assert len(recorded) > 10
    assert set(BY_NAME) > NEED_GPU
    wrong = {query: problems(query, running.series, recorded) for query in every}
    assert {query: found for query, found in wrong.items() if found} == {}


@pytest.mark.slow
def test_a_query_that_asks_for_what_the_server_does_not_say_is_found(running: Running) -> None:
    for bad in (
        "sum(mizzen_requests_queued)",
        "mizzen_time_to_first_token_seconds > 1",
        "rate(mizzen_requests_waiting_total[5m])",
        'mizzen_ready{replica="1"}',
        "sum by (key) (mizzen_requests_waiting)",
        "label_values(mizzen_ready, model)",
        "mizzen:requests_waiting:sum > 1",
    ):
        assert problems(bad, running.series, set()), bad
    good = (
        'mizzen:x > 1 and on (instance) sum by (le, instance) (rate(mizzen_step_tokens_bucket{le="1.0"}[5m])) offset 5m'
    )
    assert problems(good, running.series, {"mizzen:x"}) == []
