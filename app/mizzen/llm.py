"""The offline API: the same engine, tokenizer and detokenizer as the server, in the caller's own process.

llm = LLM("models/smollm2-135m-instruct")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(output.choices[0].text)
"""

import atexit
import gc
import itertools
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mizzen.config.config import Config
from mizzen.config.resolve import resolve
from mizzen.config.settings import load_settings
from mizzen.distributed.group import ProcessGroup, SingleGroup, make_group
from mizzen.engine.build import build_rank, build_scheduler, make_platform
from mizzen.engine.local_ranks import EPOCH, LocalRanks
from mizzen.engine.loop import EngineLoop
from mizzen.errors import EngineDead, InvalidRequest, RequestError
from mizzen.ipc.inproc import InprocChannel
from mizzen.ipc.messages import (
    AbortRequest,
    ChatPrompt,
    Delta,
    GenerateRequest,
    Phase,
    Prompt,
    StepOutput,
    TextPrompt,
    Timings,
    TokenizeRequest,
    TokenLogprob,
    TokenPrompt,
)
from mizzen.models.prepare import prepare_model
from mizzen.sampling_params import SamplingParams
from mizzen.tokenizer.chat_template import load_chat_template
from mizzen.tokenizer.detokenizer import Detokenizer
from mizzen.tokenizer.hf import HFTokenizer
from mizzen.tokenizer.tokenize import Tokenize

START_BAR = "Starting: {percentage:3.0f}%|{bar}| {desc} [{elapsed}]"

Message = Mapping[str, Any]


@dataclass(slots=True)
class ChoiceOutput:
    """``finish_reason`` is "stop" or "length"; ``stop_reason`` the stop string or token id, None for an EOS token.
    ``timings`` say when it was scheduled and had its first and last token, by time.monotonic."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    timings: Timings | None = None


@dataclass(slots=True)
class RequestOutput:
    prompt: str | None  # None for a prompt given as tokens
    prompt_token_ids: list[int]
    choices: list[ChoiceOutput]
    cached_tokens: int = 0


class LLM:
    """An engine of one's own. ``settings`` are Mizzen's settings by their lower-case names (max_model_len=2048,
    tensor_parallel_size=2); the environment's MIZZEN_* count too. Raises ConfigError, naming the setting."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        config = resolve(load_settings({"model": str(model), **settings}, env_file=None).settings)
        self._info = prepare_model(config.engine.model, lambda _fraction, _detail: None)
        tokenizer = HFTokenizer.from_folder(Path(self._info.path))
        template = load_chat_template(tokenizer, config.server.chat_template)
        self._tokenize = Tokenize(tokenizer, template, self._info.vocab_size)
        self._detokenizer = Detokenizer(tokenizer, self._info.eos_token_ids)
        self._ranks: LocalRanks | None = None
        self._inbox, self._outbox = InprocChannel(), InprocChannel()
        self._group: ProcessGroup = SingleGroup()
        self._closed = False
        if config.engine.tensor_parallel_size > 1:
            self._ranks = LocalRanks(config, self._info)
        try:
            self._loop = self._build(config)
        except BaseException as error:
            self._give_up(error)
            raise
        self._numbers = itertools.count()
        atexit.register(_close, weakref.ref(self))  # graphs that outlive the group would block the exit

    def _build(self, config: Config) -> EngineLoop:
        engine = config.engine
        platform = make_platform(engine, 0)
        if self._ranks is not None:
            self._group = make_group(
                0,
                engine.tensor_parallel_size,
                self._ranks.run_dir / f"ranks-{EPOCH}",
                device=platform.device,
                timeout_s=config.supervisor.load_timeout_s,
                all_reduce=engine.all_reduce,
                nvlink_multicast=engine.nvlink_multicast,
            )
        with tqdm(total=100, unit="%", bar_format=START_BAR, disable=None) as bar:  # None: off where nobody looks

            def report(phase: Phase, fraction: float, detail: str) -> None:
                bar.set_description_str(f"{phase} {detail}".rstrip(), refresh=False)
                bar.n = round(100 * fraction)
                bar.refresh()

            rank = build_rank(engine, self._info, platform, self._group, report)
        self.max_model_len = rank.info.max_model_len
        return EngineLoop(
            build_scheduler(engine, rank),
            rank.runner,
            self._inbox,
            self._outbox,
            depth=engine.overlap_depth,
            epoch=EPOCH,
            seed=engine.seed,
            broadcast=self._ranks.broadcast if self._ranks else None,
            on_wait=self._ranks.check if self._ranks else lambda: None,
            annotate=rank.annotate,
        )

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The model's own defaults (generation_config.json), which ``generate`` uses if it is given none."""
        return SamplingParams(**self._info.default_sampling)  # type: ignore[arg-type]  # top_k is an int in it

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, each a text or token ids; one SamplingParams for all, or one each. In their order.

        Raises InvalidRequest, naming the field, before anything is generated."""
        if isinstance(prompts, str):
            prompts = [prompts]
        return self._run([_prompt(prompt) for prompt in prompts], sampling_params, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of messages) or several, through the model's chat template."""
        several = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        prompts: list[Prompt] = [
            ChatPrompt([dict(message) for message in messages], template_kwargs=template_kwargs)  # type: ignore[arg-type]
            for messages in several
        ]
        return self._run(prompts, sampling_params, use_tqdm)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params or self.default_sampling_params, len(prompts))
        outputs: dict[str, RequestOutput] = {}
        requests: list[GenerateRequest] = []
        for prompt, sampling in zip(prompts, params, strict=True):
            request_id = str(next(self._numbers))
            choices, _ = self._tokenize(
                TokenizeRequest(
                    request_id=request_id,
                    api=0,
                    epoch=EPOCH,
                    prompts=[prompt],
                    sampling=sampling,
                    max_model_len=self.max_model_len,
                    arrival_s=time.monotonic(),
                    return_token_ids=True,
                )
            )
            requests += choices
            outputs[request_id] = RequestOutput(
                prompt.text if isinstance(prompt, TextPrompt) else None,
                np.frombuffer(choices[0].token_ids, np.int32).tolist(),
                [ChoiceOutput(k, logprobs=None if sampling.logprobs is None else []) for k in range(sampling.n)],
            )
        for request in requests:
            self._inbox.send(request)
        unfinished = len(requests)
        try:
            with tqdm(total=unfinished, desc="Generating", unit="answer", disable=not use_tqdm) as bar:
                while unfinished:
                    deltas = [delta for delta in self._turn() if delta.request_id in outputs]  # others: aborted before
                    for delta in deltas:
                        _collect(outputs[delta.request_id], delta)
                    ended = sum(delta.finish is not None for delta in deltas)
                    unfinished -= ended
                    if ended:
                        bar.update(ended)
        except BaseException:
            for request_id in outputs:  # Ctrl-C, or a request that failed: nothing goes on behind the caller's back
                self._inbox.send(AbortRequest(request_id))
            raise
        return list(outputs.values())

    def _turn(self) -> list[Delta]:
        """One turn of the engine and of the detokenizer."""
        self._loop.step()
        steps = [message for message in self._outbox.drain() if isinstance(message, StepOutput)]
        deltas, stops = self._detokenizer.handle(*steps)
        for stop in stops:
            self._inbox.send(stop)
        return deltas.get(0, [])

    def _give_up(self, error: BaseException) -> None:
        """Ends the other ranks of an engine that could not be built. Raises what one of them said, if that is why."""
        if self._ranks is None:
            return
        try:
            if isinstance(error, EngineDead):
                self._ranks.explain()
        finally:
            self._ranks.close()
            self._group.abandon()

    def close(self) -> None:
        """Ends the engine and its other ranks, if any; it cannot be used after."""
        if self._closed:
            return
        self._closed = True
        if self._ranks is None:
            self._loop.close()
            return
        in_order = False
        try:
            if self._ranks.alive:
                self._loop.close()
                in_order = True
        finally:  # also if this rank's device has failed
            self._ranks.close()
            if not in_order:
                self._group.abandon()
        if in_order:
            del self._loop  # and its CUDA graphs, for which NCCL would wait
            gc.collect()  # they may be in cycles
            self._group.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _close(llm: "weakref.ref[LLM]") -> None:
    if (alive := llm()) is not None:
        alive.close()


def _prompt(prompt: str | Sequence[int]) -> Prompt:
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    try:
        return TokenPrompt(np.array(prompt, np.int32).tobytes())
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a prompt is neither a text nor a list of token ids: {error}", param="prompt") from None


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} sampling params for {count} prompts", param="sampling_params")
    return list(params)


def _collect(output: RequestOutput, delta: Delta) -> None:
    choice = output.choices[delta.index]
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    if choice.logprobs is not None:
        choice.logprobs += delta.logprobs
    if delta.finish is not None:
        if delta.finish.error is not None:
            raise RequestError(delta.finish.error.message)
        choice.finish_reason, choice.stop_reason = delta.finish.reason, delta.finish.stop_reason
        choice.timings = delta.finish.timings
        output.cached_tokens = max(output.cached_tokens, delta.finish.cached_tokens)
