"""A real server on a tiny model and a collector: a whole trace for every request, however it ends."""

import contextlib
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from otlp_receiver import GrpcReceiver, HttpReceiver, Receiver, Trace

from service.running import Server
from tiny import make_tiny_model

STAGES = ["tokenize", "queue", "prefill", "decode", "detokenize"]
ERROR, UNSET = 2, 0
SECRET = "the prompt that nobody may see"


class Traced:
    """A server that exports to ``receiver``."""

    def __init__(self, server: Server, receiver: Receiver) -> None:
        self.server = server
        self.receiver = receiver

    def post(self, path: str = "/v1/chat/completions", **fields: Any) -> tuple[httpx.Response, Trace]:
        """A request as a child of a span of ours, and its trace."""
        headers, trace_id = traceparent()
        answer = httpx.post(self.server.url + path, json=body(**fields), headers=headers, timeout=60)
        trace = self.receiver.trace(trace_id)
        assert trace.server.parent_id == headers["traceparent"].split("-")[2]
        return answer, trace

    @contextlib.contextmanager
    def stream(self, **fields: Any) -> Iterator[tuple[httpx.Response, str]]:
        """An open stream, and its trace's id."""
        headers, trace_id = traceparent()
        url = self.server.url + "/v1/chat/completions"
        with httpx.stream("POST", url, json=body(stream=True, **fields), headers=headers, timeout=60) as answer:
            assert answer.status_code == 200
            yield answer, trace_id


def traceparent(*, sampled: bool = True) -> tuple[dict[str, str], str]:
    trace_id = secrets.token_hex(16)
    return {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-{int(sampled):02}", "tracestate": "other=1"}, trace_id


def body(**fields: Any) -> dict[str, Any]:
    common = {"model": "test-model", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    prompt = {} if "prompt" in fields else {"messages": [{"role": "user", "content": SECRET}]}
    return {**common, **prompt, **fields}


@contextlib.contextmanager
def traced(
    receiver: Receiver, folder: Path, *, otel: dict[str, str] | None = None, **settings: Any
) -> Iterator[Traced]:
    model = make_tiny_model(folder / "model", max_position_embeddings=16384)
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=blue",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_METRIC_EXPORT_INTERVAL": "300",
        **(otel or {}),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        server = Server(model, folder, **settings)
    try:
        server.wait_ready()
        yield Traced(server, receiver)
    finally:
        server.close()
        receiver.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    settings = {"max_running_requests": 2, "max_queued_requests": 1, "request_timeout_s": 4}
    with traced(HttpReceiver(), tmp_path_factory.mktemp("traced"), **settings) as service:
        yield service


def check_whole(trace: Trace, *names: str) -> None:
    """Every stage is there once, in order, inside the server span; those that follow each other touch."""
    server = trace.server
    for span in trace.children:
        assert span.parent_id == server.span_id, span.name
        assert server.start_ns <= span.start_ns <= span.end_ns <= server.end_ns, span.name
    assert [span.name for span in trace.children] == list(names)
    spans = {span.name: span for span in trace.children}
    assert spans["tokenize"].end_ns <= spans["queue"].start_ns
    assert spans["queue"].end_ns == spans["prefill"].start_ns
    assert spans["prefill"].end_ns == spans["decode"].start_ns <= spans["detokenize"].start_ns
    assert abs(server.end_ns - time.time_ns()) < 3600e9  # wall time, not a clock that began at boot


def test_a_plain_request_has_a_whole_trace(service: Traced) -> None:
    answer, trace = service.post(seed=7, top_p=0.5, top_k=3, stop=["never"], frequency_penalty=0.25)
    check_whole(trace, *STAGES)
    usage = answer.json()["usage"]
    assert trace.server.name == "POST /v1/chat/completions"
    assert trace.server.status == UNSET
    attributes = dict(trace.server.attributes)
    assert attributes.pop("mizzen.request.id") == answer.headers["x-request-id"] == answer.json()["id"]
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mizzen",
        "gen_ai.request.model": "test-model",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": False,
        "gen_ai.request.stop_sequences": ["never"],
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "test-model",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }
    assert trace.one("prefill").attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert trace.one("decode").attributes["gen_ai.usage.output_tokens"] == 12
    assert trace.server.resource["service.name"] == "mizzen"


def test_a_streamed_answer_has_a_whole_trace(service: Traced) -> None:
    with service.stream() as (answer, trace_id):
        assert answer.read().endswith(b"data: [DONE]\n\n")
    trace = service.receiver.trace(trace_id)
    check_whole(trace, *STAGES)
    assert trace.server.status == UNSET
    assert trace.server.attributes["gen_ai.request.stream"] is True
    first_chunk_s = trace.server.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < first_chunk_s <= (trace.server.end_ns - trace.server.start_ns) / 1e9


def test_each_choice_has_its_own_stages(service: Traced) -> None:
    answer, trace = service.post("/v1/completions", prompt="two answers", n=2)
    assert answer.status_code == 200
    assert trace.server.attributes["gen_ai.operation.name"] == "text_completion"
    assert trace.server.attributes["gen_ai.request.choice.count"] == 2
    assert trace.server.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert trace.server.attributes["gen_ai.usage.output_tokens"] == 24
    trace.one("tokenize")
    for name in STAGES[1:]:
        assert sorted(span.attributes["mizzen.choice.index"] for span in trace.named(name)) == [0, 1]


def test_a_client_that_leaves_has_a_whole_trace_with_an_error(service: Traced) -> None:
    with service.stream(max_tokens=15_000) as (answer, trace_id):
        next(answer.iter_raw(1))
    trace = service.receiver.trace(trace_id)
    check_whole(trace, *STAGES)
    assert trace.server.status == ERROR
    assert trace.server.attributes["error.type"] == "client_disconnected"
    assert trace.server.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < trace.server.attributes["gen_ai.usage.output_tokens"] < 15_000
    service.server.wait_idle()


def test_a_stream_that_ends_with_an_error_event_is_an_error(service: Traced) -> None:
    with service.stream(max_tokens=15_000) as (answer, trace_id):
        event = json.loads(answer.read().decode().split("data: ")[-1])
    assert event["error"]["code"] == "request_timeout"
    trace = service.receiver.trace(trace_id)
    check_whole(trace, *STAGES)
    assert trace.server.attributes["http.response.status_code"] == 200  # it had been sent
    assert (trace.server.status, trace.server.attributes["error.type"]) == (ERROR, "request_timeout")
    assert trace.server.attributes["gen_ai.response.finish_reasons"] == ["error"]
    service.server.wait_idle()


def test_a_refusal_for_lack_of_room_is_an_error_without_stages(service: Traced) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # two that run and one that waits
            stack.enter_context(service.stream(max_tokens=15_000))
        answer, trace = service.post()
    assert answer.status_code == 429
    assert trace.children == []
    assert (trace.server.status, trace.server.attributes["error.type"]) == (ERROR, "rate_limit_exceeded")
    assert trace.server.attributes["http.response.status_code"] == 429
    assert trace.server.attributes["gen_ai.request.model"] == "test-model"
    assert "gen_ai.response.id" not in trace.server.attributes
    service.server.wait_idle()


def test_a_request_that_is_wrong_is_no_error_of_ours(service: Traced) -> None:
    answer, trace = service.post(temperature=9)
    assert answer.status_code == 400
    assert trace.server.attributes["error.type"] == "invalid_value"
    assert trace.server.status == UNSET


def test_a_request_that_the_tokenizer_refuses_was_with_it_until_then(service: Traced) -> None:
    answer, trace = service.post("/v1/completions", prompt=[5] * 20_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert [span.name for span in trace.children] == ["tokenize"]
    span = trace.one("tokenize")
    assert trace.server.start_ns < span.start_ns < span.end_ns < trace.server.end_ns
    assert trace.server.status == UNSET
    assert "gen_ai.response.id" not in trace.server.attributes


def test_what_the_client_does_not_sample_is_not_exported(service: Traced) -> None:
    headers, trace_id = traceparent(sampled=False)
    assert httpx.post(service.server.url + "/v1/chat/completions", json=body(), headers=headers).status_code == 200
    service.post()  # exported after it would have been
    assert trace_id not in {span.trace_id for span in service.receiver.spans}
    assert f"trace_id={trace_id}" in service.server.log()  # but the access line names it


def test_probes_have_no_trace(service: Traced) -> None:
    headers, trace_id = traceparent()
    assert httpx.get(service.server.url + "/health", headers=headers).status_code == 200
    service.post()
    assert trace_id not in {span.trace_id for span in service.receiver.spans}


def test_prompts_and_answers_are_not_exported_and_headers_are_sent(service: Traced) -> None:
    answer, _ = service.post()
    assert answer.status_code == 200
    assert service.receiver.raw
    assert not any(SECRET.encode() in raw for raw in service.receiver.raw)
    assert not any(b"put.messages" in raw for raw in service.receiver.raw)  # gen_ai.input's and gen_ai.output's
    assert SECRET not in service.server.log()
    assert service.receiver.headers[-1]["x-tenant"] == "blue"


def test_the_metrics_of_the_convention_are_exported(service: Traced) -> None:
    service.post()
    receiver = service.receiver
    labels = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mizzen",
        "gen_ai.request.model": "test-model",
        "gen_ai.response.model": "test-model",
    }
    for name, first_bound in {
        "gen_ai.server.request.duration": 0.01,
        "gen_ai.server.time_to_first_token": 0.001,
        "gen_ai.server.time_per_output_token": 0.01,
    }.items():
        [point] = receiver.wait(lambda name=name: [p for a, p in receiver.points(name) if a == labels])
        assert point.count > 0
        assert 0 < point.sum < 60
        assert point.explicit_bounds[0] == first_bound


@pytest.mark.slow
def test_a_request_whose_engine_dies_is_an_error(service: Traced) -> None:
    with service.stream(max_tokens=15_000) as (answer, trace_id):
        lines = answer.iter_lines()
        next(lines)
        os.kill(service.server.pids()["engine-0"], signal.SIGKILL)
        rest = list(lines)
    assert "engine_restarted" in "".join(rest)
    trace = service.receiver.trace(trace_id)
    assert (trace.server.status, trace.server.attributes["error.type"]) == (ERROR, "engine_restarted")
    assert trace.server.attributes["gen_ai.usage.output_tokens"] > 0
    service.server.wait_ready()


@pytest.mark.slow
def test_grpc_and_content_are_a_setting_away(tmp_path: Path) -> None:
    otel = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_SERVICE_NAME": "my-llm"}
    with traced(GrpcReceiver(), tmp_path, otel=otel, trace_content="true") as service:
        answer, trace = service.post()
        assert answer.status_code == 200
        check_whole(trace, *STAGES)
        assert trace.server.resource["service.name"] == "my-llm"
        [message] = json.loads(trace.server.attributes["gen_ai.input.messages"])
        assert message == {"role": "user", "parts": [{"type": "text", "content": SECRET}]}
        [said] = json.loads(trace.server.attributes["gen_ai.output.messages"])
        text = answer.json()["choices"][0]["message"]["content"]
        assert said == {"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": "length"}
        assert service.receiver.headers[-1]["x-tenant"] == "blue"
        service.receiver.wait(lambda: service.receiver.points("gen_ai.server.request.duration"))


@pytest.mark.slow
def test_a_collector_that_hangs_delays_neither_answers_nor_the_end(tmp_path: Path) -> None:
    receiver = HttpReceiver()
    receiver.may_answer.clear()
    with traced(receiver, tmp_path) as service:
        headers, _ = traceparent()
        for _ in range(30):
            answer = httpx.post(service.server.url + "/v1/chat/completions", json=body(), headers=headers, timeout=30)
            assert answer.status_code == 200
        receiver.wait(lambda: receiver.spans)  # it hangs now
        assert service.server.stop() == 0
        assert not receiver.may_answer.is_set()
        assert "was killed" not in service.server.log()
