"""A request becomes prompts and SamplingParams here, and nowhere else. All that needs no tokenizer is checked here."""

import array
from typing import Any

import msgspec

from mizzen.errors import InvalidRequest, UnsupportedField
from mizzen.ipc.messages import ChatPrompt, ModelInfo, Prompt, TextPrompt, TokenPrompt
from mizzen.sampling_params import MAX_LOGPROBS, SamplingParams
from mizzen.server.protocol import ChatRequest, CompletionRequest, Message

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for text completions; a chat answer may fill the context
_SAMPLED = ("n", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "min_tokens", "ignore_eos",
            "include_stop_str_in_output", "skip_special_tokens")  # fmt: skip
_MODEL_DEFAULTS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
_PRIORITY_LIMIT = 2**31
_MAX_DEPTH = 32  # of what is handed to a chat template: far below what any process's decoder takes


class Job(msgspec.Struct, frozen=True):
    """What one HTTP request asks of the engine, and how it wants the answer."""

    prompts: list[Prompt]
    sampling: SamplingParams
    model: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str | None
    return_token_ids: bool

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.sampling.n


def chat_job(request: ChatRequest, model: ModelInfo) -> Job:
    """Raises InvalidRequest naming the field."""
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
        if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"'top_logprobs' must be between 0 and {MAX_LOGPROBS}, not {request.top_logprobs}", param="top_logprobs"
            )
    # OpenAI's newer name wins over the older one; the error names the one that was used.
    limit_field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = getattr(request, limit_field)
    _check_limit(limit, limit_field)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = _sampling(request, model, max_tokens=limit, logprobs=logprobs)
    return _job(request, [_chat_prompt(request)], sampling)


def completion_job(request: CompletionRequest, model: ModelInfo) -> Job:
    """Raises InvalidRequest naming the field."""
    _check_limit(request.max_tokens, "max_tokens")
    limit = request.max_tokens
    if limit is None:
        limit = max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
    sampling = _sampling(request, model, max_tokens=limit, logprobs=request.logprobs)
    return _job(request, _completion_prompts(request.prompt, model.vocab_size), sampling)


def _job(request: ChatRequest | CompletionRequest, prompts: list[Prompt], sampling: SamplingParams) -> Job:
    stream = bool(request.stream)
    options = request.stream_options
    if options is not None and not stream:
        raise InvalidRequest("'stream_options' needs 'stream' to be true", param="stream_options")
    priority = request.priority or 0
    if not -_PRIORITY_LIMIT <= priority < _PRIORITY_LIMIT:
        raise InvalidRequest("'priority' must fit in 32 bits", param="priority")
    return Job(
        prompts=prompts,
        sampling=sampling,
        model=request.model,
        stream=stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        priority=priority,
        cache_salt=request.cache_salt or None,
        return_token_ids=bool(request.return_token_ids),
    )


def _check_limit(limit: int | None, field: str) -> None:
    if limit is not None and not 1 <= limit < 2**62:
        raise InvalidRequest(f"'{field}' must be at least 1 and below 2**62, not {limit}", param=field)


def _sampling(
    request: ChatRequest | CompletionRequest, model: ModelInfo, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The request's word, else the model's generation_config, else SamplingParams' default."""
    fields: dict[str, Any] = {name: value for name in _SAMPLED if (value := getattr(request, name)) is not None}
    for name, kind in _MODEL_DEFAULTS.items():
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
        elif name in model.default_sampling:
            fields[name] = kind(model.default_sampling[name])
    stop = request.stop
    sampling = SamplingParams(
        **fields,
        max_tokens=max_tokens,
        logprobs=logprobs,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
    )
    sampling.validate(model.vocab_size)
    return sampling


def _chat_prompt(request: ChatRequest) -> ChatPrompt:
    messages = request.messages
    if not messages:
        raise InvalidRequest("'messages' is empty: at least one message is needed", param="messages")
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' exclude each other", param="continue_final_message"
        )
    if continues and messages[-1].role != "assistant":
        raise InvalidRequest(
            "'continue_final_message' needs a last message of role 'assistant'", param="continue_final_message"
        )
    template_kwargs = dict(request.chat_template_kwargs or {})
    _check_plain(template_kwargs, "chat_template_kwargs")
    if request.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return ChatPrompt([_message(m, i) for i, m in enumerate(messages)], adds, continues, template_kwargs)


def _message(message: Message, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if message.audio is not None:
        raise UnsupportedField(f"{where}.audio")
    if message.function_call is not None:
        raise UnsupportedField(f"{where}.function_call")
    content: str | list[dict[str, str]] | None
    if isinstance(message.content, list):  # the chat template decides whether it wants parts or one text
        texts = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content)]
        content = [{"type": "text", "text": text} for text in texts]
    else:
        content = message.content
    if content is None and message.role != "assistant":
        raise InvalidRequest(f"'{where}.content' may be null only for the role 'assistant'", param=f"{where}.content")
    _check_plain(message.tool_calls, f"{where}.tool_calls")
    fields = {
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "reasoning": message.reasoning,
        "reasoning_content": message.reasoning_content,
    }
    said = {name: value for name, value in fields.items() if value}
    return {"role": message.role, "content": content, **said}


def _text_part(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind != "text":
        raise UnsupportedField(f"{where}.type", f"must be 'text': parts of type {kind!r:.40} are not supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{where}.text' must be a string", param=f"{where}.text")
    return text


def _check_plain(value: Any, where: str) -> None:
    """Free JSON must survive the way to the tokenizer: bounded depth, integers of 64 bits."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(item, int) and not -(2**63) <= item < 2**63 for item in level):
            raise InvalidRequest(f"'{where}' has an integer of over 64 bits", param=where)
        nested = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in nested for item in items]
        if not level:
            return
    raise InvalidRequest(f"'{where}' is nested over {_MAX_DEPTH} levels deep", param=where)


def _completion_prompts(prompt: str | list[Any], vocab_size: int) -> list[Prompt]:
    """A string, strings, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [_text_prompt(prompt, "prompt")]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [_token_prompt(prompt, "prompt", vocab_size)]
    if kinds == {str}:
        return [_text_prompt(text, f"prompt[{i}]") for i, text in enumerate(prompt)]
    if kinds == {list}:
        return [_token_prompt(ids, f"prompt[{i}]", vocab_size) for i, ids in enumerate(prompt)]
    if not kinds:
        raise InvalidRequest("'prompt' is empty", param="prompt")
    raise InvalidRequest("'prompt' mixes strings, token ids and lists", param="prompt")


def _text_prompt(text: str, where: str) -> TextPrompt:
    if not text:
        raise InvalidRequest(f"'{where}' is empty", param="prompt")
    return TextPrompt(text)


def _token_prompt(token_ids: list[int], where: str, vocab_size: int) -> TokenPrompt:
    if not token_ids:
        raise InvalidRequest(f"'{where}' is empty", param="prompt")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"'{where}' has token id {wrong}, but ids are 0 to {vocab_size - 1}", param="prompt")
    return TokenPrompt(array.array("i", token_ids).tobytes())
