"""A batch with every kind of sampled row at once, and a model whose logits depend on nothing but a row's last token."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, GraphSupport
from mizzen.distributed.group import SingleGroup
from mizzen.layers.embedding import VocabShard
from mizzen.model_runner.batch_state import BatchState
from mizzen.platform.base import Platform
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import SchedulerOutput, SlotStart

VOCAB, EOS, PAGE = 1500, 7, 4
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.7},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 20},
    "top_k, top_p": {"top_k": 64, "top_p": 0.8, "temperature": 1.5},
    "top_k, top_p, min_p": {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "top_p": {"top_p": 0.6},
    "large top_k": {"top_k": 300, "temperature": 1.7},
    "top_p, min_p": {"top_p": 0.95, "min_p": 0.01, "temperature": 1.2},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.8},
    "bias": {"logit_bias": {3: 9.0, 700: 8.5, 1499: 9.0}, "temperature": 0.9},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (11, 1498), "top_p": 0.9},
    "logprobs": {"logprobs": 5},
    "logprobs, greedy": {"logprobs": 0, "temperature": 0.0},
    "logprobs, top_p": {"logprobs": 3, "top_p": 0.7},
    "all": {
        "logprobs": 2,
        "repetition_penalty": 1.2,
        "logit_bias": {900: 3.0},
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}
KINDS_OF_259: dict[str, dict[str, Any]] = {  # tokens of the tiny models' vocabulary
    **KINDS,
    "large top_k": {"top_k": 100, "temperature": 1.7},
    "bias": {"logit_bias": {3: 4.0, 129: 4.0, 258: 5.0}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": (11, 258), "top_p": 0.9},
    "all": {**KINDS["all"], "logit_bias": {90: 3.0}},
}
PLAIN = ("greedy", "plain")


def make_state(platform: Platform, rows: int) -> BatchState:
    return BatchState(
        platform, max_slots=rows, max_model_len=64, page_size=PAGE, dummy_page=rows * 16, eos_token_ids=(EOS,)
    )


@dataclass
class Requests:
    """One request a kind, in slots of another order than the rows: a step of prompts, then decode steps."""

    kinds: tuple[str, ...]
    options: dict[str, dict[str, Any]] = field(default_factory=lambda: KINDS)
    length: int = 3

    def __post_init__(self) -> None:
        self.slots = np.random.RandomState(len(self.kinds)).permutation(len(self.kinds)).astype(np.int32)
        self.computed = 0

    def next_step(self) -> SchedulerOutput:
        rows, first = len(self.kinds), self.computed == 0
        count = self.length if first else 1
        columns = [page for page in range(16) if self.computed <= page * PAGE < self.computed + count]
        output = SchedulerOutput(
            step=self.computed,
            slots=self.slots,
            num_computed=np.full(rows, self.computed, np.int32),
            num_scheduled=np.full(rows, count, np.int32),
            samples=np.ones(rows, np.bool_),
            num_decode_rows=0 if first else rows,
            started=[self._start(row) for row in range(rows)] if first else [],
            page_slots=np.repeat(self.slots, len(columns)),
            page_columns=np.tile(np.array(columns, np.int32), rows),
            page_ids=np.concatenate([slot * 16 + np.array(columns, np.int32) for slot in self.slots]).astype(np.int32),
        )
        self.computed += count
        return output

    def _start(self, row: int) -> SlotStart:
        prompt = np.array([row + 20, 200, row * 13 % 259], np.int32)[: self.length]
        params = SamplingParams(**self.options[self.kinds[row]])
        return SlotStart(int(self.slots[row]), row, prompt, self.length, 0, params, seed=1000 + row)


class Bigrams:
    """Logits [vocab] by last token, whatever else is in the batch: two executors differ only if their samplers do."""

    shard = VocabShard(SingleGroup(), 0, VOCAB, VOCAB)

    def __init__(self, dtype: torch.dtype, device: torch.device, std: float = 2.0) -> None:
        table = torch.randn((VOCAB, VOCAB), generator=torch.Generator().manual_seed(0)) * std
        self.table = table.to(device, dtype)

    def forward(self, batch: Batch, attention: AttentionBackend) -> Tensor:
        return self.table[batch.token_ids]

    def local_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return hidden if out is None else out.copy_(hidden)


class NoAttention:
    kv: ClassVar[Any] = None
    graph_support = GraphSupport.ALL

    def plan(self, batch: Batch) -> None:
        pass

    def forward(self, q: Tensor, layer: int) -> Tensor:
        raise AssertionError
