"""The vocabulary is split over the ranks in equal shares; the last share may hang over its end and is padded."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mizzen.distributed.group import ProcessGroup
from mizzen.layers.base import LayerContext, WeightSlice


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This rank's columns of the logits: ``width`` from ``start`` on, as many on every rank. Those beyond the
    vocabulary, which the last ranks may have, are -inf."""

    group: ProcessGroup
    start: int
    width: int
    vocab_size: int

    def gather(self, logits: Tensor) -> Tensor:  # [S, width] -> [S, vocab]
        return self.group.all_gather(logits, dim=-1)[:, : self.vocab_size]


class VocabEmbedding(nn.Module):
    """Token ids to vectors, and, as an output head, hidden rows to logits."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, context: LayerContext) -> None:
        super().__init__()
        self.name = name
        self.vocab_size = vocab_size
        self.group = context.group
        self.share = -(-vocab_size // context.group.size)
        self.start = self.group.rank * self.share
        self.held = max(0, min(self.share, vocab_size - self.start))  # rows that are tokens, not padding
        self.weight = context.parameter(self.share, hidden_size)
        self.weight.data[self.held :].zero_()

    def forward(self, token_ids: Tensor) -> Tensor:  # [T] -> [T, H]
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.start
        elsewhere = (local < 0) | (local >= self.share)
        out = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(out.masked_fill_(elsewhere.unsqueeze(-1), 0))

    @property
    def shard(self) -> VocabShard:
        return VocabShard(self.group, self.start, self.share, self.vocab_size)

    def local_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:  # [S, H] -> [S, share]
        logits = torch.mm(hidden, self.weight.t(), out=out)
        if self.held < self.share:
            logits[:, self.held :] = -torch.inf
        return logits

    def logits(self, hidden: Tensor) -> Tensor:  # [S, H] -> [S, V]
        return self.shard.gather(self.local_logits(hidden))

    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        shape = (self.vocab_size, self.weight.shape[1])
        end = self.start + self.held
        yield WeightSlice(f"{prefix}{self.name}.weight", shape, self.weight[: self.held], 0, min(self.start, end), end)
