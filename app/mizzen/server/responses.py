"""OpenAI's bodies, whole and streamed. A stream's events, joined, say the same as the whole body.

A stream's constant bytes are encoded once a request: an event is a prefix, the escaped text and a suffix.
"""

import time
from typing import Any, Literal

import msgspec

from mizzen.errors import WireError
from mizzen.ipc.messages import Delta, Finish, TokenLogprob
from mizzen.server.convert import Job

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
Kind = Literal["chat", "completion"]


class Header(msgspec.Struct, frozen=True):
    """The fields that open every body and every chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def make_header(kind: Kind, request_id: str, model: str, fingerprint: str) -> Header:
    prefix = "chatcmpl" if kind == "chat" else "cmpl"
    return Header(f"{prefix}-{request_id}", int(time.time()), model, fingerprint)


def error_event(error: WireError) -> bytes:
    """The last event of a stream that failed. No [DONE] follows: it would make half an answer look like a whole one."""
    return b"data: " + encode(error.body()) + b"\n\n"


class Usage:
    """Sums the tokens of a request: a prompt counts once, however many answers it gets."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self._n = n
        self._prompt = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._completion = 0

    def finish(self, index: int, finish: Finish) -> None:
        prompt, choice = divmod(index, self._n)
        self._prompt[prompt] = finish.prompt_tokens
        if choice == 0:  # the others find the prompt that the first one left in the cache
            self._cached[prompt] = finish.cached_tokens
        self._completion += finish.completion_tokens

    def body(self) -> dict[str, Any]:
        prompt = sum(self._prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }


# ---- logprobs ----


def chat_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                "token": token.text,
                "logprob": _finite(token.logprob),
                "bytes": list(token.raw),
                "top_logprobs": [
                    {"token": text, "logprob": _finite(logprob), "bytes": list(raw)} for text, raw, logprob in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: list[TokenLogprob], offset: int) -> dict[str, Any]:
    """``offset``: where the first token's text begins in the answer, in characters."""
    offsets = []
    tops = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
        # As OpenAI does: the sampled token is always there, beside the N most likely ones.
        top = {text: _finite(logprob) for text, _, logprob in token.top}
        top.setdefault(token.text, _finite(token.logprob))
        tops.append(top)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


# ---- whole ----


class WholeAnswer:
    """Collects the deltas of all choices of a request that does not stream."""

    def __init__(self, kind: Kind, job: Job) -> None:
        self._kind = kind
        self._job = job
        self._texts: list[list[str]] = [[] for _ in range(job.num_choices)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(job.num_choices)]
        self._token_ids: list[list[int]] = [[] for _ in range(job.num_choices)]
        self._reasons: list[str | None] = [None] * job.num_choices
        self._usage = Usage(len(job.prompts), job.sampling.n)
        self._unfinished = job.num_choices

    def add(self, deltas: list[Delta]) -> bool:
        """True once every choice has finished."""
        for delta in deltas:
            self._texts[delta.index].append(delta.text)
            self._logprobs[delta.index] += delta.logprobs
            self._token_ids[delta.index] += delta.token_ids
            if delta.finish is not None:
                self._reasons[delta.index] = delta.finish.reason
                self._usage.finish(delta.index, delta.finish)
                self._unfinished -= 1
        return self._unfinished == 0

    def body(self, header: Header) -> bytes:
        return encode(
            {
                "id": header.id,
                "object": "chat.completion" if self._kind == "chat" else "text_completion",
                "created": header.created,
                "model": header.model,
                "choices": [self._choice(index) for index in range(self._job.num_choices)],
                "usage": self._usage.body(),
                "system_fingerprint": header.system_fingerprint,
            }
        )

    def _choice(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts[index])
        wants_logprobs = self._job.sampling.logprobs is not None
        choice: dict[str, Any] = {"index": index}
        if self._kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            choice["logprobs"] = chat_logprobs(self._logprobs[index]) if wants_logprobs else None
        else:
            choice["text"] = text
            choice["logprobs"] = completion_logprobs(self._logprobs[index], 0) if wants_logprobs else None
        choice["finish_reason"] = self._reasons[index]
        if self._job.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
        return choice


# ---- streamed ----


class StreamEncoder:
    """Turns deltas into the bytes of server-sent events."""

    def __init__(self, kind: Kind, job: Job, header: Header) -> None:
        chat = kind == "chat"
        self._chat = chat
        self._job = job
        self._usage = Usage(len(job.prompts), job.sampling.n)
        self._unfinished = job.num_choices
        self._begun = [not chat] * job.num_choices  # a chat choice begins with a chunk that tells the role
        self._offsets = [0] * job.num_choices
        self._num_tokens = 0
        self._plain = job.sampling.logprobs is None and not job.return_token_ids
        kind_name = "chat.completion.chunk" if chat else "text_completion"
        opening = encode(
            {
                "id": header.id,
                "object": kind_name,
                "created": header.created,
                "model": header.model,
                "system_fingerprint": header.system_fingerprint,
            }
        )
        self._opening = b"data: " + opening[:-1] + b',"choices":['
        field = b',"delta":{"content":' if chat else b',"text":'
        self._prefixes = [self._opening + b'{"index":%d' % i + field for i in range(job.num_choices)]
        self._after_text = b"}" if chat else b""
        # OpenAI: with include_usage every other chunk says that its usage is null.
        self._closing = b'],"usage":null}\n\n' if job.include_usage else b"]}\n\n"
        self._suffix = self._after_text + b',"logprobs":null,"finish_reason":null}' + self._closing
        self._continuous = job.continuous_usage

    def add(self, deltas: list[Delta], prompt_tokens: list[int]) -> tuple[bytes, bool]:
        """The events of these deltas, and whether the stream is complete (then its end is among them)."""
        parts: list[bytes] = []
        for delta in deltas:
            index = delta.index
            self._num_tokens += delta.num_tokens
            if self._continuous:
                self._set_usage_so_far(prompt_tokens)
            if not self._begun[index] and (delta.text or delta.logprobs or delta.token_ids or delta.finish):
                self._begun[index] = True
                role = b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null}' % index
                parts.append(self._opening + role + b',"logprobs":null,"finish_reason":null}' + self._closing)
            if self._plain:
                if delta.text:
                    parts.append(self._prefixes[index] + encode(delta.text) + self._suffix)
            elif delta.text or delta.logprobs or delta.token_ids:
                parts.append(self._prefixes[index] + encode(delta.text) + self._rich_suffix(delta))
            if delta.finish is not None:
                parts.append(self._last_chunk(index, delta.finish))
                self._usage.finish(index, delta.finish)
                self._unfinished -= 1
        if self._unfinished == 0:
            if self._job.include_usage:
                parts.append(self._opening + b'],"usage":' + encode(self._usage.body()) + b"}\n\n")
            parts.append(DONE)
        return b"".join(parts), self._unfinished == 0

    def _rich_suffix(self, delta: Delta) -> bytes:
        logprobs: dict[str, Any] | None = None
        if self._job.sampling.logprobs is not None and delta.logprobs:
            if self._chat:
                logprobs = chat_logprobs(delta.logprobs)
            else:
                logprobs = completion_logprobs(delta.logprobs, self._offsets[delta.index])
                self._offsets[delta.index] += sum(len(token.text) for token in delta.logprobs)
        suffix = self._after_text + b',"logprobs":' + encode(logprobs) + b',"finish_reason":null'
        if self._job.return_token_ids:
            suffix += b',"token_ids":' + encode(delta.token_ids)
        return suffix + b"}" + self._closing

    def _last_chunk(self, index: int, finish: Finish) -> bytes:
        empty = b',"delta":{}' if self._chat else b',"text":""'
        reason = b',"logprobs":null,"finish_reason":"%s"}' % finish.reason.encode()
        return self._opening + b'{"index":%d' % index + empty + reason + self._closing

    def _set_usage_so_far(self, prompt_tokens: list[int]) -> None:
        prompt = sum(prompt_tokens)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
        }
        self._closing = b'],"usage":' + encode(usage) + b"}\n\n"
        self._suffix = self._after_text + b',"logprobs":null,"finish_reason":null}' + self._closing
