"""Requests that must be refused, with the field that the error must name: for the api alone, and the whole service."""

import functools
from typing import Any

HI = [{"role": "user", "content": "Hi"}]
INVALID_JSON = [
    b"",
    b"{",
    b"hello",
    b'{"model": "tiny",}',
    b'{"model": "tiny", "messages": []} x',
    b"\xff\xfe{}",
    b'{"chat_template_kwargs": {"x": ' + b"[" * 100_000,
]

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

UNSUPPORTED: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}}, {"functions": [{"name": "f"}]}, {"modalities": ["text", "audio"]},
    {"audio": {"voice": "x"}}, {"prediction": {"type": "content"}}, {"structured_outputs": {"regex": "x"}},
    {"guided_json": {}}, {"guided_regex": "a"}, {"regex": "a"}, {"ebnf": "a"}, {"best_of": 2}, {"echo": True},
    {"suffix": "x"}, {"prompt_logprobs": 1}, {"chat_template": "x"}, {"documents": [{}]},
]  # fmt: skip
