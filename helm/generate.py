"""What the chart has from elsewhere, written into it: the settings' schema, dashboards, rules; and k8s/, made of it.

``make chart`` runs this; a test compares. Helm reads nothing outside the chart, so dashboards and rules are copies.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mizzen.config.settings import Settings, is_secret

ROOT = Path(__file__).parent.parent
CHART = ROOT / "helm" / "mizzen"
COPIES = {"dashboards": "docker/grafana/dashboards/*.json", "rules": "docker/prometheus/*.yml"}
RULES = ("recording.yml", "alerts.yml")
SECRETS = ("api_keys", "api_keys_file")  # from Secrets: apiKeys in the values
PLAIN = ("cpu", "h200", "h200-tp4")  # examples that k8s/ holds
EXACT = 2**53  # a values file's numbers are float64

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
MAP = {"type": "object", "additionalProperties": TEXT}
ANY_MAP = {"type": "object"}
ANY_LIST = {"type": "array", "items": {"type": "object"}}
TEXTS = {"type": "array", "items": TEXT}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"}
ADDRESS_RANGES = {"type": "array", "items": {"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"}}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def count(low: int = 0, high: int = 100_000) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def config() -> dict[str, Any]:
    """The settings' own JSON schema, closed, without what Secrets hold."""
    source = Settings.model_json_schema()
    properties = {
        name: _plain(source["properties"][name])
        for name, field in Settings.model_fields.items()
        if not is_secret(field) and name not in SECRETS
    }
    properties["health_port"]["minimum"] = 1  # the probes need it
    ranks = properties["tensor_parallel_size"]  # what a pod asks for, too: there is no "auto" to ask for
    ranks |= next(part for part in ranks.pop("anyOf") if "minimum" in part)
    properties["model"]["pattern"] = r"^\S*$"
    return closed(**properties)


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    kept = {key: schema[key] for key in schema if key not in ("default", "title", "group", "allowed", "ge", "le")}
    if "anyOf" in kept:
        limits = {ours: schema[theirs] for ours, theirs in (("minimum", "ge"), ("maximum", "le")) if theirs in schema}
        parts = [part | limits if part.get("type") == "integer" else part for part in kept["anyOf"]]
        kept["anyOf"] = [_plain(part) for part in parts]
    if "const" in kept:
        kept = {"enum": [kept["const"]]}
    if kept.get("type") == "integer" and kept.get("maximum", 0) > EXACT:
        kept["maximum"] = EXACT
    return kept


def schema() -> dict[str, Any]:
    modes = choice("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany")
    cache = closed(
        existingClaim=TEXT,
        create=FLAG,
        size=QUANTITY,
        storageClassName=TEXT,
        accessModes={"type": "array", "minItems": 1, "items": modes},
        sizeLimit=QUANTITY,
    )
    values = closed(
        **{"global": ANY_MAP},
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        image=closed(
            repository={"type": "string", "minLength": 1},
            tag=TEXT,
            digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            pullPolicy=choice("IfNotPresent", "Always", "Never"),
        ),
        imagePullSecrets=ANY_LIST,
        config=config(),
        model=closed(existingClaim=TEXT, image=TEXT, sizeGiB={"type": "number", "minimum": 0, "maximum": 10_000}),
        huggingface=closed(existingSecret=TEXT, key={"type": "string", "minLength": 1}, token=TEXT),
        apiKeys=closed(existingSecret=TEXT, key={"type": "string", "minLength": 1}, keys=TEXTS),
        replicas=count(0, 1000),
        strategy=closed(maxSurge=count(0, 1000), maxUnavailable=count(0, 1000)),
        gpu=closed(
            resource={"type": "string", "pattern": r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
            perNode=count(1, 64),
        ),
        resourceClaims=ANY_LIST,
        resources=closed(requests=ANY_MAP, limits=ANY_MAP, claims=ANY_LIST),
        shm=closed(sizeLimit=QUANTITY),
        cache=closed(models=cache, compiled=cache),
        preStopSeconds=count(0, 600),
        startup=closed(budgetSeconds=count(0, 7 * 86_400)),
        podSecurityContext=ANY_MAP,
        securityContext=ANY_MAP,
        serviceAccount=closed(create=FLAG, name=TEXT, annotations=MAP),
        nodeSelector=MAP,
        tolerations=ANY_LIST,
        affinity=ANY_MAP,
        topologySpreadConstraints=ANY_LIST,
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        queueName=TEXT,
        commonLabels=MAP,
        podLabels=MAP,
        podAnnotations=MAP,
        extraEnv=ANY_LIST,
        extraVolumes=ANY_LIST,
        extraVolumeMounts=ANY_LIST,
        extraContainers=ANY_LIST,
        service=closed(type=choice("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, annotations=MAP),
        podDisruptionBudget=closed(enabled=FLAG, maxUnavailable=count(1, 1000)),
        networkPolicy=closed(
            enabled=FLAG,
            sameNamespace=FLAG,
            namespaces=TEXTS,
            monitoringNamespaces=TEXTS,
            downloadCidrs=ADDRESS_RANGES,
            otlpPorts={"type": "array", "items": PORT},
            extraEgress=ANY_LIST,
        ),
        otlp=closed(
            endpoint={"type": "string", "pattern": "^(https?://.+)?$"},
            sampleRatio={"type": "number", "minimum": 0, "maximum": 1},
        ),
        autoscaling=closed(
            kind=choice("none", "hpa", "keda"),
            minReplicas=count(1, 1000),
            maxReplicas=count(1, 1000),
            waitingPerReplica=count(1),
            kvUsagePercent=count(1, 100),
            prometheusAddress=TEXT,
            cooldownSeconds=count(0, 86_400),
        ),
        ingress=closed(enabled=FLAG, className=TEXT, annotations=MAP, host=TEXT, tlsSecret=TEXT),
        httpRoute=closed(enabled=FLAG, parentRefs=ANY_LIST, hostnames=TEXTS),
        inferencePool=closed(enabled=FLAG, endpointPicker=closed(name=TEXT, port=PORT)),
        monitoring=closed(
            podMonitor=FLAG,
            serviceMonitor=FLAG,
            interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
            labels=MAP,
            authorization=ANY_MAP,
            rules=FLAG,
            runbookUrl=TEXT,
            dashboards=FLAG,
            dashboardLabels=MAP,
        ),
        tests=closed(image=TEXT),
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart mizzen"} | values


def generated() -> dict[Path, str]:
    """Every file that is made here, without k8s/."""
    files = {CHART / "values.schema.json": json.dumps(schema(), indent=2) + "\n"}
    for folder, pattern in COPIES.items():
        for path in sorted(ROOT.glob(pattern)):
            if folder == "dashboards" or path.name in RULES:
                files[CHART / "files" / folder / path.name] = path.read_text()
    return files


def plain(name: str, helm: str = "helm") -> str:
    """The manifests of example ``name``, as `helm template` gives them, without test pods and what only Helm needs."""
    command = [
        helm,
        "template",
        "mizzen",
        str(CHART),
        "--namespace",
        "mizzen",
        "--kube-version",
        "1.28.0",
        "--skip-tests",
    ]
    command += ["--values", str(CHART / "examples" / f"{name}.yaml")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kept = [line for line in text.splitlines() if not re.search(r"^# Source:|helm\.sh/chart:|managed-by: Helm", line)]
    return (
        "# Rendered of helm/mizzen/examples/" + f"{name}.yaml by `make chart`: do not edit.\n" + "\n".join(kept) + "\n"
    )


def main() -> int:
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in PLAIN:
        folder = ROOT / "k8s" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "mizzen.yaml").write_text(plain(name))
        (folder / "kustomization.yaml").write_text("namespace: mizzen\nresources: [mizzen.yaml]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
