"""What is wrong with a request is said in OpenAI's error body, naming the field; the next request works."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_service import MakeService, Service

from bad_requests import BAD_CHAT, BAD_COMPLETION, HI, INVALID_JSON, UNSUPPORTED

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _next_request_works(service: Service) -> Iterator[None]:
    service.backend.requests.clear()
    yield
    assert service.chat().status_code == 200
    assert service.in_flight == 0


def send(service: Service, content: bytes, path: str = CHAT) -> httpx.Response:
    return service.http.post(path, content=content)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("content", INVALID_JSON)
def test_invalid_json_is_refused(service: Service, content: bytes) -> None:
    error = error_of(send(service, content), 400)
    assert "JSON" in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("content", [b"[]", b'"x"', b"1", b"null"])
def test_json_that_is_no_object_is_refused(service: Service, content: bytes) -> None:
    assert "must be a JSON object" in error_of(send(service, content), 400)["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_know_are_refused(service: Service, number: str) -> None:
    content = json.dumps({"model": "tiny", "messages": HI, "temperature": 0}).replace("0}", number + "}")
    error_of(send(service, content.encode()), 400)


def test_a_lone_surrogate_is_refused(service: Service) -> None:
    content = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert "lone surrogate" in error_of(send(service, content), 400)["message"]


def test_an_unknown_model_is_not_found(service: Service) -> None:
    for response in (service.chat(model="gpt-4"), service.get("/v1/models/gpt-4")):
        error = error_of(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-4" in error["message"]


def test_an_unknown_route_and_method_are_refused_in_openai_s_shape(service: Service) -> None:
    assert error_of(service.post("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(service.get("/"), 404)["code"] == "not_found"
    response = service.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_chat_field_is_refused_by_name(
    service: Service, fields: dict[str, Any], param: str, stream: bool
) -> None:
    if stream and fields.keys() & {"stream", "stream_options"}:
        return
    error = error_of(service.chat(**({"stream": True} if stream else {}) | fields), 400)
    assert error["param"] == param
    assert param in error["message"] or fields.get("n") == 100
    assert not service.backend.requests


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION, ids=lambda value: str(value)[:60])
def test_a_bad_completion_field_is_refused_by_name(service: Service, fields: dict[str, Any], param: str) -> None:
    assert error_of(service.complete(**fields), 400)["param"] == param


def test_a_missing_field_is_named(service: Service) -> None:
    assert error_of(service.post(CHAT, model="tiny"), 400)["param"] == "messages"
    assert error_of(service.post(CHAT, messages=HI), 400)["param"] == "model"
    assert error_of(service.post("/v1/completions", model="tiny"), 400)["param"] == "prompt"


def test_a_typo_gets_the_right_name_suggested(service: Service) -> None:
    assert "did you mean 'max_tokens'" in error_of(service.chat(max_token=5), 400)["message"]


@pytest.mark.parametrize("fields", UNSUPPORTED, ids=lambda value: next(iter(value)))
def test_a_field_that_would_change_the_answer_is_refused_by_name(service: Service, fields: dict[str, Any]) -> None:
    (name,) = fields
    for response in (service.chat(**fields), service.complete(**fields)):
        error = error_of(response, 400)
        assert (error["param"], error["code"]) == (name, "unsupported_value")
        assert name in error["message"]


def test_fields_that_change_nothing_are_accepted(service: Service) -> None:
    harmless: dict[str, Any] = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"],
        "best_of": 2, "n": 2, "echo": False, "suffix": None, "audio": None, "logit_bias": {}, "stop": None,
        "temperature": None, "reasoning_effort": "low",
    }  # fmt: skip
    assert service.chat(**harmless).status_code == 200


def test_what_the_tokenizer_refuses_is_refused_before_a_stream_begins(make_service: MakeService) -> None:
    from mizzen.errors import RequestTooLong
    from mizzen.ipc.messages import RequestRefused

    too_long = RequestTooLong(600, 512, param="messages").wire()
    service = make_service(backend={"refuse": lambda request: RequestRefused(request.request_id, too_long)})
    for stream in (False, True):
        error = error_of(service.chat(stream=stream), 400)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert "600" in error["message"]
    assert service.in_flight == 0


def test_a_body_over_the_limit_is_refused(service: Service) -> None:
    content = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"x" * 50_000_000 + b'"}]}'
    error = error_of(send(service, content), 413)
    assert error["code"] == "request_too_large"
    assert "1000000" in error["message"]


def test_a_body_without_a_length_is_read_up_to_the_limit(service: Service) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(400):
            yield b"x" * 10_000

    error_of(service.http.post(CHAT, content=endless()), 413)


def test_a_huge_request_head_is_refused_with_our_body(service: Service) -> None:
    response = service.http.get("/v1/models", headers={"x-filler": "x" * 100_000})
    assert "head is over" in error_of(response, 400)["message"]


def test_garbage_that_is_not_http_is_refused_with_our_body(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
