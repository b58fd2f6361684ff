"""The overlap loop: while the device runs step n, the host handles the results of n - 1 and prepares n + 1.

One call of ``step`` takes what has arrived, enqueues at most one step and handles at most one result. At most
``depth`` steps stay in flight between calls; depth 0 handles each step before the next is scheduled.
"""

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import structlog

from mizzen.engine.meter import StepMeter
from mizzen.errors import EngineRestarted
from mizzen.ipc.channels import Receiver, Sender
from mizzen.ipc.messages import (
    AbortRequest,
    ChoiceStarted,
    GenerateRequest,
    Load,
    StepOutput,
    StopChoice,
    TopLogprobs,
)
from mizzen.model_runner.runner import ModelRunner, RunnerHandle
from mizzen.platform.base import Annotate, without_name
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import SampledTokens, SchedulerOutput
from mizzen.scheduler.request import Request
from mizzen.scheduler.scheduler import Scheduler, StepResult

IDLE_WAIT_S = 0.2
RESULT_WAIT_S = 0.2  # a step may take longer: the loop wakes to say that it is alive

log = structlog.get_logger()


class EngineLoop:
    """Rank 0's loop, and the whole engine where there is one rank.

    ``broadcast`` sends a step to the other ranks. ``on_wait`` is called at least every RESULT_WAIT_S while the loop
    waits for the device: it beats, and may raise to end the loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        inbox: Receiver,
        outbox: Sender,
        *,
        depth: int,
        epoch: int,
        seed: int,
        broadcast: Callable[[SchedulerOutput], None] | None = None,
        on_wait: Callable[[], None] = lambda: None,
        meter: StepMeter | None = None,
        annotate: Annotate = without_name,
    ) -> None:
        self._scheduler = scheduler
        self._schedule = annotate("schedule", scheduler.schedule)
        self._update = annotate("update", scheduler.update)
        self._runner = runner
        self._enqueue = annotate("enqueue", runner.enqueue)
        self._inbox = inbox
        self._outbox = outbox
        self._depth = depth
        self._epoch = epoch
        self._seeds = np.random.default_rng(seed)
        self._broadcast = broadcast
        self._on_wait = on_wait
        self._meter = meter
        self._in_flight: deque[tuple[SchedulerOutput, RunnerHandle]] = deque()
        self._started: list[ChoiceStarted] = []
        # no handle of an earlier life: a StopChoice that was under way then must not meet a choice of now
        self._next_handle = epoch << 32
        self._idle = True  # the last turn found nothing to enqueue and nothing in flight
        self.steps = 0
        outbox.send(StepOutput(epoch, reset=True))

    # ---- one turn ----

    def has_work(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_work()

    def step(self, idle_wait_s: float = IDLE_WAIT_S) -> None:
        """One turn of the loop. Waits up to ``idle_wait_s`` for a message if the last turn had nothing to do."""
        if self._idle:
            message = self._inbox.recv(idle_wait_s)
            if message is not None:
                self._handle(message)
            if self._meter is not None:
                self._meter.woke()
        for message in self._inbox.drain():
            self._handle(message)
        now = time.monotonic()
        self._scheduler.expire(now)
        output = self._schedule(now) if len(self._in_flight) <= self._depth else None
        if output is not None:
            if self._broadcast is not None:
                self._broadcast(output)
            self._in_flight.append((output, self._enqueue(output)))
            if self._meter is not None:
                self._meter.enqueued(output)
        result = None
        if self._in_flight and (output is None or len(self._in_flight) > self._depth):
            result = self._take_result()
        self._emit(result)
        self._idle = output is None and result is None

    def _take_result(self) -> tuple[StepResult, SampledTokens]:
        output, handle = self._in_flight[0]
        if self._meter is not None:
            self._meter.begin_wait()
        while True:
            try:
                sampled = handle.result(RESULT_WAIT_S)
                break
            except TimeoutError:
                self._on_wait()
        self._in_flight.popleft()
        self.steps += 1
        now = time.monotonic()
        if self._meter is not None:
            self._meter.result(now)
        return self._update(output, sampled, now), sampled

    def _emit(self, result: tuple[StepResult, SampledTokens] | None) -> None:
        """Sends what this turn produced, if anything, as one message."""
        ended = self._scheduler.take_ended()
        started, self._started = self._started, []
        if result is None:
            if started or ended:
                self._outbox.send(StepOutput(self._epoch, started=started, ended=ended))
        else:
            step, sampled = result
            if len(step.handles) or started or ended or step.ended:
                self._outbox.send(
                    StepOutput(
                        self._epoch,
                        started,
                        step.handles.tobytes(),
                        step.token_ids.tobytes(),
                        _top_logprobs(step, sampled) if sampled.logprob_rows is not None else None,
                        [*step.ended, *ended],
                    )
                )

    # ---- messages ----

    def _handle(self, message: object) -> None:
        match message:
            case GenerateRequest():
                if message.epoch == self._epoch:
                    self._add(message)
            case AbortRequest():
                self._scheduler.abort(message.request_id, message.reason)
            case StopChoice():
                self._scheduler.stop(message.handle)
            case _:
                raise TypeError(f"unexpected message {type(message).__name__}")

    def _add(self, message: GenerateRequest) -> None:
        handle = self._next_handle
        self._next_handle += 1
        sampling = message.sampling
        seed = sampling.seed if sampling.seed is not None else int(self._seeds.integers(2**63))
        self._started.append(_choice_started(handle, message, sampling))
        self._scheduler.add(
            Request(
                handle=handle,
                request_id=message.request_id,
                index=message.index,
                api=message.api,
                prompt=np.frombuffer(message.token_ids, np.int32),
                sampling=sampling,
                seed=seed,
                arrival_s=message.arrival_s,
                tokenize_s=message.tokenize_s,
                tokenized_s=message.tokenized_s,
                deadline_s=message.deadline_s,
                priority=message.priority,
                cache_salt=message.cache_salt,
            ),
            time.monotonic(),
        )

    def abort_api(self, api: int) -> None:
        """The api worker is gone, and its clients with it."""
        self._scheduler.abort_api(api)

    def abort_all(self, reason: str) -> None:
        """What was in flight cannot be answered any more."""
        self._scheduler.abort_all(EngineRestarted(reason).wire())

    def load(self) -> Load:
        return self._scheduler.load()

    def close(self) -> None:
        """Waits for the steps in flight, drops their results."""
        self._in_flight.clear()
        self._runner.close()


def _choice_started(handle: int, message: GenerateRequest, sampling: SamplingParams) -> ChoiceStarted:
    return ChoiceStarted(
        handle=handle,
        request_id=message.request_id,
        index=message.index,
        api=message.api,
        prompt_tokens=len(message.token_ids) // 4,
        stop=sampling.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        return_token_ids=message.return_token_ids,
    )


def _top_logprobs(step: StepResult, sampled: SampledTokens) -> TopLogprobs | None:
    """The sampled rows' log-probabilities, without rows whose request had ended before."""
    assert sampled.logprob_rows is not None
    assert sampled.chosen_logprobs is not None
    assert sampled.top_token_ids is not None
    assert sampled.top_logprobs is not None
    alive = np.isin(sampled.logprob_rows, step.rows)
    rows = sampled.logprob_rows[alive]
    if not len(rows):
        return None
    order = np.searchsorted(step.rows, rows)  # step.rows ascends, as the step's rows do
    return TopLogprobs(
        handles=step.handles[order].tobytes(),
        width=sampled.top_token_ids.shape[1],
        chosen=sampled.chosen_logprobs[alive].astype(np.float32).tobytes(),
        token_ids=sampled.top_token_ids[alive].astype(np.int32).tobytes(),
        logprobs=sampled.top_logprobs[alive].astype(np.float32).tobytes(),
    )
