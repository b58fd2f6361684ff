"""What is wrong with a request is said in OpenAI's error body, naming the field; the next request works."""

import functools
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_service import MakeService, Service

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"hello",
        b'{"model": "tiny",}',
        b'{"model": "tiny", "messages": []} x',
        b"\xff\xfe{}",
        b'{"chat_template_kwargs": {"x": ' + b"[" * 100_000,
    ],
)
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


NESTED: Any = functools.reduce(lambda inner, _: [inner], range(300), [])
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*HI, {"role": "user", "contents": "Hi"}]}, "messages[1].contents"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"chat_template_kwargs": {"a": 2**64}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": NESTED}}, "chat_template_kwargs"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"a": NESTED}]}]}, "messages[0].tool_calls"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_token": 5}, "max_token"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 10_000}, "n"),
    ({"n": 100}, "n"),  # allowed in itself, but more than this service can ever hold
    ({"seed": 2**70}, "seed"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": {"hello": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    ({"priority": 2**40}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


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


BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [1000]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[1, 2], [10**20]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a"] * 1000}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": HI}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION, ids=lambda value: str(value)[:60])
def test_a_bad_completion_field_is_refused_by_name(service: Service, fields: dict[str, Any], param: str) -> None:
    assert error_of(service.complete(**fields), 400)["param"] == param


def test_a_missing_field_is_named(service: Service) -> None:
    assert error_of(service.post(CHAT, model="tiny"), 400)["param"] == "messages"
    assert error_of(service.post(CHAT, messages=HI), 400)["param"] == "model"
    assert error_of(service.post("/v1/completions", model="tiny"), 400)["param"] == "prompt"


def test_a_typo_gets_the_right_name_suggested(service: Service) -> None:
    assert "did you mean 'max_tokens'" in error_of(service.chat(max_token=5), 400)["message"]


UNSUPPORTED: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}}, {"functions": [{"name": "f"}]}, {"modalities": ["text", "audio"]},
    {"audio": {"voice": "x"}}, {"prediction": {"type": "content"}}, {"structured_outputs": {"regex": "x"}},
    {"guided_json": {}}, {"guided_regex": "a"}, {"regex": "a"}, {"ebnf": "a"}, {"best_of": 2}, {"echo": True},
    {"suffix": "x"}, {"prompt_logprobs": 1}, {"chat_template": "x"}, {"documents": [{}]},
]  # fmt: skip


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
