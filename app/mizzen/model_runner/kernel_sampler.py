"""The sampler as CUDA graphs hold it: which kernels run is decided by flags, known when a graph is captured."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from mizzen.kernels.triton.parallel_sampling import sample_shards
from mizzen.kernels.triton.sampling import logprobs, sample_tokens
from mizzen.kernels.triton.slots import SampledRows, SlotParams
from mizzen.layers.embedding import VocabShard
from mizzen.model_runner.batch_state import DrawFlags
from mizzen.model_runner.parallel_sampler import ParallelSampler
from mizzen.model_runner.sampler import Sampled, SamplingInputs, sample


class KernelSampler(Protocol):
    @property
    def variants(self) -> tuple[DrawFlags, ...]:
        """A graph each."""

    def variant(self, flags: DrawFlags) -> DrawFlags:
        """The one of the variants that serves these flags."""

    def draw(self, logits: Tensor, rows: SampledRows, params: SlotParams, variant: DrawFlags) -> None:
        """Draws all rows and stores their tokens. Can be captured."""

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        """The torch twin, for rows whose logits are changed first."""

    def logprobs(self, logits: Tensor, rows: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows [K]: their tokens' log-probabilities [K], the ``count`` most likely tokens, and theirs [K, count]."""


def _flags(*, wide: bool) -> Iterator[DrawFlags]:
    for narrow in (False, True):
        for min_p in (False, True):
            yield DrawFlags(min_p, narrow, wide and narrow)


class WholeSampler:
    """Of one rank, which has all logits. Kernels for narrow and wide rows are launched together: 5 us for 256 rows if
    there are none, and those for min_p 13 (docs/performance.md)."""

    variants = tuple(_flags(wide=True))

    def variant(self, flags: DrawFlags) -> DrawFlags:
        filtered = flags.narrow or flags.wide
        return DrawFlags(flags.min_p, filtered, filtered)

    def draw(self, logits: Tensor, rows: SampledRows, params: SlotParams, variant: DrawFlags) -> None:
        sample_tokens(logits, rows, params, min_p=variant.min_p, filtered=variant.narrow)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        return sample(logits, inputs)

    def logprobs(self, logits: Tensor, rows: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        chosen, normalizers = logprobs(logits, rows, token_ids)
        top, top_token_ids = logits[rows].topk(count, -1)
        return chosen, top_token_ids, top.float() - normalizers[:, None]


class ShardSampler:
    """Of several ranks. A wide row makes all rows of its step gather their logits, for a graph's shapes are fixed."""

    wide = DrawFlags(min_p=True, narrow=True, wide=True)
    variants = (*_flags(wide=False), wide)

    def __init__(self, shard: VocabShard) -> None:
        self._shard = shard
        self._twin = ParallelSampler(shard)

    def variant(self, flags: DrawFlags) -> DrawFlags:
        return self.wide if flags.wide else flags

    def draw(self, logits: Tensor, rows: SampledRows, params: SlotParams, variant: DrawFlags) -> None:
        if variant.wide:
            sample_tokens(self._shard.gather(logits), rows, params, min_p=True, filtered=True)
        else:
            start, group = self._shard.start, self._shard.group
            sample_shards(logits, rows, params, group, start, min_p=variant.min_p, top_k=variant.narrow)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Sampled:
        return self._twin.sample(logits, inputs)

    def logprobs(self, logits: Tensor, rows: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._twin.logprobs(logits, rows, token_ids.to(torch.int64), count)


def kernel_sampler(shard: VocabShard) -> KernelSampler:
    return WholeSampler() if shard.group.size == 1 else ShardSampler(shard)
