"""One line a request, when it has ended: what an operator greps for. No text of prompts, no key: only its number."""

from typing import Any

import structlog

from mizzen.observability.record import InferenceRecord, RequestRecord

# A line a probe and a scrape would drown the others.
_DEBUG_ROUTES = frozenset({"/health", "/health/ready", "/health/live", "/health/startup", "/metrics"})

log = structlog.get_logger("mizzen.access")


class AccessLog:
    """An observer of records. After tracing, which gives the record its trace id."""

    def __init__(self) -> None:
        self._log = log.bind()  # once, not with every line

    def on_request_end(self, record: RequestRecord) -> None:
        write = self._log.debug if record.route in _DEBUG_ROUTES else self._log.info
        write("request", **fields(record))


def fields(record: RequestRecord) -> dict[str, Any]:
    """The line's fields; those that say nothing are left out. Times in seconds."""
    inference = record.inference
    line: dict[str, Any] = {
        "method": record.method,
        "route": record.route or None,
        "status": record.status,
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "total_s": round(record.ended_s - record.started_s, 6),
        "error": record.error_type,
        "api_key": record.api_key,
    }
    if inference is not None:
        line["model"] = inference.model
        line["stream"] = inference.stream
        if inference.response_id != record.request_id:
            line["response_id"] = inference.response_id
        if inference.accepted_s is not None:
            line["prompt_tokens"] = inference.num_prompt_tokens
            line["completion_tokens"] = inference.completion_tokens
            line["cached_tokens"] = inference.cached_tokens
        line["queue_s"] = _queued(inference)
        if inference.first_output_s is not None:
            line["ttft_s"] = round(inference.first_output_s - record.started_s, 6)
        if inference.finishes:
            line["finish_reason"] = ",".join(dict.fromkeys(inference.finish_reasons))
    return {name: value for name, value in line.items() if value is not None}


def _queued(inference: InferenceRecord) -> float | None:
    """How long the engine let the request wait: the first of its choices to be scheduled. None if none was."""
    waits = [
        times.scheduled_s - times.queued_s
        for times in (finish.timings for finish in inference.finishes.values())
        if times.scheduled_s is not None and times.queued_s is not None
    ]
    return round(min(waits), 6) if waits else None
