"""The compose files as docker compose reads them, and .env.example, which must say the same."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from containers.docker_host import REPOSITORY, Done, compose_command
from mizzen.config.settings import Settings, variable

GPU = ("docker-compose.yml",)
CPU = ("docker-compose.yml", "docker/compose.cpu.yml")
EXAMPLE = (REPOSITORY / ".env.example").read_text()


def config(files: tuple[str, ...], **variables: str) -> Done:
    """``docker compose config`` in which no .env file and no variable of this machine counts."""
    command = [*compose_command(), "--env-file", "/dev/null", *(word for file in files for word in ("-f", file))]
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | variables
    command += ["--profile", "*", "config", "--format", "json"]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def services(files: tuple[str, ...], **variables: str) -> dict[str, Any]:
    done = config(files, **variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def seconds(duration: str) -> float:
    return sum(int(n) * {"h": 3600, "m": 60, "s": 1}[unit] for n, unit in re.findall(r"(\d+)([hms])", duration))


@pytest.mark.parametrize("files", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_service_is_locked_down_limited_and_pinned(files: tuple[str, ...]) -> None:
    for name, service in services(files).items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["deploy"]["resources"]["limits"]["memory"], name
        assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+(-cuda|-cpu)?", service["image"]), name
        assert "privileged" not in service


def test_every_image_can_be_one_of_another_registry_by_digest() -> None:
    digest = f"registry.example.com/it@sha256:{'0' * 64}"
    names = re.findall(r"image: \$\{(\w+):-", (REPOSITORY / "docker-compose.yml").read_text())
    found = services(GPU, **dict.fromkeys(names, digest))
    assert {service["image"] for service in found.values()} == {digest}


def test_only_the_api_and_grafana_are_published_and_on_loopback() -> None:
    published = {
        (name, port["target"], port.get("host_ip"))
        for name, service in services(GPU).items()
        for port in service.get("ports", [])
    }
    assert published == {("mizzen", 8000, "127.0.0.1"), ("grafana", 3000, "127.0.0.1")}


def test_the_api_is_open_to_others_only_with_keys(tmp_path: Path) -> None:
    refused = config(GPU, PUBLISH_ADDRESS="0.0.0.0")
    assert refused.returncode != 0
    assert "needs API_KEYS_FILE" in refused.stderr
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    mizzen = services(GPU, PUBLISH_ADDRESS="0.0.0.0", API_KEYS_FILE=str(keys))["mizzen"]
    assert mizzen["ports"][0]["host_ip"] == "0.0.0.0"
    assert mizzen["environment"]["MIZZEN_API_KEYS_FILE"] == "/run/secrets/api_keys"
    assert "secret" not in json.dumps(mizzen["environment"]).replace("/run/secrets/", "")


def test_gpus_are_reserved_and_the_cpu_override_drops_them() -> None:
    [reserved] = services(GPU)["mizzen"]["deploy"]["resources"]["reservations"]["devices"]
    assert reserved["capabilities"] == ["gpu"]
    assert reserved["count"] == -1  # all
    assert services(GPU)["mizzen"]["environment"]["MIZZEN_TENSOR_PARALLEL_SIZE"] == "auto"
    assert services(GPU, MIZZEN_TENSOR_PARALLEL_SIZE="2")["mizzen"]["environment"]["MIZZEN_TENSOR_PARALLEL_SIZE"] == "2"
    mizzen = services(CPU)["mizzen"]
    assert "reservations" not in mizzen["deploy"]["resources"]
    assert mizzen["build"]["target"] == mizzen["build"]["args"]["FLAVOR"] == "cpu"
    assert mizzen["environment"]["MIZZEN_TENSOR_PARALLEL_SIZE"] == "1"


@pytest.mark.parametrize("files", [GPU, CPU], ids=["gpu", "cpu"])
def test_the_grace_period_is_the_drain_and_15_s(files: tuple[str, ...]) -> None:
    mizzen = services(files)["mizzen"]
    drain_s = float(mizzen["environment"]["MIZZEN_DRAIN_TIMEOUT_S"])
    assert seconds(mizzen["stop_grace_period"]) == drain_s + 15
    assert drain_s == Settings.model_fields["drain_timeout_s"].default
    example = dict(re.findall(r"^(MIZZEN_DRAIN_TIMEOUT_S|STOP_GRACE_PERIOD)=(\d+)", EXAMPLE, re.MULTILINE))
    assert int(example["STOP_GRACE_PERIOD"]) == int(example["MIZZEN_DRAIN_TIMEOUT_S"]) + 15


def test_a_65_gb_download_fits_the_start_period() -> None:
    mizzen = services(GPU)["mizzen"]
    assert 65e9 / seconds(mizzen["healthcheck"]["start_period"]) < 10e6  # bytes a second


def test_traces_and_metrics_find_their_way_by_the_services_names() -> None:
    found = services(GPU)
    collector = yaml.safe_load((REPOSITORY / "docker/otel/collector.yaml").read_text())
    [pipeline] = collector["service"]["pipelines"].values()
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) == set(collector[part]), "what is defined is used, and the reverse"
    sent_to = found["mizzen"]["environment"]["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
    received_at = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert sent_to == f"http://otel-collector:{received_at.rpartition(':')[2]}/v1/traces"
    limits = collector["processors"]["memory_limiter"]
    memory_mib = int(found["otel-collector"]["deploy"]["resources"]["limits"]["memory"]) / 2**20
    assert limits["spike_limit_mib"] < limits["limit_mib"] < memory_mib
    assert collector["exporters"]["otlp"]["endpoint"] == "jaeger:4317"
    sources = [
        source
        for file in (REPOSITORY / "docker/grafana/provisioning/datasources").iterdir()
        for source in yaml.safe_load(file.read_text())["datasources"]
    ]
    urls = {source["uid"]: source["url"] for source in sources}
    assert urls == {"prometheus": "http://prometheus:9090", "jaeger": "http://jaeger:16686"}
    [provider] = yaml.safe_load((REPOSITORY / "docker/grafana/provisioning/dashboards/mizzen.yaml").read_text())[
        "providers"
    ]
    mounted = {volume["target"]: volume["source"] for volume in found["grafana"]["volumes"]}
    assert list(Path(mounted[provider["options"]["path"]]).glob("*.json"))


def test_env_example_documents_every_variable_with_its_default() -> None:
    """A default in a compose file is the one that .env.example shows."""
    text = "".join((REPOSITORY / file).read_text() for file in CPU)
    used = dict(re.findall(r"\$\{(\w+):?-([^{}]*)\}", text))
    assert set(re.findall(r"\$\{(\w+)", text)) == set(used)
    shown = dict(re.findall(r"^#?([A-Z][A-Z0-9_]*)=(.*)$", EXAMPLE, re.MULTILINE))
    assert set(shown) == set(used)
    examples_of_files = {"API_KEYS_FILE", "HF_TOKEN_FILE", "CA_BUNDLE", "PUBLISH_ADDRESS"}
    assert {name: shown[name] for name in used if name not in examples_of_files} == {
        name: default for name, default in used.items() if name not in examples_of_files
    }


def test_every_setting_that_the_files_give_exists() -> None:
    known = {variable(field) for field in Settings.model_fields}
    text = EXAMPLE + "".join((REPOSITORY / file).read_text() for file in CPU)
    named = set(re.findall(r"\bMIZZEN_[A-Z0-9_]+", text))
    assert named <= known
