"""Runs steps: the host prepares one, the stream applies it to the device state, runs the model, samples, stores.

Sampled tokens stay on the device and feed the next step there; the host learns them from the step's handle.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch
from mizzen.layers.embedding import VocabShard
from mizzen.model_runner.batch_state import BatchState, PreparedStep
from mizzen.model_runner.parallel_sampler import sampler_for
from mizzen.model_runner.sampler import Sampled
from mizzen.platform.base import Annotate, Outputs, StepHandle, Stream, without_name
from mizzen.scheduler.output import SampledTokens, SchedulerOutput


class CausalModel(Protocol):
    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        """Hidden states [T, hidden]."""

    @property
    def shard(self) -> VocabShard:
        """The part of the vocabulary whose logits this rank has."""

    def local_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[S, hidden] -> [S, width of the shard], in ``out``, if given."""


class Executor(Protocol):
    """How the device's part of a step is run."""

    @property
    def steps(self) -> Mapping[str, int]:
        """Steps run so far, by the name of what ran them."""

    def run(self, step: PreparedStep) -> Sampled:
        """Applies the step to the state, computes it, and stores the sampled tokens."""


class EagerExecutor:
    """Op by op: the only way on the CPU, and the reference for CUDA graphs."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        state: BatchState,
        annotate: Annotate = without_name,
    ) -> None:
        self._model = model
        self._attention = attention
        self._state = state
        self._sample = annotate("sampler", sampler_for(model.shard))
        self.steps = {"eager": 0}

    def run(self, step: PreparedStep) -> Sampled:
        self.steps["eager"] += 1
        arrays = self._state.upload(step)
        self._state.apply(step, arrays)
        batch = self._state.batch(step, arrays)
        self._attention.plan(batch)
        hidden = self._model.forward(batch, self._attention)
        if not len(batch.sample_tokens):  # every rank sees the same batch, so all of them stop here
            return Sampled(batch.sample_tokens)
        inputs = self._state.sampling_inputs(step, arrays)
        sampled = self._sample(self._model.local_logits(hidden[batch.sample_tokens]), inputs)
        self._state.store(inputs, sampled.token_ids)
        return sampled


class NullExecutor:
    """No model: the next token is a function of the position. For measuring what the host costs."""

    def __init__(self, state: BatchState, first_token: int, num_tokens: int) -> None:
        self._state = state
        self._first, self._num = first_token, num_tokens
        self.steps = {"null": 0}

    def run(self, step: PreparedStep) -> Sampled:
        self.steps["null"] += 1
        arrays = self._state.upload(step)
        self._state.apply(step, arrays)
        inputs = self._state.sampling_inputs(step, arrays)
        sampled = Sampled(self._first + inputs.output_index % self._num)
        self._state.store(inputs, sampled.token_ids)
        return sampled


class RunnerHandle:
    """A step's result, when the stream has got there."""

    def __init__(self, step: PreparedStep, handle: StepHandle) -> None:
        self._step = step
        self._handle = handle

    def ready(self) -> bool:
        return self._handle.ready()

    def result(self, timeout_s: float | None = None) -> SampledTokens:
        """Raises TimeoutError after ``timeout_s``, or what the step raised."""
        token_ids, chosen, top_ids, top = self._handle.result(timeout_s)
        assert token_ids is not None
        rows = self._step.logprob_rows
        if rows is None:
            return SampledTokens(token_ids)
        return SampledTokens(token_ids, rows.astype(np.int32), chosen, top_ids, top)


class ModelRunner:
    """One rank's runner. ``enqueue`` must be given every step, in order. ``steps``: as the executor counts them;
    ``busy_s``: what they took on the device."""

    def __init__(
        self, state: BatchState, executor: Executor, stream: Stream, annotate: Annotate = without_name
    ) -> None:
        self._prepare = annotate("prepare", state.prepare)
        self._executor = executor
        self._stream = stream

    @property
    def steps(self) -> Mapping[str, int]:
        return self._executor.steps

    @property
    def busy_s(self) -> float:
        return self._stream.busy_s

    def enqueue(self, output: SchedulerOutput) -> RunnerHandle:
        """Prepares the step on the host and gives it to the stream; returns at once."""
        step = self._prepare(output)
        return RunnerHandle(step, self._stream.submit(lambda: self._run(step)))

    def _run(self, step: PreparedStep) -> Outputs:
        with torch.inference_mode():
            sampled = self._executor.run(step)
            top_ids = sampled.top_token_ids
            return (
                sampled.token_ids.to(torch.int32),
                sampled.chosen_logprobs,
                None if top_ids is None else top_ids.to(torch.int32),
                sampled.top_logprobs,
            )

    def close(self) -> None:
        self._stream.close()
