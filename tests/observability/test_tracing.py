"""Spans from records, without a server: what is rare on a healthy one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler
from opentelemetry.trace import StatusCode
from structlog.testing import capture_logs

from mizzen.errors import EngineRestarted, InvalidRequest, RequestError
from mizzen.ipc.messages import ChatPrompt, Delta, Finish, TextPrompt, Timings, TokenPrompt
from mizzen.observability.otlp import GenAiMetrics
from mizzen.observability.record import InferenceRecord, RequestRecord, emit_to
from mizzen.observability.tracing import MAX_CHOICES, RequestSpans
from mizzen.sampling_params import SamplingParams

PATH = "/v1/completions"
WHOLE = Timings(1000.0, 1000.1, 1000.2, 1000.3, 1000.4, 1000.5, 1000.8, 1000.5, 1000.85)


class Spans:
    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._spans = RequestSpans(provider.get_tracer("test"))

    def of(self, record: RequestRecord) -> dict[str, ReadableSpan]:
        """By name, those of the first choice; the server's as "server"."""
        self._spans.on_request_end(record)
        spans: dict[str, ReadableSpan] = {}
        for span in self._exporter.get_finished_spans():
            spans.setdefault("server" if span.parent is None else span.name, span)
        return spans

    def __len__(self) -> int:
        return len(self._exporter.get_finished_spans())


def make_record(*finishes: Finish, ended_s: float = 1001.0, **changes: Any) -> RequestRecord:
    record = RequestRecord("POST", PATH, "an-id", 1000.0, lambda _: None, route=PATH, status=200)
    sampling = SamplingParams(n=max(1, len(finishes)))
    record.inference = InferenceRecord("text_completion", "m", sampling, False, 1, sampling.n, **changes)
    if finishes:
        record.admit()
        record.accept([7])
        record.inference.response_id = "cmpl-1"
    for index, finish in enumerate(finishes):
        record.finish(index, finish)
    record.ended_s = ended_s
    return record


def seconds(span: ReadableSpan) -> tuple[float, float]:
    """Since the server span's begin would be wall time: only differences count."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_each_stage_lasts_from_one_time_to_the_next() -> None:
    spans = Spans().of(make_record(Finish("stop", 7, 4, timings=WHOLE)))
    begin, end = seconds(spans["server"])
    assert end - begin == pytest.approx(1.0, abs=1e-5)
    stages = {
        name: tuple(round(t - begin, 4) for t in seconds(span)) for name, span in spans.items() if name != "server"
    }
    assert stages == {
        "tokenize": (0.1, 0.2),
        "queue": (0.3, 0.4),
        "prefill": (0.4, 0.5),
        "decode": (0.5, 0.8),
        "detokenize": (0.5, 0.85),
    }


def test_a_request_that_ends_in_the_queue_was_queued_until_then() -> None:
    record = make_record(Finish("abort", 7, 0, timings=Timings(1000.0, 1000.1, 1000.2, 1000.3)), ended_s=1000.6)
    record.client_gone, record.status = True, 499
    spans = Spans().of(record)
    assert set(spans) == {"server", "tokenize", "queue"}
    assert seconds(spans["queue"])[1] == seconds(spans["server"])[1]
    assert spans["server"].status.status_code == StatusCode.ERROR


def test_what_the_tokenizer_refused_has_its_span_and_no_other() -> None:
    record = make_record()
    record.admit()
    record.refuse(1000.1, 1000.4)
    record.status, record.error = 400, InvalidRequest("too long").wire()
    spans = Spans().of(record)
    begin, _ = seconds(spans["server"])
    assert set(spans) == {"server", "tokenize"}
    assert tuple(round(t - begin, 4) for t in seconds(spans["tokenize"])) == (0.1, 0.4)


def test_what_the_engine_did_for_a_client_that_had_left_does_not_stick_out() -> None:
    spans = Spans().of(make_record(Finish("abort", 7, 9, timings=WHOLE), ended_s=1000.45))
    end = seconds(spans["server"])[1]
    for name in ("prefill", "decode", "detokenize"):
        assert seconds(spans[name])[1] == end
    assert seconds(spans["decode"])[0] == end


def test_a_sampler_that_says_no_is_asked_once_and_nothing_else_happens() -> None:
    class Forbidden(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("the prompts were read")

    spans = Spans(ALWAYS_OFF)
    record = make_record(Finish("stop", 7, 4, timings=WHOLE), prompts=Forbidden())
    spans.of(record)
    assert len(spans) == 0
    assert record.trace_id is not None


def test_spans_of_choices_are_bounded() -> None:
    spans = Spans()
    spans.of(make_record(*[Finish("stop", 7, 4, timings=WHOLE)] * 100))
    assert len(spans) == 1 + 1 + 4 * MAX_CHOICES


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (200, None, StatusCode.UNSET),
        (200, EngineRestarted("it died"), StatusCode.ERROR),
        (503, EngineRestarted("it died"), StatusCode.ERROR),
        (400, InvalidRequest("no"), StatusCode.UNSET),
    ],
)
def test_only_what_the_server_could_not_do_is_an_error(
    status: int, error: RequestError | None, code: StatusCode
) -> None:
    record = make_record()
    record.status, record.error = status, error and error.wire()
    server = Spans().of(record)["server"]
    assert server.status.status_code == code
    assert server.attributes is not None
    assert server.attributes.get("error.type") == (error and error.code)


def test_a_garbled_traceparent_begins_a_trace_of_its_own() -> None:
    record = make_record()
    record.traceparent, record.tracestate = "00-nonsense", "\xff,,,"
    assert "server" in Spans().of(record)


def test_content_is_exported_only_where_it_was_kept() -> None:
    prompts = [
        ChatPrompt([{"role": "system", "content": None}, {"role": "user", "content": "Hi"}]),
        TextPrompt("Once"),
        TokenPrompt(b"\0\0\0\0"),
    ]
    attributes = Spans().of(make_record(Finish("stop", 7, 4), prompts=prompts))["server"].attributes
    assert attributes is not None
    assert attributes["gen_ai.input.messages"] == (
        '[{"role":"system","parts":[{"type":"text","content":null}]},'
        '{"role":"user","parts":[{"type":"text","content":"Hi"}]},'
        '{"role":"user","parts":[{"type":"text","content":"Once"}]}]'
    )
    assert "gen_ai.output.messages" not in attributes


def test_answers_are_exported_by_choice_as_far_as_the_client_got_them() -> None:
    record = make_record(answers=[["Pa", "ris"], ["Ly"], []])
    assert record.inference is not None
    record.inference.finishes = {0: Finish("stop", 7, 2), 1: Finish("abort", 7, 1)}
    attributes = Spans().of(record)["server"].attributes
    assert attributes is not None
    assert json.loads(str(attributes["gen_ai.output.messages"])) == [
        {"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": reason}
        for text, reason in (("Paris", "stop"), ("Ly", "error"), ("", "error"))
    ]


def test_a_refused_request_has_no_answer_to_export() -> None:
    attributes = Spans().of(make_record(answers=[[]]))["server"].attributes
    assert attributes is not None
    assert "gen_ai.output.messages" not in attributes


def test_a_delta_is_kept_only_where_answers_are() -> None:
    for answers in (None, [[]]):
        record = make_record(answers=answers)
        record.output(Delta("r", 0, "Hi", 1))
        assert record.inference is not None
        assert record.inference.answers == (None if answers is None else [["Hi"]])


def test_metrics_of_failures_have_a_duration_alone() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics = GenAiMetrics(provider.get_meter("test"))
    good = make_record(Finish("stop", 7, 4, timings=WHOLE))
    assert good.inference is not None
    good.inference.first_output_s = 1000.55
    bad = make_record()
    bad.error = EngineRestarted("it died").wire()
    for record in (good, bad):
        metrics.on_request_end(record)
    data = reader.get_metrics_data()
    assert data is not None
    sums = {
        (metric.name, str((point.attributes or {}).get("error.type"))): round(getattr(point, "sum", 0.0), 6)
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    assert sums == {
        ("gen_ai.server.request.duration", "None"): 1.0,
        ("gen_ai.server.request.duration", "engine_restarted"): 1.0,
        ("gen_ai.server.time_to_first_token", "None"): 0.55,
        ("gen_ai.server.time_per_output_token", "None"): 0.1,
    }
    provider.shutdown()


def test_a_record_is_complete_when_both_sides_are_done() -> None:
    complete: list[RequestRecord] = []
    record = make_record(Finish("stop", 7, 4))
    record.emit = complete.append
    record.http_done()
    assert complete == [record]

    record = make_record()
    record.emit = complete.append
    record.admit()
    record.output(Delta("r", 0, "text", 2))
    record.http_done()
    assert len(complete) == 1  # the engine's word is awaited
    record.finish(0, Finish("abort", 7, 3))
    record.finish(0, Finish("abort", 7, 9))
    record.engine_done()
    assert complete[1:] == [record]
    assert record.inference is not None
    assert record.inference.completion_tokens == 3


def test_an_observer_with_a_bug_costs_nobody_anything() -> None:
    class Broken:
        def on_request_end(self, record: RequestRecord) -> None:
            raise ValueError("a bug")

    class Works:
        def __init__(self) -> None:
            self.records: list[RequestRecord] = []

        def on_request_end(self, record: RequestRecord) -> None:
            self.records.append(record)

    works = Works()
    record = make_record()
    with capture_logs() as logs:
        emit_to([Broken(), works])(record)
    assert works.records == [record]
    assert [line["request_id"] for line in logs] == ["an-id"]


LOADED = (
    "print(sorted(m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'grpc'))))"
)


def run(program: str) -> str:
    server_tests = Path(__file__).parents[1] / "server"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(server_tests)!r})\n{program}\n{LOADED}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout.splitlines()[-1]


def test_an_api_process_that_does_not_export_loads_nothing_for_it() -> None:
    serve = (
        "import contextlib\n"
        "from api_service import start_service\n"
        "with contextlib.ExitStack() as stack:\n"
        "    assert start_service(stack).chat().status_code == 200"
    )
    assert run(serve) == "[]"
    assert "opentelemetry.sdk" in run("import mizzen.observability.otlp")  # and this is how it would look
