"""Every choice that started gets one Finish, after all of its text; what belongs to no live choice has no effect.

``Detokenizer`` is pure: steps of the engine in, deltas by api and stop requests out.
"""

import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from mizzen.ipc.messages import (
    ChoiceEnded,
    ChoiceStarted,
    Delta,
    Finish,
    StepOutput,
    StopChoice,
    TokenLogprob,
    TopLogprobs,
)
from mizzen.tokenizer.hf import HFTokenizer
from mizzen.tokenizer.incremental import incremental_detokenizer
from mizzen.tokenizer.stop_strings import StopStrings


class _Choice:
    """One choice's state, and what it will say in its next delta."""

    __slots__ = (
        "detokenize_s",
        "detokenizer",
        "finish",
        "logprobs",
        "num_new_tokens",
        "num_tokens",
        "started",
        "stop_string",
        "stop_strings",
        "text",
        "token_ids",
    )

    def __init__(self, started: ChoiceStarted, tokenizer: HFTokenizer) -> None:
        self.started = started
        self.detokenizer = incremental_detokenizer(tokenizer, started.skip_special_tokens)
        self.stop_strings = StopStrings(started.stop, started.include_stop_str_in_output) if started.stop else None
        self.stop_string: str | None = None  # found: the text is over
        self.detokenize_s: float | None = None  # when the first token arrived
        self.num_tokens = 0
        self.num_new_tokens = 0
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None

    def add_text(self, text: str) -> None:
        if self.stop_strings is not None:
            may_stop = self.num_tokens >= self.started.min_tokens
            text, self.stop_string = self.stop_strings.feed(text, may_stop)
        self.text += text

    def end_text(self) -> None:
        """Gives out what was held back, unless a stop string has cut it off."""
        if self.stop_string is None:
            self.add_text(self.detokenizer.flush())
        if self.stop_string is None and self.stop_strings is not None:
            self.text += self.stop_strings.flush()

    def take_delta(self) -> Delta | None:
        """What is new; None if that is nothing but a count of tokens, which then goes with the next delta."""
        if not (self.text or self.token_ids or self.logprobs or self.finish):
            return None
        started = self.started
        delta = Delta(
            started.request_id,
            started.index,
            self.text,
            self.num_new_tokens,
            self.token_ids,
            self.logprobs,
            self.finish,
        )
        self.text, self.num_new_tokens, self.token_ids, self.logprobs = "", 0, [], []
        return delta


class Detokenizer:
    """All live choices of one engine's life. ``eos_token_ids``: those that end a choice without a stop_reason."""

    def __init__(
        self, tokenizer: HFTokenizer, eos_token_ids: tuple[int, ...], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._epoch = -1
        self._choices: dict[int, _Choice] = {}
        self._orphans: set[int] = set()  # handles of no choice here, which the engine was asked to stop
        self._touched: dict[_Choice, None] = {}  # the choices that may have a delta, in order of their output
        self._stops: list[StopChoice] = []

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def is_empty(self) -> bool:
        """Nothing is remembered: true whenever no choice is live in the engine."""
        return not (self._choices or self._orphans or self._touched or self._stops)

    def handle(self, *outputs: StepOutput) -> tuple[dict[int, list[Delta]], list[StopChoice]]:
        """One delta a choice for all ``outputs`` together, by api; and the choices that may stop."""
        for output in outputs:
            self._handle(output)
        deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        for choice in self._touched:
            delta = choice.take_delta()
            if delta is not None:
                deltas[choice.started.api].append(delta)
        stops, self._stops = self._stops, []
        self._touched = {}
        return deltas, stops

    def drop_api(self, api: int) -> None:
        """The api died, and with it whoever waited for its choices; the engine aborts them."""
        self._choices = {handle: choice for handle, choice in self._choices.items() if choice.started.api != api}

    def _handle(self, output: StepOutput) -> None:
        if output.reset or output.epoch > self._epoch:
            self._choices.clear()
            self._orphans.clear()
            self._touched.clear()
            self._stops.clear()
            self._epoch = output.epoch
        elif output.epoch < self._epoch:
            return  # from an engine that is gone
        for started in output.started:
            self._choices[started.handle] = _Choice(started, self._tokenizer)
        self._handle_tokens(output)
        for ended in output.ended:
            self._end(ended)

    def _handle_tokens(self, output: StepOutput) -> None:
        handles: list[int] = np.frombuffer(output.handles, np.int64).tolist()
        token_ids: list[int] = np.frombuffer(output.token_ids, np.int32).tolist()
        assert len(handles) == len(token_ids), "a token a row"
        stop_tokens = {ended.handle: ended.stop_token_id for ended in output.ended if ended.stop_token_id is not None}
        logprobs = _LogprobRows(output.top_logprobs) if output.top_logprobs is not None else None
        choices, touched = self._choices, self._touched
        for handle, token in zip(handles, token_ids, strict=True):
            choice = choices.get(handle)
            if choice is None:
                self._stop_orphan(handle)
                continue
            if choice.stop_string is not None:
                continue  # generated before the engine learned of the stop string
            touched[choice] = None
            if not choice.num_tokens:
                choice.detokenize_s = self._clock()
            choice.num_tokens += 1
            choice.num_new_tokens += 1
            if choice.started.return_token_ids:
                choice.token_ids.append(token)
            if logprobs is not None and choice.started.logprobs is not None:
                choice.logprobs.extend(self._token_logprobs(logprobs, handle, token, choice.started.logprobs))
            if stop_tokens.get(handle) == token and not choice.started.include_stop_str_in_output:
                continue
            if choice.stop_strings is None:
                choice.text += choice.detokenizer.push(token)
                continue
            choice.add_text(choice.detokenizer.push(token))
            if choice.stop_string is not None:
                self._stops.append(StopChoice(handle))

    def _token_logprobs(self, rows: "_LogprobRows", handle: int, token: int, width: int) -> list[TokenLogprob]:
        row = rows.by_handle.get(handle)
        if row is None:
            return []
        top = [
            (*self._tokenizer.token(other), logprob)
            for other, logprob in zip(
                rows.token_ids[row][:width].tolist(), rows.logprobs[row][:width].tolist(), strict=True
            )
        ]
        return [TokenLogprob(*self._tokenizer.token(token), float(rows.chosen[row]), top, token)]

    def _stop_orphan(self, handle: int) -> None:
        """Output of a choice that is not known here (this process was restarted): asks for its end, once."""
        if handle not in self._orphans:
            self._orphans.add(handle)
            self._stops.append(StopChoice(handle))

    def _end(self, ended: ChoiceEnded) -> None:
        self._orphans.discard(ended.handle)
        choice = self._choices.pop(ended.handle, None)
        if choice is None:
            return
        choice.end_text()
        ended.timings.detokenize_s, ended.timings.detokenized_s = choice.detokenize_s, self._clock()
        self._touched[choice] = None
        started = choice.started
        finish = Finish(
            reason=ended.reason,
            prompt_tokens=started.prompt_tokens,
            completion_tokens=ended.completion_tokens,
            cached_tokens=ended.cached_tokens,
            error=ended.error,
            timings=ended.timings,
        )
        if choice.stop_string is not None:  # the text was over before the engine ended it, for whatever reason
            finish.reason, finish.stop_reason, finish.error = "stop", choice.stop_string, None
            finish.completion_tokens = choice.num_tokens
        elif ended.stop_token_id is not None and ended.stop_token_id not in self._eos_token_ids:
            finish.stop_reason = ended.stop_token_id
        choice.finish = finish


class _LogprobRows:
    """TopLogprobs as arrays: chosen [K], token_ids and logprobs [K, width], and each handle's row."""

    def __init__(self, top: TopLogprobs) -> None:
        handles: list[int] = np.frombuffer(top.handles, np.int64).tolist()
        self.by_handle = {handle: row for row, handle in enumerate(handles)}
        self.chosen = np.frombuffer(top.chosen, np.float32)
        self.token_ids = np.frombuffer(top.token_ids, np.int32).reshape(len(handles), top.width)
        self.logprobs = np.frombuffer(top.logprobs, np.float32).reshape(len(handles), top.width)
