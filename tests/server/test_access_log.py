"""One line a request, whatever its end, and the id that clients and logs share."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_service import MakeService, Service
from structlog.testing import capture_logs

from mizzen.errors import RequestTooLong
from mizzen.ipc.messages import RequestRefused, TokenizeRequest

KEYS = ("first-key-of-nobody", "second-key-of-19-ch")
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SECRET = "the prompt that nobody may see"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}]}
Lines = list[Any]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Everything that is logged, as it grows."""
    with capture_logs() as captured:
        yield captured


def access(service: Service, lines: Lines, number: int = 1) -> list[dict[str, Any]]:
    """Waits for ``number`` access lines: the last may be written a moment after the client has its answer."""

    def found() -> list[dict[str, Any]]:
        return [line for line in list(lines) if line["event"] == "request"]

    service.backend.wait(lambda: len(found()) >= number)
    assert len(found()) == number
    return found()


def test_a_line_says_what_was_asked_and_what_it_took(make_service: MakeService, lines: Lines) -> None:
    service = make_service(api_keys=KEYS)
    headers = {"authorization": f"Bearer {KEYS[1]}", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    answer = service.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    [line] = access(service, lines)
    assert 0 < line.pop("ttft_s") <= line.pop("total_s") < 60
    assert line == {
        "event": "request",
        "log_level": "info",
        "method": "POST",
        "route": "/v1/chat/completions",
        "status": 200,
        "request_id": answer.json()["id"],
        "trace_id": TRACE_ID,
        "api_key": 2,
        "model": "tiny",
        "stream": False,
        "prompt_tokens": 7,
        "completion_tokens": 9,
        "cached_tokens": 4,
        "finish_reason": "stop",
    }
    assert not any(secret in str(lines) for secret in (*KEYS, SECRET))


def test_a_streamed_answer_has_its_line_when_it_has_ended(make_service: MakeService, lines: Lines) -> None:
    service = make_service()
    answer = service.complete(stream=True, max_tokens=3, n=2)
    assert answer.text.endswith("data: [DONE]\n\n")
    [line] = access(service, lines)
    assert (line["stream"], line["completion_tokens"], line["finish_reason"]) == (True, 6, "length")
    assert line["request_id"] == answer.headers["x-request-id"]


def test_a_client_that_leaves_has_a_line_with_what_the_engine_had_done(make_service: MakeService, lines: Lines) -> None:
    service = make_service(backend={"stall_after": 4})
    with httpx.stream("POST", f"{service.url}/v1/completions", json={"model": "tiny", "prompt": "Hi", "stream": True}):
        service.backend.wait(lambda: service.backend.open_choices)
    [line] = access(service, lines)
    assert (line["status"], line["error"], line["finish_reason"]) == (200, "client_disconnected", "abort")


def test_a_record_does_not_wait_for_an_engine_that_says_nothing(make_service: MakeService, lines: Lines) -> None:
    service = make_service(backend={"hold": True})
    with pytest.raises(httpx.ReadTimeout):
        service.http.post("/v1/chat/completions", json=CHAT, timeout=0.3)
    [line] = access(service, lines)
    assert (line["status"], line["error"]) == (499, "client_disconnected")
    assert "prompt_tokens" not in line


@pytest.mark.parametrize(
    ("request_", "status", "error"),
    [
        (("GET", "/nothing", None), 404, "not_found"),
        (("GET", "/v1/completions", None), 405, "method_not_allowed"),
        (("POST", "/v1/chat/completions", {**CHAT, "temperature": 9}), 400, "invalid_value"),
        (("POST", "/v1/chat/completions", {**CHAT, "model": "other"}), 404, "model_not_found"),
        (("POST", "/v1/chat/completions", {**CHAT, "n": 64}), 400, "invalid_value"),
    ],
)
def test_what_is_refused_has_a_line_too(
    service: Service, lines: Lines, request_: tuple[str, str, Any], status: int, error: str
) -> None:
    method, path, body = request_
    assert service.http.request(method, path, json=body).status_code == status
    [line] = access(service, lines)
    assert (line["status"], line["error"]) == (status, error)
    assert line.get("route") == (None if path == "/nothing" else path)


def test_what_the_tokenizer_refuses_has_a_line(make_service: MakeService, lines: Lines) -> None:
    def refuse(request: TokenizeRequest) -> RequestRefused:
        return RequestRefused(request.request_id, RequestTooLong(600, 512, param="messages").wire())

    service = make_service(backend={"refuse": refuse})
    assert service.chat().status_code == 400
    [line] = access(service, lines)
    assert (line["status"], line["error"]) == (400, "context_length_exceeded")


def test_a_wrong_key_has_a_line_without_it(make_service: MakeService, lines: Lines) -> None:
    service = make_service(api_keys=KEYS)
    answer = service.http.get("/v1/models", headers={"authorization": "Bearer a-wrong-key"})
    assert answer.status_code == 401
    [line] = access(service, lines)
    assert (line["status"], line["error"]) == (401, "invalid_api_key")
    assert "api_key" not in line
    assert "a-wrong-key" not in str(lines)


def test_probes_are_logged_for_those_who_debug(service: Service, lines: Lines) -> None:
    service.get("/health")
    service.get("/v1/models")
    probe, models = access(service, lines, 2)
    assert (probe["route"], probe["log_level"]) == ("/health", "debug")
    assert (models["route"], models["log_level"]) == ("/v1/models", "info")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nothing"])
def test_the_client_may_name_its_request(service: Service, lines: Lines, path: str) -> None:
    method, body = ("POST", CHAT) if "chat" in path else ("GET", None)
    answer = service.http.request(method, path, json=body, headers={"x-request-id": "my-7:a/b"})
    assert answer.headers["x-request-id"] == "my-7:a/b"
    [line] = access(service, lines)
    assert line["request_id"] == "my-7:a/b"
    if body is not None:
        assert line["response_id"] == answer.json()["id"]


@pytest.mark.parametrize("name", ["", "x" * 129, "two words", 'a"quote', "a,list"])
def test_a_name_that_could_forge_a_line_is_replaced(service: Service, name: str) -> None:
    answer = service.http.get("/v1/models", headers={"x-request-id": name})
    assert len(answer.headers["x-request-id"]) == 32
    assert answer.headers["x-request-id"] != name
