"""What is exported leaves in the background, from bounded queues: a collector that is dead costs nobody any time.

Everything but the choice of the protocol is the SDK's to read from OTEL_* variables: endpoint, headers, certificates,
time limits, sampler, resource, the batches' sizes and intervals. No provider is made global: no library adds its own.
"""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import structlog
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from mizzen.config.config import Otlp, TelemetryConfig
from mizzen.observability import semconv
from mizzen.observability.record import InferenceRecord, RequestRecord
from mizzen.observability.tracing import RequestSpans

CLOSE_S = 1.0  # at the end, for what is still queued; what has not left by then is lost

log = structlog.get_logger()


class Telemetry:
    """An observer of records; traces and metrics as configured. ``process`` names it among those of the service."""

    def __init__(self, config: TelemetryConfig, process: str, version: str) -> None:
        resource = _resource(process, version)
        self._spans: RequestSpans | None = None
        self._metrics: GenAiMetrics | None = None
        self._shutdowns: list[Callable[[], Any]] = []
        if config.traces is not None:
            tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            tracer_provider.add_span_processor(BatchSpanProcessor(_span_exporter(config.traces)))
            self._shutdowns.append(tracer_provider.shutdown)
            self._spans = RequestSpans(tracer_provider.get_tracer("mizzen", version, schema_url=semconv.SCHEMA_URL))
        if config.metrics is not None:
            reader = PeriodicExportingMetricReader(_metric_exporter(config.metrics))
            meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False)
            self._shutdowns.append(meter_provider.shutdown)
            self._metrics = GenAiMetrics(meter_provider.get_meter("mizzen", version, schema_url=semconv.SCHEMA_URL))
        log.info("exporting by OTLP", traces=config.traces, metrics=config.metrics)

    def on_request_end(self, record: RequestRecord) -> None:
        if self._spans is not None:
            self._spans.on_request_end(record)
        if self._metrics is not None:
            self._metrics.on_request_end(record)

    def close(self) -> None:
        """Sends what is queued, within CLOSE_S. The SDK's own limits are longer than a drained service may take."""
        threads = [threading.Thread(target=_quietly, args=(shutdown,), daemon=True) for shutdown in self._shutdowns]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CLOSE_S / len(threads))


def _quietly(shutdown: Callable[[], Any]) -> None:
    try:
        shutdown()
    except Exception as error:  # noqa: BLE001  # the SDK raises plain Exceptions; nothing is left to do about them
        log.warning("telemetry was not all sent", reason=str(error))


class GenAiMetrics:
    """The convention's server metrics. Labels are bounded: only models that are served get this far."""

    def __init__(self, meter: Meter) -> None:
        self._duration = meter.create_histogram(
            semconv.REQUEST_DURATION,
            unit="s",
            description="Time from the request to the last byte or output token.",
            explicit_bucket_boundaries_advisory=semconv.REQUEST_DURATION_BOUNDARIES,
        )
        self._first = meter.create_histogram(
            semconv.TIME_TO_FIRST_TOKEN,
            unit="s",
            description="Time to generate the first token, of successful answers.",
            explicit_bucket_boundaries_advisory=semconv.TIME_TO_FIRST_TOKEN_BOUNDARIES,
        )
        self._per_token = meter.create_histogram(
            semconv.TIME_PER_OUTPUT_TOKEN,
            unit="s",
            description="Time per output token after the first, of successful answers.",
            explicit_bucket_boundaries_advisory=semconv.TIME_PER_OUTPUT_TOKEN_BOUNDARIES,
        )

    def on_request_end(self, record: RequestRecord) -> None:
        inference = record.inference
        if inference is None:
            return
        attributes = _labels(inference)
        if (kind := record.error_type) is not None:
            self._duration.record(record.ended_s - record.started_s, attributes | {semconv.ERROR_TYPE: kind})
            return
        self._duration.record(record.ended_s - record.started_s, attributes)
        if inference.first_output_s is not None:
            self._first.record(inference.first_output_s - record.started_s, attributes)
        for finish in inference.finishes.values():
            first_s, last_s = finish.timings.first_token_s, finish.timings.last_token_s
            if first_s is not None and last_s is not None and finish.completion_tokens > 1:
                self._per_token.record(max(0.0, last_s - first_s) / (finish.completion_tokens - 1), attributes)


def _labels(inference: InferenceRecord) -> dict[str, str]:
    labels = {
        semconv.OPERATION_NAME: inference.operation,
        semconv.PROVIDER_NAME: semconv.PROVIDER,
        semconv.REQUEST_MODEL: inference.model,
    }
    return labels | {semconv.RESPONSE_MODEL: inference.model} if inference.accepted_s is not None else labels


def _resource(process: str, version: str) -> Resource:
    """Ours, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES say otherwise."""
    ours = {
        "service.name": "mizzen",
        "service.version": version,
        # each api process counts for itself: without this, their metrics would overwrite each other
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        "mizzen.process": process,
    }
    return Resource.create({**ours, **OTELResourceDetector().detect().attributes})


# The exporters are imported by need: the one over gRPC takes 20 MB.


def _span_exporter(protocol: Otlp) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http()


def _metric_exporter(protocol: Otlp) -> MetricExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        return Grpc()
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    return Http()
