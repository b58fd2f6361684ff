"""A collector for tests: takes OTLP over HTTP or gRPC and keeps what it got."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_service
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" for none
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    status: int  # 0 unset, 1 ok, 2 error
    status_message: str
    resource: dict[str, Any]


class Trace:
    """One request's server span, and its children in order of their begin."""

    def __init__(self, spans: list[Span]) -> None:
        [self.server] = [span for span in spans if span.kind == 2]
        self.children = sorted((s for s in spans if s is not self.server), key=lambda s: (s.start_ns, s.end_ns))

    def named(self, name: str) -> list[Span]:
        return [span for span in self.children if span.name == name]

    def one(self, name: str) -> Span:
        [span] = self.named(name)
        return span


class Receiver:
    """Subclasses listen at ``endpoint``. While ``hangs`` is set nothing is answered."""

    endpoint = ""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.metrics: list[Any] = []  # the protocol's Metric messages
        self.raw: list[bytes] = []  # each export, whole
        self.headers: list[dict[str, str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def take_traces(self, request: Any) -> None:
        self.raw.append(request.SerializeToString())
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [_span(span, resource) for span in scope.spans]
        self.may_answer.wait()

    def take_metrics(self, request: Any) -> None:
        self.raw.append(request.SerializeToString())
        for of_resource in request.resource_metrics:
            for scope in of_resource.scope_metrics:
                self.metrics += scope.metrics
        self.may_answer.wait()

    def wait(self, condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """The first true value of ``condition``."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not exported: {[span.name for span in self.spans]}"
            time.sleep(0.02)
        return value

    def trace(self, trace_id: str) -> Trace:
        """Waits for its server span, which is exported last."""
        self.wait(lambda: any(span.trace_id == trace_id and span.kind == 2 for span in list(self.spans)))
        return Trace([span for span in list(self.spans) if span.trace_id == trace_id])

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """The newest points of a histogram, with their attributes."""
        newest = [metric for metric in list(self.metrics) if metric.name == name]
        return [(_attributes(point.attributes), point) for point in newest[-1].histogram.data_points] if newest else []

    def close(self) -> None:
        raise NotImplementedError


class HttpReceiver(Receiver):
    def __init__(self) -> None:
        super().__init__()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.headers.append(dict(self.headers.items()))
                if self.path.endswith("/v1/traces"):
                    receiver.take_traces(trace_service.ExportTraceServiceRequest.FromString(body))
                else:
                    assert self.path.endswith("/v1/metrics")
                    receiver.take_metrics(metrics_service.ExportMetricsServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.shutdown()
        self._server.server_close()


class GrpcReceiver(Receiver):
    def __init__(self) -> None:
        super().__init__()
        receiver = self

        class Traces(trace_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                receiver.headers.append({key: str(value) for key, value in context.invocation_metadata()})
                receiver.take_traces(request)
                return trace_service.ExportTraceServiceResponse()

        class Metrics(metrics_grpc.MetricsServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                receiver.take_metrics(request)
                return metrics_service.ExportMetricsServiceResponse()

        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_grpc.add_TraceServiceServicer_to_server(Traces(), self._server)
        metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self.may_answer.set()
        self._server.stop(0).wait()


def _span(span: Any, resource: dict[str, Any]) -> Span:
    return Span(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        status=span.status.code,
        status_message=span.status.message,
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
