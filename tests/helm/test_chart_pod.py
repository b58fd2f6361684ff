"""The server's pod: probes, drain, placement, volumes, keys, security; each condition of its template, both ways."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import chart
import pytest
import yaml
from chart import EXAMPLES, download, environment, example, mounts, pod, pod_specs, render, server, volumes, workload

from mizzen.supervisor.health import PROBES

EVERYTHING = {  # whatever makes pods
    "loadTest": {"enabled": True},
    "apiKeys": {"keys": ["k"]},
    "huggingface": {"token": "t"},
}


@pytest.mark.parametrize("version", chart.VERSIONS)
@pytest.mark.parametrize("values", EXAMPLES)
def test_the_grace_period_holds_prestop_and_the_drain(values: str, version: str) -> None:
    objects = example(values, version)
    drain_s = float(environment(objects)["MIZZEN_DRAIN_TIMEOUT_S"])
    pre_stop = server(objects)["lifecycle"]["preStop"]
    sleep_s = pre_stop["sleep"]["seconds"] if "sleep" in pre_stop else int(pre_stop["exec"]["command"][-1])
    assert pod(objects)["terminationGracePeriodSeconds"] == sleep_s + math.ceil(drain_s) + 15


def test_a_fraction_of_a_second_to_drain_counts_as_a_second() -> None:
    objects = render({"config": {"drain_timeout_s": 2.5}, "preStopSeconds": 0})
    assert pod(objects)["terminationGracePeriodSeconds"] == 3 + 15
    assert "lifecycle" not in server(objects)


def test_prestop_is_our_own_command_before_kubernetes_1_30() -> None:
    old = server(example("h200", "1.29.9"))["lifecycle"]["preStop"]
    assert old == {"exec": {"command": ["mizzen", "sleep", "10"]}}
    assert server(example("h200", "1.30.0"))["lifecycle"]["preStop"] == {"sleep": {"seconds": 10}}


def test_the_command_of_prestop_waits() -> None:
    command = [str(Path(sys.executable).parent / "mizzen"), "sleep"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*command, "60"], timeout=1, check=True)
    assert subprocess.run([*command, "0.01"], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("values", EXAMPLES)
def test_probes_ask_paths_that_the_health_port_has(values: str) -> None:
    container = server(example(values))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name, path in (("startup", "startup"), ("readiness", "ready"), ("liveness", "live")):
        asked = container[f"{name}Probe"]["httpGet"]
        assert asked == {"path": f"/health/{path}", "port": "health"}
        assert asked["path"] in PROBES
    assert str(ports["health"]) == environment(example(values))["MIZZEN_HEALTH_PORT"]
    assert str(ports["http"]) == environment(example(values))["MIZZEN_PORT"]


def test_the_startup_budget_comes_from_the_models_size_or_is_given() -> None:
    derived = render({"model": {"sizeGiB": 63.5}})
    probe = server(derived)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800 + 64 * 60
    assert workload(derived)["spec"]["progressDeadlineSeconds"] == 1800 + 64 * 60 + 600
    given = server(render({"startup": {"budgetSeconds": 601}}))["startupProbe"]
    assert given["periodSeconds"] * given["failureThreshold"] == 605


def test_the_pod_is_placed_as_the_values_say() -> None:
    placed: dict[str, Any] = {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "tolerationSeconds": 52428800}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
    }
    assert {key: pod(render(placed))[key] for key in placed} == placed
    assert not set(placed) & set(pod(render()))
    for values, kept in (({}, set()), (placed, {"imagePullSecrets", "nodeSelector", "tolerations"})):
        clients = pod_specs(render({**values, "loadTest": {"enabled": True}}))[1:]
        assert len(clients) == 6
        assert all(set(placed) & set(spec) == kept for spec in clients)
    elsewhere = pod_specs(render({**placed, "tests": {"image": "python:3.13"}}))[1:]
    assert all(set(placed) & set(spec) == {"imagePullSecrets"} for spec in elsewhere)
    assert {spec["containers"][0]["image"] for spec in elsewhere} == {"python:3.13"}


def test_labels_and_annotations_are_added_where_asked() -> None:
    plain = workload(render())["spec"]["template"]["metadata"]
    assert set(plain["annotations"]) == {"checksum/secrets"}
    objects = render(
        {
            "queueName": "gpus",
            "doNotDisrupt": True,
            "commonLabels": {"team": "search"},
            "podLabels": {"tier": "gold"},
            "podAnnotations": {"note": "x"},
        }
    )
    found = workload(objects)["spec"]["template"]["metadata"]
    added = {"kueue.x-k8s.io/queue-name": "gpus", "team": "search", "tier": "gold"}
    assert found["labels"] == plain["labels"] | added
    assert workload(objects)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert "kueue.x-k8s.io/queue-name" not in workload(render())["metadata"]["labels"]
    assert chart.one(objects, "Service")["metadata"]["labels"]["team"] == "search"
    kept = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert found["annotations"] == plain["annotations"] | kept | {"note": "x"}


def test_a_changed_key_makes_new_pods() -> None:
    def checksum(*keys: str) -> str:
        return workload(render({"apiKeys": {"keys": list(keys)}}))["spec"]["template"]["metadata"]["annotations"][
            "checksum/secrets"
        ]

    assert checksum("a") == checksum("a") != checksum("b")


def test_the_image_is_by_flavour_tag_or_digest() -> None:
    digest = "sha256:" + 64 * "a"
    for values, image in (
        ({}, "mizzen:0.1.0-cuda"),
        ({"config": {"device": "cpu"}}, "mizzen:0.1.0-cpu"),
        ({"image": {"repository": "r/mizzen", "tag": "7"}}, "r/mizzen:7"),
        ({"image": {"tag": "7", "digest": digest}}, f"mizzen@{digest}"),
    ):
        objects = render({**values, "loadTest": {"enabled": True}})
        used = {container["image"] for spec in pod_specs(objects) for container in spec["containers"]}
        assert used == {image} == {download(objects)["image"]}


def test_extras_reach_the_server_and_what_downloads_for_it() -> None:
    extra = {
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "extraVolumes": [{"name": "certificates", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "certificates", "mountPath": "/ca"}],
        "extraContainers": [{"name": "beside", "image": "busybox"}],
    }
    objects = render(extra)
    for container in (server(objects), download(objects)):
        assert container["env"][-1] == extra["extraEnv"][0]
        assert container["volumeMounts"][-1] == extra["extraVolumeMounts"][0]
    assert pod(objects)["volumes"][-1] == extra["extraVolumes"][0]
    assert pod(objects)["containers"][1:] == extra["extraContainers"]
    assert len(pod(render())["containers"]) == 1
    assert "certificates" not in volumes(render())


def test_gpus_follow_the_ranks_and_are_absent_on_cpus() -> None:
    assert server(example("h200-tp4"))["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert server(example("h200-tp4"))["resources"]["requests"]["nvidia.com/gpu"] == 4
    assert server(example("mig"))["resources"]["requests"]["nvidia.com/mig-3g.71gb"] == 1
    assert set(server(example("cpu"))["resources"]["limits"]) == {"memory"}
    assert "claims" not in server(example("h200"))["resources"]
    assert set(download(example("h200"))["resources"]["limits"]) == {"memory"}


def test_claimed_devices_take_the_place_of_counted_gpus() -> None:
    claims = [{"name": "gpu", "resourceClaimTemplateName": "h200"}, {"name": "nic", "resourceClaimName": "nic"}]
    objects = render({"resourceClaims": claims})
    assert pod(objects)["resourceClaims"] == claims
    assert set(server(objects)["resources"]["limits"]) == {"memory"}
    assert server(objects)["resources"]["claims"] == [{"name": "gpu"}, {"name": "nic"}]
    assert "claims" not in download(objects)["resources"]


def test_a_named_model_is_downloaded_before_and_served_offline() -> None:
    objects = render()
    assert download(objects)["args"] == ["download"]
    assert "HF_HUB_OFFLINE" not in {entry["name"] for entry in download(objects)["env"]}
    assert environment(objects)["HF_HUB_OFFLINE"] == "1"
    assert mounts(download(objects))["models"] == mounts(server(objects))["models"]
    assert "model" not in volumes(objects)


@pytest.mark.parametrize(
    ("values", "volume"),
    [
        (
            {"model": {"existingClaim": "prepared"}},
            {"persistentVolumeClaim": {"claimName": "prepared", "readOnly": True}},
        ),
        ({"model": {"image": "r/model:1"}}, {"image": {"reference": "r/model:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_a_model_in_a_volume_is_mounted_and_not_downloaded(values: chart.Object, volume: chart.Object) -> None:
    objects = render(values)
    assert "initContainers" not in pod(objects)
    assert volumes(objects)["model"] == {"name": "model"} | volume
    assert mounts(server(objects))["model"] == {"name": "model", "mountPath": "/models", "readOnly": True}
    assert environment(objects)["HF_HUB_OFFLINE"] == "1"


def test_a_model_at_a_path_is_not_downloaded() -> None:
    assert "initContainers" not in pod(render({"config": {"model": "/mnt/model"}}))


def test_every_mount_has_its_volume_and_shared_memory_is_memory() -> None:
    for values in EXAMPLES:
        spec = pod(example(values))
        claimed = workload(example(values))["spec"].get("volumeClaimTemplates", [])
        names = {volume["name"]: volume for volume in spec["volumes"]}
        every = set(names) | {claim["metadata"]["name"] for claim in claimed}
        assert set(mounts(spec["containers"][0])) == every
        for container in spec.get("initContainers", []):
            assert set(mounts(container)) < every
        assert names["shm"]["emptyDir"]["medium"] == "Memory"


def test_keys_and_tokens_are_files_and_never_in_the_environment() -> None:
    objects = render({"apiKeys": {"keys": ["one", "two"]}, "huggingface": {"token": "hf_x"}})
    held = {item["metadata"]["name"]: item["stringData"] for item in objects if item["kind"] == "Secret"}
    assert held == {"llm-mizzen-api-keys": {"keys": "one\ntwo"}, "llm-mizzen-huggingface": {"token": "hf_x"}}
    assert volumes(objects)["api-keys"]["secret"] == {"secretName": "llm-mizzen-api-keys", "defaultMode": 0o440}
    assert volumes(objects)["huggingface"]["secret"] == {"secretName": "llm-mizzen-huggingface", "defaultMode": 0o440}
    for container in (server(objects), download(objects)):
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        assert given["MIZZEN_API_KEYS_FILE"] == mounts(container)["api-keys"]["mountPath"] + "/keys"
        assert given["HF_TOKEN_PATH"] == mounts(container)["huggingface"]["mountPath"] + "/token"
        assert not {"one\ntwo", "hf_x"} & set(given.values())


def test_secrets_that_exist_are_used_and_none_is_made() -> None:
    objects = render(
        {
            "apiKeys": {"existingSecret": "mine", "key": "file", "keys": ["unused"]},
            "huggingface": {"existingSecret": "hf", "key": "t", "token": "unused"},
        }
    )
    assert "Secret" not in chart.kinds(objects)
    assert volumes(objects)["api-keys"]["secret"]["secretName"] == "mine"
    assert environment(objects)["MIZZEN_API_KEYS_FILE"] == "/etc/mizzen/api-keys/file"
    assert volumes(objects)["huggingface"]["secret"]["secretName"] == "hf"
    assert environment(objects)["HF_TOKEN_PATH"] == "/etc/mizzen/huggingface/t"


def test_without_keys_and_tokens_nothing_of_them_is_there() -> None:
    objects = render()
    assert "Secret" not in chart.kinds(objects)
    assert not {"api-keys", "huggingface"} & set(volumes(objects))
    for container in (server(objects), download(objects)):
        assert not {"api-keys", "huggingface"} & set(mounts(container))
        assert not {"MIZZEN_API_KEYS_FILE", "HF_TOKEN_PATH"} & {entry["name"] for entry in container["env"]}


def test_traces_go_to_the_collector_that_is_named() -> None:
    given = environment(render({"otlp": {"endpoint": "http://collector:4318/", "sampleRatio": 0.25}}))
    assert given["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://collector:4318/v1/traces"
    assert given["OTEL_TRACES_SAMPLER_ARG"] == "0.25"
    assert not any(name.startswith("OTEL") for name in environment(render()))


@pytest.mark.parametrize("values", [*EXAMPLES, EVERYTHING, {"model": {"image": "r/model:1"}}])
def test_pods_fit_the_restricted_security_standard(values: str | chart.Object) -> None:
    for spec in pod_specs(example(values) if isinstance(values, str) else render(values)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        allowed = {"name", "emptyDir", "persistentVolumeClaim", "secret", "configMap", "image"}  # image: from 1.33 on
        assert all(set(volume) <= allowed for volume in spec["volumes"])
        for container in spec["containers"] + spec.get("initContainers", []):
            held = container["securityContext"]
            assert held["allowPrivilegeEscalation"] is False
            assert held["privileged"] is False
            assert held["capabilities"] == {"drop": ["ALL"]}
            assert held["readOnlyRootFilesystem"] is True
            assert not any("hostPort" in port for port in container.get("ports", []))


def test_the_root_may_be_writable_where_a_runtime_needs_it() -> None:
    objects = render({"securityContext": {"readOnlyRootFilesystem": False}})
    assert server(objects)["securityContext"]["readOnlyRootFilesystem"] is False
    assert server(objects)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_users_number_as_openshift_has_it_stays_a_number() -> None:
    text = chart.helm(
        "template", "llm", str(chart.CHART), *chart.LEAST, "--set", "podSecurityContext.runAsUser=1000700000"
    )
    assert "runAsUser: 1000700000\n" in text.stdout


def test_the_service_account_is_created_named_or_the_namespaces_own() -> None:
    created = render({"serviceAccount": {"annotations": {"role": "x"}}})
    account = chart.one(created, "ServiceAccount")
    assert account["metadata"]["annotations"] == {"role": "x"}
    assert account["automountServiceAccountToken"] is False
    assert pod(created)["serviceAccountName"] == account["metadata"]["name"] == "llm-mizzen"
    assert "annotations" not in chart.one(render(), "ServiceAccount")["metadata"]
    assert pod(render({"serviceAccount": {"name": "mine"}}))["serviceAccountName"] == "mine"
    for values, name in (({"create": False, "name": "mine"}, "mine"), ({"create": False}, "default")):
        objects = render({"serviceAccount": values})
        assert "ServiceAccount" not in chart.kinds(objects)
        assert pod(objects)["serviceAccountName"] == name


def test_selectors_are_the_same_whatever_the_values() -> None:
    """Kubernetes refuses to change them: these are fixed from the first release on."""
    fixed = {
        "app.kubernetes.io/name": "mizzen",
        "app.kubernetes.io/instance": "llm",
        "app.kubernetes.io/component": "server",
    }
    for values in EXAMPLES:
        objects = example(values)
        assert workload(objects)["spec"]["selector"] == {"matchLabels": fixed}
        labels = workload(objects)["spec"]["template"]["metadata"]["labels"]
        assert fixed.items() <= labels.items()
        for item in objects:
            if item["kind"] in ("Service", "PodDisruptionBudget", "PodMonitor", "ServiceMonitor", "InferencePool"):
                selector = item["spec"]["selector"]
                assert selector.get("matchLabels", selector) == fixed, yaml.safe_dump(item)
        for client in [item for item in objects if item["kind"] == "Pod"]:
            assert not fixed.items() <= client["metadata"]["labels"].items()
