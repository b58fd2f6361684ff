"""OpenTelemetry's own variables decide whether anything is exported; nothing of it is even imported otherwise.

Only what turns it on and the protocol are read here. Endpoints, headers, certificates, time limits, the sampler, the
service's name and the queue's size are read by the SDK in the api processes, which get every OTEL_* variable.
"""

from collections.abc import Mapping
from typing import get_args

from mizzen.config.config import Otlp, TelemetryConfig
from mizzen.errors import ConfigError


def resolve_telemetry(environment: Mapping[str, str], *, content: bool) -> TelemetryConfig:
    """Raises ConfigError for an exporter or a protocol that is not supported."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return TelemetryConfig(content=content)
    return TelemetryConfig(_protocol(environment, "TRACES"), _protocol(environment, "METRICS"), content)


def _protocol(environment: Mapping[str, str], signal: str) -> Otlp | None:
    """How a signal is exported; None: not at all. An endpoint turns it on, as does the exporter "otlp"."""
    exporter = environment.get(f"OTEL_{signal}_EXPORTER", "").strip()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError(
            f"OTEL_{signal}_EXPORTER is {exporter!r}, but must be: otlp or none", setting=f"OTEL_{signal}_EXPORTER"
        )
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    if exporter == "none" or not (exporter or any(environment.get(name) for name in endpoints)):
        return None
    # the signal's own variable wins over the common one
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if value := environment.get(name, "").strip():
            for protocol in get_args(Otlp):
                if value == protocol:
                    return protocol  # type: ignore[no-any-return]  # get_args knows no types
            raise ConfigError(f"{name} is {value!r}, but must be: grpc or http/protobuf", setting=name)
    return "http/protobuf"  # the specification's default
