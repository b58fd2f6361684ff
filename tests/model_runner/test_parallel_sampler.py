"""Ranks that hold parts of the vocabulary draw what one that holds all of it draws, and exchange little for it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mizzen.layers.embedding import VocabShard
from mizzen.model_runner.parallel_sampler import ParallelSampler
from mizzen.model_runner.sampler import Sampled, SamplingInputs, sample
from mizzen.platform.cpu import CpuPlatform
from model_runner.every_kind import EOS, KINDS, VOCAB, Bigrams, NoAttention, Requests, make_state
from model_runner.threads_as_ranks import Exchange, ThreadGroup, run_ranks

torch.set_num_threads(1)


def sample_on(size: int, logits: Tensor, inputs: SamplingInputs) -> tuple[Sampled, Exchange]:
    """By ``size`` ranks, all of which must get the same."""
    vocab = logits.shape[1]
    width = -(-vocab // size)
    padded = torch.nn.functional.pad(logits, (0, size * width - vocab), value=-torch.inf)

    def work(group: ThreadGroup) -> Sampled:
        start = group.rank * width
        shard = VocabShard(group, start, width, vocab)  # type: ignore[arg-type]  # all of a group that it needs
        return ParallelSampler(shard).sample(padded[:, start : start + width].clone(), inputs)

    results, exchange = run_ranks(size, work)
    for result in results[1:]:
        for name in ("token_ids", "chosen_logprobs", "top_token_ids", "top_logprobs"):
            mine, first = getattr(result, name), getattr(results[0], name)
            assert (mine is None and first is None) or torch.equal(mine, first), name
    return results[0], exchange


def every_row(kinds: tuple[str, ...], times: int, seed: int = 0) -> tuple[SamplingInputs, Tensor]:
    """Inputs after a few tokens of each kind, and logits [S, VOCAB] for them, many of them equal."""
    kinds = kinds * times
    state, requests = make_state(CpuPlatform(1), len(kinds)), Requests(kinds)
    from mizzen.model_runner.runner import EagerExecutor

    eager = EagerExecutor(Bigrams(torch.float32, torch.device("cpu")), NoAttention(), state)
    for _ in range(3):
        eager.run(state.prepare(requests.next_step()))
    step = state.prepare(requests.next_step())
    arrays = state.upload(step)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(kinds), VOCAB), generator=generator) * 2
    logits[::2] = (logits[::2] * 4).round() / 4
    logits[:, EOS] = 7.0
    return state.sampling_inputs(step, arrays), logits


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_kinds_of_rows_equal_one_rank(size: int) -> None:
    for seed in range(3):
        inputs, logits = every_row(tuple(KINDS), 10, seed)
        expected = sample(logits, inputs)
        got, _ = sample_on(size, logits, inputs)
        assert torch.equal(got.token_ids, expected.token_ids)
        assert expected.chosen_logprobs is not None
        assert got.chosen_logprobs is not None
        torch.testing.assert_close(got.chosen_logprobs, expected.chosen_logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(got.top_logprobs, expected.top_logprobs, atol=1e-5, rtol=0)
        rows = inputs.logprob_rows
        assert rows is not None
        assert got.top_token_ids is not None
        assert torch.equal(logits[rows].gather(1, got.top_token_ids), logits[rows].topk(inputs.num_logprobs).values)


@pytest.mark.parametrize("vocab", [9, 10, 33])
def test_ranks_that_hold_only_padding_take_part(vocab: int) -> None:
    """10 tokens on 8 ranks: shares of 2, three ranks with none."""
    inputs, logits = every_row(("greedy", "plain", "min_p", "top_k", "top_p", "logprobs"), 20)
    inputs.num_logprobs = 5
    logits = logits[:, 20 : 20 + vocab]
    expected, (got, _) = sample(logits, inputs), sample_on(8, logits, inputs)
    assert torch.equal(got.token_ids, expected.token_ids)
    torch.testing.assert_close(got.top_logprobs, expected.top_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy_takes_the_first_of_equal_logits_on_any_rank(dtype: torch.dtype) -> None:
    inputs, logits = every_row(("greedy",), 4)
    logits = torch.zeros_like(logits, dtype=dtype)
    for row, places in enumerate(([1499, 3], [900, 800], [0], [1200, 1300])):
        logits[row, places] = 5.0
    assert sample_on(3, logits, inputs)[0].token_ids.tolist() == [3, 800, 0, 1200]


def test_draws_on_the_border_of_two_ranks_and_of_impossible_tokens() -> None:
    inputs, logits = every_row(("plain",), 400)
    logits = torch.full_like(logits, -torch.inf)
    logits[:, 749:751] = 0.0  # the last token of the first rank, the first of the second
    logits[::2, 749] = -torch.inf
    tokens = sample_on(2, logits, inputs)[0].token_ids
    assert (tokens[::2] == 750).all()
    assert set(tokens[1::2].tolist()) == {749, 750}
    assert torch.equal(tokens, sample(logits, inputs).token_ids)


@pytest.mark.parametrize(
    ("kinds", "bytes_a_row"),
    [
        (("greedy",), 16),
        (("plain",), 32),
        (("min_p",), 32),
        (("penalties", "bias"), 32),
        (("top_k",), 32 + 20 * 16),
        (("logprobs",), 32 + (3 + 2 * 5) * 8),
        (("top_p",), 32 + VOCAB // 2 * 4),
    ],
)
def test_only_rows_with_top_p_alone_exchange_logits(kinds: tuple[str, ...], bytes_a_row: int) -> None:
    inputs, logits = every_row(kinds, 12)
    _, exchange = sample_on(2, logits, inputs)
    assert exchange.sent_bytes == bytes_a_row * len(logits)
    assert exchange.calls <= 4


def test_wide_rows_exchange_their_own_logits_alone() -> None:
    kinds: Any = ("top_p", *["plain"] * 9)
    inputs, logits = every_row(kinds, 1)
    _, exchange = sample_on(2, logits, inputs)
    assert exchange.sent_bytes == 32 * 10 + VOCAB // 2 * 4
