"""What a request may say. Types are strict; a field that is not listed here is refused, never ignored.

Fields that other servers know and this one does not are listed in ``UNSUPPORTED`` with the values that change nothing:
those pass, others are refused by name. ``HARMLESS`` fields never change an answer and are accepted with any value.
"""

import difflib
import re
from typing import Any, Literal

import msgspec

from mizzen.errors import InvalidRequest, UnsupportedField

# Accepted and ignored: they identify, bill, store or hint, but do not change the answer.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "rid", "session_id",
)  # fmt: skip

# Field -> values (beside null) that ask for nothing. Everything else would change the answer: 400.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "verbosity": ("medium",), "web_search_options": (), "moderation": (),
    "structured_outputs": (), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "structural_tag": (), "json_schema": (),
    "regex": (), "ebnf": (), "stop_regex": (), "no_stop_trim": (False,),
    "echo": (False,), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1.0,),
    "early_stopping": (False,), "prompt_logprobs": (), "allowed_token_ids": (), "bad_words": ([],),
    "truncate_prompt_tokens": (), "thinking_token_budget": (), "include_reasoning": (True,),
    "separate_reasoning": (True,), "stream_reasoning": (True,), "chat_template": (), "documents": (),
    "add_special_tokens": (), "spaces_between_special_tokens": (True,), "mm_processor_kwargs": (),
    "repetition_detection": (), "logits_processors": (), "custom_logit_processor": (), "custom_params": (),
    "lora_path": (), "input_ids": (), "prompt_embeds": (), "return_hidden_states": (False,), "stream_interval": (1,),
    "vllm_xargs": (), "kv_transfer_params": (),
}  # fmt: skip


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage so far in every chunk: what load generators ask for
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis: never sent


class _Request(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions share. None: the request does not say."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message. What a chat template may use is passed on to it; ``annotations`` and ``refusal`` are not."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class _Chat(_Request, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None  # handed to the chat template, which may or may not know it
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Completion(_Request, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


# The tables become optional fields, so that one strict decode tells the known from the unknown.
_EXTRA: list[Any] = [(name, Any, None) for name in (*HARMLESS, *UNSUPPORTED)]
_ChatDecoded: Any = msgspec.defstruct(
    "ChatCompletionRequest", _EXTRA, bases=(_Chat,), kw_only=True, forbid_unknown_fields=True
)
_CompletionDecoded: Any = msgspec.defstruct(
    "CompletionRequest", _EXTRA, bases=(_Completion,), kw_only=True, forbid_unknown_fields=True
)
_decode_chat = msgspec.json.Decoder(_ChatDecoded).decode
_decode_completion = msgspec.json.Decoder(_CompletionDecoded).decode

ChatRequest = _Chat
CompletionRequest = _Completion

_PATH = re.compile(r"`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


def parse_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest or UnsupportedField, naming the field."""
    request: ChatRequest = _decode(_decode_chat, body, _ChatDecoded)
    _refuse_unsupported(request)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest or UnsupportedField, naming the field."""
    request: CompletionRequest = _decode(_decode_completion, body, _CompletionDecoded)
    _refuse_unsupported(request)
    return request


def schemas() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """JSON schemas for /openapi.json: of a chat request, of a completion request, and their shared components."""
    (chat, completion), components = msgspec.json.schema_components(
        [_ChatDecoded, _CompletionDecoded], ref_template="#/components/schemas/{name}"
    )
    return chat, completion, components


def _decode(decode: Any, body: bytes, kind: Any) -> Any:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        why = "a lone surrogate in a string" if _LONE_SURROGATE.search(body) else str(error)
        raise InvalidRequest(f"The body is not valid JSON: {why}") from None
    except RecursionError:
        raise InvalidRequest("The body is not valid JSON: nested too deeply") from None


def _explain(text: str, kind: Any) -> InvalidRequest:
    """Turns the decoder's words into a message that starts with the field's name, and that name."""
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    what = text.split(" - at ")[0]
    if unknown := _UNKNOWN.search(text):
        name = unknown.group(1)
        message = (
            f"Unrecognized request argument: '{path}.{name}'" if path else f"Unrecognized request argument: '{name}'"
        )
        near = [] if path else difflib.get_close_matches(name, kind.__struct_fields__, n=1, cutoff=0.75)
        return InvalidRequest(message + (f" (did you mean '{near[0]}'?)" if near else ""), param=_join(path, name))
    if missing := _MISSING.search(text):
        name = _join(path, missing.group(1))
        return InvalidRequest(f"'{name}' is required", param=name)
    if not path:
        return InvalidRequest(f"The body must be a JSON object: {what}")
    return InvalidRequest(f"'{path}': {what[:1].lower()}{what[1:]}", param=path)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_unsupported(request: _Request) -> None:
    for name, allowed in UNSUPPORTED.items():
        value = getattr(request, name)
        if value is None or value in allowed:
            continue
        if name == "best_of" and value == request.n:  # the best n of n: all of them
            continue
        if name == "response_format" and isinstance(value, dict) and value.get("type") == "text":
            continue
        raise UnsupportedField(name)
