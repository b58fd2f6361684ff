"""One HTTP request in, one GenerateRequest a choice out, or one refusal: nothing is sent for a request half right."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mizzen.errors import InvalidRequest, RequestTooLong
from mizzen.ipc.messages import (
    ChatPrompt,
    GenerateRequest,
    Prompt,
    RequestAccepted,
    TextPrompt,
    TokenizeRequest,
    TokenPrompt,
)
from mizzen.sampling_params import SEED_LIMIT, SamplingParams
from mizzen.tokenizer.chat_template import ChatTemplate
from mizzen.tokenizer.hf import HFTokenizer


class Tokenize:
    """Pure: neither sockets nor state. ``vocab_size`` is the model's, the limit of every token id."""

    def __init__(self, tokenizer: HFTokenizer, chat_template: ChatTemplate, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._vocab_size = vocab_size

    def __call__(self, request: TokenizeRequest) -> tuple[list[GenerateRequest], RequestAccepted]:
        """Raises RequestError for what can be refused before the first token. Choices of a prompt share one encode."""
        sampling = request.sampling
        self._check_sampling(sampling)
        if not request.prompts:
            raise InvalidRequest("there is no prompt", param="prompt")
        generate: list[GenerateRequest] = []
        prompt_tokens: list[int] = []
        for prompt in request.prompts:
            token_ids = self.encode(prompt, request.max_model_len)
            one = _for_one_choice(sampling, request.max_model_len - len(token_ids))
            data = token_ids.tobytes()
            for k in range(sampling.n):
                generate.append(
                    GenerateRequest(
                        request_id=request.request_id,
                        index=len(prompt_tokens) * sampling.n + k,
                        api=request.api,
                        epoch=request.epoch,
                        token_ids=data,
                        sampling=_with_seed(one, k),
                        arrival_s=request.arrival_s,
                        deadline_s=request.deadline_s,
                        priority=request.priority,
                        cache_salt=request.cache_salt,
                        return_token_ids=request.return_token_ids,
                    )
                )
            prompt_tokens.append(len(token_ids))
        return generate, RequestAccepted(request.request_id, prompt_tokens)

    def encode(self, prompt: Prompt, max_model_len: int) -> npt.NDArray[np.int32]:
        """Token ids [n], 0 < n < max_model_len, all in the vocabulary."""
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        if isinstance(prompt, TokenPrompt):
            if len(prompt.token_ids) % 4:
                raise InvalidRequest("token ids must be 32-bit integers", param=param)
            token_ids: npt.NDArray[np.int32] = np.frombuffer(prompt.token_ids, np.int32)
        else:
            token_ids = np.array(self._encode_text(prompt, max_model_len, param), np.int32)
        if not len(token_ids):
            raise InvalidRequest("the prompt is empty", param=param)
        if len(token_ids) >= max_model_len:
            raise RequestTooLong(len(token_ids), max_model_len, param=param)
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self._vocab_size:
            token = low if low < 0 else high
            raise InvalidRequest(f"token id {token} is not in the vocabulary of {self._vocab_size} tokens", param=param)
        return token_ids

    def _encode_text(self, prompt: ChatPrompt | TextPrompt, max_model_len: int, param: str) -> list[int]:
        is_chat = isinstance(prompt, ChatPrompt)
        text = self._chat_template.render(prompt) if isinstance(prompt, ChatPrompt) else prompt.text
        # A text of more bytes than the context's longest possible one is refused unread: encoding megabytes takes
        # seconds, in which this worker would serve nobody else.
        at_least = len(text) // self._tokenizer.longest_token_bytes
        if at_least >= max_model_len:
            raise RequestTooLong(at_least, max_model_len, param=param, at_least=True)
        try:
            return self._tokenizer.encode(text, add_special_tokens=not is_chat)  # a template writes its own BOS
        except InvalidRequest as error:
            error.param = param
            raise

    def _check_sampling(self, sampling: SamplingParams) -> None:
        sampling.validate(self._vocab_size)
        for token in sampling.stop_token_ids:
            if token >= self._vocab_size:
                raise InvalidRequest(
                    f"'stop_token_ids' names token {token}, which does not exist", param="stop_token_ids"
                )


def _for_one_choice(sampling: SamplingParams, room: int) -> SamplingParams:
    """``room``: tokens left in the context after the prompt, the upper limit of max_tokens (as OpenAI clamps it)."""
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return msgspec.structs.replace(
        sampling, n=1, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens)
    )


def _with_seed(sampling: SamplingParams, k: int) -> SamplingParams:
    """Choice k of a seeded request has seed + k, wrapped into 64 bits."""
    if sampling.seed is None or k == 0:
        return sampling
    seed = (sampling.seed + k + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
    changes: dict[str, Any] = {"seed": seed}
    return msgspec.structs.replace(sampling, **changes)
