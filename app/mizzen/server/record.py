"""Where the server keeps a request's record: in the ASGI scope, from the gate to the routes.

The record itself is ``mizzen.observability.record``: what observes requests is below the server and cannot import it.
"""

import re
import time
import uuid
from collections.abc import Callable

from starlette.types import Scope

from mizzen.observability.record import InferenceRecord, Observer, RequestRecord

__all__ = ["InferenceRecord", "Observer", "RequestRecord", "open_record", "record_of"]

_KEY = "mizzen.record"
_VALID_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # else it could forge lines or bloat every log that quotes it
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-|$)")
_MAX_TRACE_HEADER = 512


def open_record(scope: Scope, emit: Callable[[RequestRecord], None]) -> RequestRecord:
    """The record of a request that begins now. Its id is the client's X-Request-Id if that is valid, else a new one."""
    headers = dict(scope["headers"])
    traceparent = _trace_header(headers, b"traceparent")
    parent = _TRACEPARENT.match(traceparent) if traceparent is not None else None
    request_id = headers.get(b"x-request-id", b"")
    named = _VALID_ID.fullmatch(request_id) is not None
    record = RequestRecord(
        method=scope["method"],
        path=scope["path"],
        request_id=request_id.decode() if named else uuid.uuid4().hex,
        started_s=time.monotonic(),
        emit=emit,
        named_by_client=named,
        traceparent=traceparent,
        tracestate=_trace_header(headers, b"tracestate"),
        trace_id=parent.group(1) if parent is not None else None,
    )
    scope[_KEY] = record
    return record


def record_of(scope: Scope) -> RequestRecord:
    record = scope[_KEY]
    assert isinstance(record, RequestRecord)
    return record


def _trace_header(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return value.decode("latin-1") if value is not None and len(value) <= _MAX_TRACE_HEADER else None
