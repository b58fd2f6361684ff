"""Bad input against the whole service: refused by name, and neither a process nor a page nor a request is lost."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bad_requests import BAD_CHAT, BAD_COMPLETION, INVALID_JSON, UNSUPPORTED
from service.running import Server

CONTEXT = 2048  # the shared server's MIZZEN_MAX_MODEL_LEN
# What only the model's vocabulary or context makes wrong: larger here than in the api's own tests.
BY_VOCABULARY: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [49_152]}, "prompt"),
    ({"prompt": [[5, 2**31 - 1]]}, "prompt"),
    ({"stop_token_ids": [49_152]}, "stop_token_ids"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_lost(server: Server) -> Iterator[None]:
    before = server.pids()
    yield
    assert server.pids() == before, "a process died"
    assert server.wait_idle()["kv_pages_used"] == 0
    assert server.chat().json()["choices"][0]["message"]["content"] == "The capital of France is Paris."


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def small_vocabulary(fields: dict[str, Any]) -> bool:
    """The api's tests have a vocabulary of under 1,000 tokens; here those token ids are right."""
    return fields in ({"logit_bias": {"1000": 1}}, {"prompt": [1000]})


@pytest.mark.parametrize("fields", [fields for fields, _ in BAD_CHAT if not small_vocabulary(fields)], ids=str)
def test_a_bad_chat_field_is_refused_by_name(server: Server, fields: dict[str, Any]) -> None:
    if fields == {"n": 100}:
        assert refused(server.chat(n=10_000))["param"] == "n"
        return
    param = next(param for other, param in BAD_CHAT if other is fields)
    for stream in (
        {fields.get("stream", False), True} if "stream_options" not in fields else {fields.get("stream", False)}
    ):
        assert refused(server.chat(**{"stream": stream, **fields}))["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [*((fields, param) for fields, param in BAD_COMPLETION if not small_vocabulary(fields)), *BY_VOCABULARY],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_completion_field_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    assert refused(server.complete(**fields))["param"] == param


@pytest.mark.parametrize("fields", UNSUPPORTED, ids=lambda value: next(iter(value)))
def test_an_unsupported_field_is_refused_by_name(server: Server, fields: dict[str, Any]) -> None:
    assert refused(server.chat(**fields))["param"] == next(iter(fields))


def test_invalid_json_and_surrogates_and_huge_bodies(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    for content in INVALID_JSON:
        refused(httpx.post(url, content=content))
    refused(httpx.post(url, content=b'{"model":"test-model","messages":[{"role":"user","content":"\\udc80"}]}'))
    error = refused(httpx.post(url, content=b'{"model": "' + b"x" * 50_000_000, timeout=60), 413)
    assert error["code"] == "request_too_large"
    assert refused(server.chat(model="gpt-4"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_names_both_numbers(server: Server, stream: bool) -> None:
    error = refused(server.complete([5] * CONTEXT, stream=stream))
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert error["param"] == "prompt"
    error = refused(server.chat("word " * 3000, stream=stream))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(CONTEXT) in error["message"]


def test_a_prompt_one_token_short_of_the_context_gets_one_token(server: Server) -> None:
    answer = server.complete([5] * (CONTEXT - 1), max_tokens=10**9, ignore_eos=True).json()
    assert answer["usage"] == {
        "prompt_tokens": CONTEXT - 1,
        "completion_tokens": 1,
        "total_tokens": CONTEXT,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_huge_max_tokens_is_clamped_to_the_context(server: Server) -> None:
    answer = server.complete([5] * (CONTEXT - 4), max_tokens=2**40, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 4


def test_every_sampling_extreme_is_served(server: Server) -> None:
    for fields in (
        {"temperature": 2, "top_p": 1e-9},
        {"temperature": 1e-5},
        {"temperature": 1, "top_k": 10**6},
        {"temperature": 1, "top_k": 1, "min_p": 1.0},
        {"temperature": 1, "repetition_penalty": 10, "frequency_penalty": 2, "presence_penalty": -2},
        {"temperature": 1, "logit_bias": {str(token): -100 for token in range(300)}},
        {"temperature": 1, "seed": -(2**63)},
        {"temperature": 1, "stop": ["\U0001f600", "a" * 1000]},
        {"temperature": 0, "logprobs": 20, "min_tokens": 5, "max_tokens": 5},
    ):
        answer = server.complete(**{"max_tokens": 6, **fields})
        assert answer.status_code == 200, (fields, answer.text)
        assert json.loads(answer.text)["choices"][0]["finish_reason"] in ("length", "stop")
