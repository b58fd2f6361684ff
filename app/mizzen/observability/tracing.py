"""One trace a request, built when it has ended, from times that it carried along: no process on its way does anything.

The server span has the client's span as its parent, if a W3C traceparent header named one, and as its children what
happened behind the api: tokenize, queue, prefill, decode and detokenize, the last four for each choice. The sampler is
asked first. Importing this module imports OpenTelemetry's SDK: only a process that exports does.
"""

import time
from collections.abc import Iterator, Mapping

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mizzen.ipc.messages import ChatPrompt, Finish, Prompt, TextPrompt
from mizzen.observability import semconv
from mizzen.observability.record import InferenceRecord, RequestRecord

Attribute = str | int | float | bool | list[str]
MAX_CHOICES = 16  # of one request that have spans: a request may ask for thousands
TRACED = "/v1/"  # probes and scrapes are not

_propagator = TraceContextTextMapPropagator()


class RequestSpans:
    """An observer of records that makes spans of them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def on_request_end(self, record: RequestRecord) -> None:
        if not record.path.startswith(TRACED):
            return
        clock = _WallClock(record.started_s, record.ended_s)
        server = self._tracer.start_span(
            f"{record.method} {record.route}" if record.route else record.method,
            context=_parent(record),
            kind=SpanKind.SERVER,
            attributes=_for_the_sampler(record),
            start_time=clock(record.started_s),
        )
        record.trace_id = format_trace_id(server.get_span_context().trace_id)
        if not server.is_recording():
            return
        server.set_attributes(_http(record))
        if is_failure(record):
            server.set_status(Status(StatusCode.ERROR, record.error.message if record.error else "the client left"))
        inference = record.inference
        if inference is not None:
            server.set_attributes(_gen_ai(record, inference))
            context = set_span_in_context(server, Context())
            for name, start_s, end_s, attributes in _stages(inference, record.ended_s):
                start = clock(start_s)
                span = self._tracer.start_span(name, context=context, attributes=attributes, start_time=start)
                span.end(max(start, clock(end_s)))
        server.end(clock(record.ended_s))


class _WallClock:
    """CLOCK_MONOTONIC seconds to nanoseconds since 1970, within the request: what the engine did for a client that had
    left counts up to there. The offset is taken once, so that a clock that is set meanwhile cannot tear a trace apart.
    """

    def __init__(self, start_s: float, end_s: float) -> None:
        self._offset = time.time_ns() - time.monotonic_ns()
        self._start_s, self._end_s = start_s, end_s

    def __call__(self, monotonic_s: float) -> int:
        return int(min(max(monotonic_s, self._start_s), self._end_s) * 1e9) + self._offset


def is_failure(record: RequestRecord) -> bool:
    """Whether the span's status is an error: by the convention not for what a client did wrong, but a refusal for lack
    of room, an answer that broke off and a client that left are what one looks for.
    """
    refused = record.status >= 400 and record.status != 429 and record.status < 500
    return record.client_gone or (record.error_type is not None and not refused)


def _parent(record: RequestRecord) -> Context:
    if record.traceparent is None:
        return Context()
    carrier = {"traceparent": record.traceparent}
    if record.tracestate is not None:
        carrier["tracestate"] = record.tracestate
    return _propagator.extract(carrier, Context())


def _stages(
    inference: InferenceRecord, ended_s: float
) -> Iterator[tuple[str, float, float, Mapping[str, Attribute] | None]]:
    """Name, begin, end and attributes. What had begun when the request ended, lasted until then."""
    finishes = [inference.finishes[index] for index in sorted(inference.finishes)[:MAX_CHOICES]]
    if inference.refused_after is not None:
        yield "tokenize", *inference.refused_after, None
    if finishes and (first := finishes[0].timings).tokenize_s is not None and first.tokenized_s is not None:
        yield "tokenize", first.tokenize_s, first.tokenized_s, None
    for index, finish in zip(sorted(inference.finishes), finishes, strict=False):
        attributes: dict[str, Attribute] = {semconv.CHOICE_INDEX: index}
        times = finish.timings
        if times.queued_s is not None:
            yield "queue", times.queued_s, _or(times.scheduled_s, ended_s), attributes
        if times.scheduled_s is not None:
            prompt: dict[str, Attribute] = {
                semconv.USAGE_INPUT_TOKENS: finish.prompt_tokens,
                semconv.USAGE_CACHE_READ_INPUT_TOKENS: finish.cached_tokens,
            }
            yield "prefill", times.scheduled_s, _or(times.first_token_s, ended_s), attributes | prompt
        if times.first_token_s is not None:
            answer: dict[str, Attribute] = {
                semconv.USAGE_OUTPUT_TOKENS: finish.completion_tokens,
                semconv.RESPONSE_FINISH_REASONS: [finish.reason],
            }
            yield "decode", times.first_token_s, _or(times.last_token_s, ended_s), attributes | answer
        if times.detokenize_s is not None:
            yield "detokenize", times.detokenize_s, _or(times.detokenized_s, ended_s), attributes


def _or(time_s: float | None, else_s: float) -> float:
    return else_s if time_s is None else time_s


def _for_the_sampler(record: RequestRecord) -> dict[str, Attribute]:
    """What the conventions want to be known when a sampler decides."""
    attributes: dict[str, Attribute] = {
        semconv.HTTP_REQUEST_METHOD: record.method,
        semconv.URL_PATH: record.path,
        semconv.URL_SCHEME: "http",
    }
    if record.route:
        attributes[semconv.HTTP_ROUTE] = record.route
    if record.inference is not None:
        attributes[semconv.OPERATION_NAME] = record.inference.operation
        attributes[semconv.PROVIDER_NAME] = semconv.PROVIDER
        attributes[semconv.REQUEST_MODEL] = record.inference.model
    return attributes


def _http(record: RequestRecord) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        semconv.HTTP_RESPONSE_STATUS_CODE: record.status,
        semconv.REQUEST_ID: record.request_id,
    }
    if (kind := record.error_type) is not None:
        attributes[semconv.ERROR_TYPE] = kind
    return attributes


def _gen_ai(record: RequestRecord, inference: InferenceRecord) -> dict[str, Attribute]:
    sampling = inference.sampling
    attributes: dict[str, Attribute] = {
        semconv.REQUEST_STREAM: inference.stream,
        semconv.REQUEST_TEMPERATURE: sampling.temperature,
        semconv.REQUEST_TOP_P: sampling.top_p,
        semconv.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        semconv.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
    }
    if sampling.top_k > 0:
        attributes[semconv.REQUEST_TOP_K] = sampling.top_k
    if sampling.max_tokens is not None:
        attributes[semconv.REQUEST_MAX_TOKENS] = sampling.max_tokens
    if sampling.seed is not None:
        attributes[semconv.REQUEST_SEED] = sampling.seed
    if sampling.stop:
        attributes[semconv.REQUEST_STOP_SEQUENCES] = list(sampling.stop)
    if inference.num_choices != 1:
        attributes[semconv.REQUEST_CHOICE_COUNT] = inference.num_choices
    if inference.prompts is not None:
        attributes[semconv.INPUT_MESSAGES] = msgspec.json.encode(_messages(inference.prompts)).decode()
    if inference.answers is not None and any(inference.answers):
        attributes[semconv.OUTPUT_MESSAGES] = msgspec.json.encode(_answers(inference, inference.answers)).decode()
    if inference.accepted_s is None:
        return attributes
    assert inference.response_id is not None
    attributes[semconv.RESPONSE_ID] = inference.response_id
    attributes[semconv.RESPONSE_MODEL] = inference.model
    attributes[semconv.USAGE_INPUT_TOKENS] = inference.num_prompt_tokens
    attributes[semconv.USAGE_OUTPUT_TOKENS] = inference.completion_tokens
    attributes[semconv.USAGE_CACHE_READ_INPUT_TOKENS] = inference.cached_tokens
    if inference.finishes:
        attributes[semconv.RESPONSE_FINISH_REASONS] = inference.finish_reasons
    if inference.stream and inference.first_output_s is not None:
        attributes[semconv.RESPONSE_TIME_TO_FIRST_CHUNK] = inference.first_output_s - record.started_s
    return attributes


def _messages(prompts: list[Prompt]) -> list[dict[str, object]]:
    """Prompts in the convention's form: a role and parts. Token ids have no text."""
    messages: list[dict[str, object]] = []
    for prompt in prompts:
        if isinstance(prompt, ChatPrompt):
            messages += [
                {"role": message["role"], "parts": [{"type": "text", "content": message.get("content")}]}
                for message in prompt.messages
            ]
        elif isinstance(prompt, TextPrompt):
            messages.append({"role": "user", "parts": [{"type": "text", "content": prompt.text}]})
    return messages


def _answers(inference: InferenceRecord, answers: list[list[str]]) -> list[dict[str, object]]:
    """What each choice gave, also one that broke off: as many as have spans."""
    return [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "".join(pieces)}],
            "finish_reason": _finish_reason(inference.finishes.get(index)),
        }
        for index, pieces in enumerate(answers[:MAX_CHOICES])
    ]


def _finish_reason(finish: Finish | None) -> str:
    """In the convention's words, of which none is for what was cut off."""
    return finish.reason if finish is not None and finish.reason in ("stop", "length") else "error"
