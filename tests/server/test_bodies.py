"""Bodies are OpenAI's, to the key; a stream's events, joined, say what the whole body says."""

import json
from typing import Any

import httpx
import openai
import pytest
from api_service import MakeService, Service
from fake_backend import WORDS

TEXT = "".join(WORDS)
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": len(WORDS),
    "total_tokens": 7 + len(WORDS),
    "prompt_tokens_details": {"cached_tokens": 4},
}


def events(response: httpx.Response) -> list[Any]:
    """The stream's events; checks its framing and its end."""
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def without_identity(body: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Checks and removes what differs from request to request."""
    assert body.pop("id").startswith(prefix)
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint").startswith("fp_")
    return body


def test_a_chat_completion_has_exactly_openai_s_body(service: Service) -> None:
    response = service.chat()
    assert response.headers["x-request-id"] == response.json()["id"]
    assert response.headers["content-type"] == "application/json"
    assert "server" not in response.headers
    assert without_identity(response.json(), "chatcmpl-") == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_a_text_completion_has_exactly_openai_s_body(service: Service) -> None:
    assert without_identity(service.complete(max_tokens=2).json(), "cmpl-") == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE | {"completion_tokens": 2, "total_tokens": 9},
    }


def test_a_chat_stream_has_exactly_openai_s_chunks(service: Service) -> None:
    chunks = events(service.chat(stream=True, max_tokens=2, model="org/alias"))
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    base = {"object": "chat.completion.chunk", "model": "org/alias"}

    def choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return base | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}

    assert [without_identity(chunk, "chatcmpl-") for chunk in chunks] == [
        choice({"role": "assistant", "content": "", "refusal": None}),
        choice({"content": "Hello"}),
        choice({"content": " world"}),
        choice({}, "length"),
    ]


def test_a_text_stream_has_exactly_openai_s_chunks(service: Service) -> None:
    base = {"object": "text_completion", "model": "tiny"}
    chunks = [without_identity(chunk, "cmpl-") for chunk in events(service.complete(stream=True, max_tokens=1))]
    assert chunks == [
        base | {"choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": None}]},
        base | {"choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]},
    ]


def test_include_usage_adds_a_last_chunk_and_null_usage_elsewhere(service: Service) -> None:
    chunks = events(service.chat(stream=True, stream_options={"include_usage": True}))
    assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == USAGE
    plain = events(service.chat(stream=True, stream_options={"include_usage": False}))
    assert not any("usage" in chunk for chunk in plain)


def test_continuous_usage_counts_up(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(service.complete(stream=True, max_tokens=3, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 3, 3]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {7}


@pytest.mark.parametrize("request_fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 4}])
def test_a_chat_stream_says_what_the_whole_body_says(service: Service, request_fields: dict[str, Any]) -> None:
    whole = service.chat(**request_fields).json()
    n = request_fields.get("n", 1)
    texts, reasons, logprobs = [""] * n, [None] * n, [[] for _ in range(n)]
    for chunk in events(service.chat(stream=True, **request_fields)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        reasons[choice["index"]] = choice["finish_reason"]
        if choice["logprobs"]:
            logprobs[choice["index"]] += choice["logprobs"]["content"]
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert logprobs == [(choice["logprobs"] or {"content": []})["content"] for choice in whole["choices"]]


def test_chat_logprobs_have_token_bytes_and_alternatives(service: Service) -> None:
    choice = service.chat(logprobs=True, top_logprobs=2, max_tokens=1).json()["choices"][0]
    hello = {"token": "Hello", "logprob": -0.25, "bytes": list(b"Hello")}
    # JSON has no minus infinity: OpenAI's floor is -9999.
    other = {"token": "other", "logprob": -9999.0, "bytes": list(b"other")}
    assert choice["logprobs"] == {"content": [hello | {"top_logprobs": [hello, other]}], "refusal": None}


def test_completion_logprobs_have_offsets_into_the_text(service: Service) -> None:
    expected = {
        "tokens": ["Hello", " world"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"Hello": -0.25}, {" world": -0.25}],
        "text_offset": [0, 5],
    }
    assert service.complete(logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"] == expected
    # The sampled token is among the alternatives even if none was asked for.
    assert service.complete(logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"] == expected
    chunks = events(service.complete(logprobs=1, max_tokens=2, stream=True))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:-1]] == [[0], [5]]


def test_several_prompts_and_n_give_choices_by_index(service: Service) -> None:
    body = service.complete(prompt=["a", "b"], n=2, max_tokens=1).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    # A prompt counts once, however many answers it gets.
    assert body["usage"]["prompt_tokens"] == 14
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
    chunks = events(service.complete(prompt=["a", "b"], n=2, max_tokens=1, stream=True))
    assert sorted(c["choices"][0]["index"] for c in chunks) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_chat_choice_without_text_still_has_its_role_and_end(make_service: MakeService) -> None:
    service = make_service(backend={"words": ("",)})
    chunks = events(service.chat(stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": "", "refusal": None}, {}]
    assert service.chat().json()["choices"][0]["message"]["content"] == ""


def test_token_ids_are_returned_on_request(service: Service) -> None:
    assert service.chat(return_token_ids=True, max_tokens=3).json()["choices"][0]["token_ids"] == [1, 2, 3]
    chunks = events(service.complete(return_token_ids=True, max_tokens=2, stream=True))
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [[1], [2], None]
    assert "token_ids" not in service.chat().json()["choices"][0]


def test_models_are_listed_and_found_by_ids_with_slashes(service: Service) -> None:
    listed = service.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "org/alias"]
    card = service.get("/v1/models/org/alias").json()
    assert card == listed["data"][1]
    assert card == {
        "id": "org/alias",
        "object": "model",
        "created": card["created"],
        "owned_by": "mizzen",
        "max_model_len": 512,
    }
    assert service.get("/v1/models/org%2Falias").json() == card


def test_doubled_and_trailing_slashes_are_tolerated(service: Service) -> None:
    assert service.get("/v1//models/").json()["object"] == "list"
    assert service.post("/v1//completions", model="tiny", prompt="x").status_code == 200


def test_the_openai_client_works_unchanged(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=1)
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].logprobs is not None
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 4
        assert answer._request_id == answer.id
        with client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
        assert chunks[-1].usage is not None
        assert client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=1).choices[0].text == "Hello"
        assert [model.id for model in client.models.list()] == ["tiny", "org/alias"]
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-4", messages=messages)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=messages, temperature=5)
        assert refused.value.param == "temperature"


def test_openapi_describes_the_requests(service: Service) -> None:
    document = service.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    assert "max_completion_tokens" in document["components"]["schemas"][name]["properties"]
    assert service.get("/docs").status_code == 404
