"""The schema of the chart's values: closed, typed, and its ``config`` part made of the server's own settings."""

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from mizzen.config.settings import Settings, is_secret

VALUES = Path(__file__).parent / "mizzen" / "values.yaml"
SECRETS = ("api_keys", "api_keys_file")  # from Secrets: apiKeys in the values
OPTIONAL = ("log_format", "termination_log")  # the chart prefers these, and lives without
EXACT = 2**53  # a values file's numbers are float64

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
MAP = {"type": "object", "additionalProperties": TEXT}
ANY_MAP = {"type": "object"}
ANY_LIST = {"type": "array", "items": {"type": "object"}}
TEXTS = {"type": "array", "items": TEXT}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?$"}
ADDRESS_RANGES = {"type": "array", "items": {"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"}}
MODES = ("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany")
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def count(low: int = 0, high: int = 100_000) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def closed(**properties: Any) -> dict[str, Any]:
    """No other keys, and all of these: each has a default, which a null would take away."""
    return item(**properties) | {"required": list(properties)}


def item(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def items(**properties: Any) -> dict[str, Any]:
    return {"type": "array", "items": item(**properties)}


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
    needed = yaml.safe_load(VALUES.read_text())["config"]
    return item(**properties) | {"required": [name for name in needed if name not in OPTIONAL]}


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
    parents = items(group=TEXT, kind=TEXT, namespace=TEXT, name=TEXT, sectionName=TEXT, port=PORT)
    picker = closed(name=TEXT, port=PORT, failureMode=choice("FailOpen", "FailClose"), podLabels=MAP)
    resources = closed(requests=ANY_MAP, limits=ANY_MAP)
    cache = closed(
        existingClaim=TEXT,
        create=FLAG,
        size=QUANTITY,
        storageClassName=TEXT,
        accessModes={"type": "array", "minItems": 1, "items": choice(*MODES)},
        sizeLimit=QUANTITY,
    )
    values = closed(
        nameOverride=TEXT,
        fullnameOverride=TEXT,
        kind=choice("Deployment", "StatefulSet"),
        image=closed(
            repository={"type": "string", "minLength": 1},
            tag=TEXT,
            digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            pullPolicy=choice("IfNotPresent", "Always", "Never"),
        ),
        imagePullSecrets=items(name=TEXT),
        config=config(),
        model=closed(
            existingClaim=TEXT,
            accessModes={"type": "array", "minItems": 1, "items": choice("ReadOnlyMany", *MODES)},
            image=TEXT,
            sizeGiB={"type": "number", "minimum": 0, "maximum": 10_000},
        ),
        huggingface=closed(existingSecret=TEXT, key={"type": "string", "minLength": 1}, token=TEXT),
        apiKeys=closed(existingSecret=TEXT, key={"type": "string", "minLength": 1}, keys=TEXTS),
        replicas=count(0, 1000),
        strategy=closed(maxSurge=count(0, 1000), maxUnavailable=count(0, 1000)),
        gpu=closed(
            resource={"type": "string", "pattern": r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"},
            perNode=count(1, 64),
        ),
        resourceClaims=items(name=TEXT, resourceClaimName=TEXT, resourceClaimTemplateName=TEXT),
        resources=resources,
        shm=closed(sizeLimit=QUANTITY),
        cache=closed(models=cache, compiled=cache),
        preStopSeconds=count(0, 600),
        startup=closed(budgetSeconds=count(0, 7 * 86_400)),
        podSecurityContext=ANY_MAP,
        securityContext=ANY_MAP,
        serviceAccount=closed(create=FLAG, name=TEXT, annotations=MAP),
        nodeSelector=MAP,
        tolerations=items(key=TEXT, operator=TEXT, value=TEXT, effect=TEXT, tolerationSeconds=count(0, 2**31 - 1)),
        affinity=ANY_MAP,
        topologySpreadConstraints=items(
            maxSkew=count(1, 1000),
            topologyKey=TEXT,
            whenUnsatisfiable=choice("DoNotSchedule", "ScheduleAnyway"),
            labelSelector=ANY_MAP,
            matchLabelKeys=TEXTS,
            minDomains=count(1, 1000),
            nodeAffinityPolicy=choice("Honor", "Ignore"),
            nodeTaintsPolicy=choice("Honor", "Ignore"),
        ),
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        queueName=TEXT,
        doNotDisrupt=FLAG,
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
            ingressCidrs=ADDRESS_RANGES,
            monitoringNamespaces=TEXTS,
            downloadCidrs=ADDRESS_RANGES,
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
        loadBalancer=choice("none", "gke-gateway", "gke-ingress", "alb"),
        ingress=closed(enabled=FLAG, className=TEXT, annotations=MAP, host=TEXT, tlsSecret=TEXT),
        httpRoute=closed(enabled=FLAG, parentRefs=parents, hostnames=TEXTS),
        inferencePool=closed(enabled=FLAG, endpointPicker=picker),
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
        loadTest=closed(enabled=FLAG, image=TEXT, args={**TEXTS, "minItems": 1}, resources=resources),
    )
    values["properties"] = {"global": ANY_MAP} | values["properties"]  # a parent chart's
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the chart mizzen"} | values
