"""The standard variables turn telemetry on, and say how it travels."""

import pytest

from mizzen.config.config import TelemetryConfig
from mizzen.config.telemetry import resolve_telemetry
from mizzen.errors import ConfigError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
HTTP = "http/protobuf"


@pytest.mark.parametrize(
    ("environment", "traces", "metrics"),
    [
        ({}, None, None),
        ({"OTEL_SERVICE_NAME": "llm", "OTEL_TRACES_SAMPLER": "always_on"}, None, None),
        (ENDPOINT, HTTP, HTTP),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None, None),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector/v1/traces"}, HTTP, None),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector/v1/metrics"}, None, HTTP),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, HTTP, None),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, None, HTTP),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, HTTP, None),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc", "grpc"),
        (
            {
                **ENDPOINT,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": HTTP,
            },
            "grpc",
            HTTP,
        ),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, None, None),
    ],
)
def test_a_variable_of_opentelemetry_turns_it_on(
    environment: dict[str, str], traces: str | None, metrics: str | None
) -> None:
    config = resolve_telemetry(environment, content=True)
    assert (config.traces, config.metrics, config.content) == (traces, metrics, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "udp"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_METRICS_EXPORTER", "prometheus"),
    ],
)
def test_what_is_not_supported_is_named_not_ignored(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}', but must be: ") as caught:
        resolve_telemetry({**ENDPOINT, name: value}, content=False)
    assert caught.value.setting == name


def test_prompts_stay_by_default() -> None:
    assert TelemetryConfig() == TelemetryConfig(None, None, content=False)
