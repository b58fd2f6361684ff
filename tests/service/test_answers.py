"""The running appliance, asked by clients as they are."""

import concurrent.futures
import random
import time
from typing import Any

import openai
import pytest

from service.running import Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_the_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="test-model", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 8)


def test_the_stream_says_the_same_piece_by_piece(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="test-model", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "The capital of France is Paris."
    assert len(chunks) > 6
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert {chunk.model for chunk in chunks} == {"test-model"}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 1.1, "seed": 4, "top_p": 0.9, "extra_body": {"top_k": 40, "repetition_penalty": 1.1}},
        {"temperature": 0.8, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.8, "seed": 6, "extra_body": {"min_p": 0.1}, "stop": ["the", "\n"]},
    ],
)
def test_streamed_equals_whole(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    ask = {"model": "test-model", "prompt": "Écrivez une histoire 🐈 of a cat:", "max_tokens": 60, **sampling}
    whole = client.completions.create(**ask)
    pieces = list(client.completions.create(**ask, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(whole.choices[0].text) > 3 or whole.choices[0].finish_reason == "stop"


def test_two_choices_with_a_seed_equal_two_requests(client: openai.OpenAI) -> None:
    ask = {"model": "test-model", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0}
    both = client.completions.create(**ask, n=2, seed=11)
    texts = [choice.text for choice in sorted(both.choices, key=lambda choice: choice.index)]
    assert texts == [client.completions.create(**ask, seed=seed).choices[0].text for seed in (11, 12)]
    assert texts[0] != texts[1]


def test_unseeded_requests_differ(client: openai.OpenAI) -> None:
    ask = {"model": "test-model", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0}
    assert len({client.completions.create(**ask).choices[0].text for _ in range(4)}) > 1


def test_lists_of_prompts_and_token_ids(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "test-model", "max_tokens": 8, "temperature": 0}
    alone = [client.completions.create(prompt=p, **ask).choices[0].text for p in ("The capital of", "Two plus two is")]
    together = client.completions.create(prompt=["The capital of", "Two plus two is"], **ask)
    assert [choice.text for choice in together.choices] == alone
    ids = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    tokens = client.completions.create(prompt=[ids, ids], **ask)
    assert len({choice.text for choice in tokens.choices}) == 1
    assert "Paris" in tokens.choices[0].text


def test_logprobs_are_those_of_the_greedy_path(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="test-model", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content).startswith("The capital of France is Paris.")
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token


def test_logit_bias_and_min_tokens_and_stop_token_ids(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "test-model", "messages": QUESTION, "temperature": 0}
    banned = client.chat.completions.create(**ask, logit_bias={"7042": -100}, max_tokens=10)
    assert "Paris" not in (banned.choices[0].message.content or "")
    longer = client.chat.completions.create(**ask, extra_body={"min_tokens": 20}, max_tokens=24)
    assert longer.usage is not None
    assert longer.usage.completion_tokens >= 20
    stopped = client.chat.completions.create(**ask, extra_body={"stop_token_ids": [7042]})
    assert stopped.choices[0].message.content == "The capital of France is"
    assert stopped.choices[0].finish_reason == "stop"


def test_of_64_streams_the_later_ones_hit_the_prefix_that_earlier_ones_computed(server: Server) -> None:
    system = {"role": "system", "content": "You answer in one short sentence. " * 20}

    def ask(number: int) -> list[dict[str, Any]]:
        time.sleep(number * 0.03 + random.random() * 0.02)
        question = {"role": "user", "content": f"Name the number {number}."}
        options = {"stream_options": {"include_usage": True}, "max_tokens": 12}
        return list(server.stream("/v1/chat/completions", messages=[system, question], **options))

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        streams = list(pool.map(ask, range(64)))
    for *_, finish, _ in streams:
        assert finish["choices"][0]["finish_reason"] in ("stop", "length")
    cached = [stream[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] for stream in streams]
    assert sum(count >= 112 for count in cached[8:]) >= 48, cached
    server.wait_idle()


def test_no_page_is_held_when_idle(server: Server) -> None:
    server.complete(max_tokens=40)
    server.wait_idle()
    _, body = server.health()
    assert body["status"] == "ok"
