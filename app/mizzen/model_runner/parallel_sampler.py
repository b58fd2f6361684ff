"""The sampler over a vocabulary that is split over ranks: a few numbers a row are exchanged, not logits.

It draws what model_runner/sampler.py would draw from the gathered logits, but for rounding: ranks hold the vocabulary
in order, so the one whose share of the mass contains u * total, and who knows the mass before its own, searches its
logits. A row with a top_k of up to 64 exchanges each rank's candidates. Only rows with top_p alone, or with a larger
top_k, exchange their logits. All ranks must call it with the same inputs, and get the same tokens.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mizzen.layers.embedding import VocabShard
from mizzen.model_runner.philox import philox_uniform
from mizzen.model_runner.sampler import (
    Pairs,
    Sampled,
    SamplingInputs,
    first_past,
    inverse_cdf,
    keep_filtered,
    largest_first,
    process,
    sample,
    search,
    weigh,
)


def sampler_for(shard: VocabShard) -> Callable[[Tensor, SamplingInputs], Sampled]:
    """(logits [S, width of the shard], what their rows ask for) -> tokens, the same on all ranks."""
    return sample if shard.group.size == 1 else ParallelSampler(shard).sample


class ParallelSampler:
    def __init__(self, shard: VocabShard) -> None:
        self._shard = shard

    def sample(self, local: Tensor, inputs: SamplingInputs) -> Sampled:
        """local [S, width] in the model's dtype, not changed. Arithmetic is float32."""
        logits = self._process(local, inputs)
        temperature = torch.where(inputs.temperature == 0, 1.0, inputs.temperature)[:, None]
        scaled = logits.float() / temperature
        largest, token_ids = self._largest(scaled)
        if not inputs.all_greedy:
            drawn = self._draw(logits, scaled, temperature, largest, inputs)
            token_ids = torch.where(inputs.temperature == 0, token_ids, drawn)
        if inputs.logprob_rows is None:
            return Sampled(token_ids)
        chosen, top_token_ids, top = self.logprobs(local, inputs.logprob_rows, token_ids, inputs.num_logprobs)
        return Sampled(token_ids, chosen, top_token_ids, top)

    def logprobs(
        self, local: Tensor, rows: Tensor, token_ids: Tensor, num_logprobs: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows [K] of local [S, width]: the log-probability [K] of their token_ids [S], then the ``num_logprobs``
        most likely tokens and theirs, [K, num_logprobs] each."""
        logits = local[rows].float()
        largest = logits.amax(-1)
        base = torch.where(largest == -torch.inf, 0.0, largest)  # a rank may have nothing but padding
        mass = torch.exp(logits - base[:, None]).sum(-1)
        index, here = self._local(token_ids[rows])
        chosen = torch.where(here, logits.gather(1, index[:, None])[:, 0], -torch.inf)
        count = min(num_logprobs, self._shard.width)
        values, ids = logits.topk(count, -1)
        mine = torch.cat([torch.stack([base, mass, chosen], 1), values, ids + self._shard.start], 1)
        parts = self._exchange(mine.double())  # [K, ranks, 3 + 2 * count]
        base, mass, chosen = parts[..., 0], parts[..., 1], parts[..., 2].amax(-1)
        most = base.amax(-1, keepdim=True)
        normalizer = most + (mass * torch.exp(base - most)).sum(-1, keepdim=True).log()  # [K, 1]
        top, place = parts[..., 3 : 3 + count].flatten(1).topk(num_logprobs, -1)
        top_token_ids = parts[..., 3 + count :].flatten(1).gather(1, place).long()
        return (chosen - normalizer[:, 0]).float(), top_token_ids, (top - normalizer).float()

    def _process(self, local: Tensor, inputs: SamplingInputs) -> Tensor:
        """Biases, penalties and bans concern each token by itself: other ranks' go to a column behind the shard."""
        if inputs.bias is None and inputs.penalties is None and inputs.banned is None:
            return local
        moved = replace(
            inputs,
            bias=inputs.bias and self._move(inputs.bias),
            banned=inputs.banned and self._move(inputs.banned),
            penalties=inputs.penalties
            and replace(inputs.penalties, history=self._local_or_behind(inputs.penalties.history)),
        )
        return process(torch.nn.functional.pad(local, (0, 1)), moved)[:, : self._shard.width]

    def _move(self, pairs: Pairs) -> Pairs:
        return replace(pairs, tokens=self._local_or_behind(pairs.tokens))

    def _local_or_behind(self, token_ids: Tensor) -> Tensor:
        index, here = self._local(token_ids)
        return torch.where(here, index, self._shard.width)

    def _local(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Their places in the shard, 0 for those that are not in it, and which are."""
        index = token_ids - self._shard.start
        here = (index >= 0) & (index < self._shard.width)
        return index.masked_fill(~here, 0), here

    def _exchange(self, mine: Tensor) -> Tensor:
        """[S, n] -> [S, ranks, n]. In float64 a token id is a number like the others."""
        size = self._shard.group.size
        return self._shard.group.all_gather(mine, dim=-1).view(len(mine), size, mine.shape[1])

    def _largest(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's largest value [S] and the first token that has it [S]."""
        index = scaled.argmax(-1)
        value = scaled.gather(1, index[:, None])[:, 0]
        parts = self._exchange(torch.stack([value.double(), (index + self._shard.start).double()], 1))
        rank = parts[..., 0].argmax(-1, keepdim=True)
        return parts[..., 0].gather(1, rank)[:, 0].float(), parts[..., 1].gather(1, rank)[:, 0].long()

    def _draw(
        self, logits: Tensor, scaled: Tensor, temperature: Tensor, largest: Tensor, inputs: SamplingInputs
    ) -> Tensor:
        uniform = philox_uniform(inputs.seeds, inputs.output_index)
        # log(0) is -inf: rows without min_p keep everything
        least = (largest + inputs.min_p.log())[:, None]
        token_ids = self._inverse_cdf(_at_least(scaled, least, inputs), largest, uniform)
        if (rows := inputs.narrow_rows) is not None:
            values, ids = self._candidates(scaled[rows], inputs.max_top_k)
            kept = keep_filtered(
                values, inputs.top_k[rows], inputs.top_p[rows], _at_least(values, least[rows], inputs), inputs.max_top_k
            )
            token_ids[rows] = ids.gather(1, inverse_cdf(kept, uniform[rows])[:, None])[:, 0]
        if (rows := inputs.wide_rows) is not None:
            whole = self._shard.gather(logits[rows]).float() / temperature[rows]
            kept = keep_filtered(
                whole, inputs.top_k[rows], inputs.top_p[rows], _at_least(whole, least[rows], inputs), 0
            )
            token_ids[rows] = inverse_cdf(kept, uniform[rows])
        return token_ids

    def _inverse_cdf(self, scaled: Tensor, largest: Tensor, uniform: Tensor) -> Tensor:
        weights, block_ends = weigh(scaled, largest)
        ends = self._exchange(block_ends[:, -1:])[..., 0].cumsum(-1)  # [S, ranks]
        target = uniform.double() * ends[:, -1]
        owner = first_past(ends, target)[:, None]
        rank = self._shard.group.rank
        before = ends[:, rank - 1] if rank else 0.0
        mine = self._shard.start + search(weights, block_ends, target - before)
        return self._exchange(mine[:, None])[..., 0].gather(1, owner)[:, 0]

    def _candidates(self, scaled: Tensor, max_top_k: int) -> tuple[Tensor, Tensor]:
        """The ranks' largest values and their tokens, [F, up to ranks * max_top_k] each, in the vocabulary's order."""
        values, ids = largest_first(scaled, min(max_top_k, self._shard.width))
        ids, order = ids.sort(-1)
        mine = torch.cat([values.gather(1, order).double(), (ids + self._shard.start).double()], 1)
        values, tokens = self._exchange(mine).chunk(2, -1)
        return values.flatten(1).float(), tokens.flatten(1).long()


def _at_least(scaled: Tensor, least: Tensor, inputs: SamplingInputs) -> Tensor:
    return scaled.masked_fill(scaled < least, -torch.inf) if inputs.any_min_p else scaled
