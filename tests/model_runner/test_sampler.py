"""The sampler against plain definitions: what is drawn, from what, and in what order processors act."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mizzen.model_runner.philox import philox_uniform
from mizzen.model_runner.sampler import BLOCK, MAX_CANDIDATES, Pairs, Penalties, SamplingInputs, inverse_cdf, sample


def inputs(rows: int, **changes: object) -> SamplingInputs:
    base = SamplingInputs(
        slots=torch.arange(rows),
        lengths=torch.ones(rows, dtype=torch.int64),
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        seeds=torch.arange(rows),
        output_index=torch.zeros(rows, dtype=torch.int64),
        all_greedy=False,
    )
    for name, value in changes.items():
        setattr(base, name, value)
    return base


def draws(logits: Tensor, count: int, **changes: object) -> Tensor:
    """``count`` draws from one row's logits [vocab], each with its own seed."""
    changes = {name: value.expand(count) if isinstance(value, Tensor) else value for name, value in changes.items()}
    return sample(logits.expand(count, -1), inputs(count, **changes)).token_ids


def philox_reference(seed: int, offset: int) -> int:
    """The paper's definition on Python integers: the first of four output words."""
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    counter = [offset, 0, 0, 0]
    for _ in range(10):
        a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ counter[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0]


def test_philox_equals_its_definition_and_the_published_vector() -> None:
    assert philox_reference(0, 0) == 0x6627E8D5  # Random123's known-answer test for key 0, counter 0
    seeds, offsets = [0, 1, 2**40 + 7, -1, -(2**63), 2**63 - 1], [0, 5, 1023, 2**31, 2**32 - 1, 77]
    got = philox_uniform(torch.tensor(seeds), torch.tensor(offsets))
    for value, seed, offset in zip(got.tolist(), seeds, offsets, strict=True):
        word = philox_reference(seed, offset)
        signed = word - 2**32 if word >= 2**31 else word
        magnitude = -signed - 1 if signed < 0 else signed
        assert value == pytest.approx(magnitude / 2**31, rel=1e-6)


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    got = philox_uniform(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64))
    assert got.min() >= 0
    assert got.max() < 1
    counts = torch.histc(got, bins=20, min=0, max=1)
    assert ((counts - 10_000).abs() < 5 * 10_000**0.5).all()


@pytest.mark.parametrize("vocab", [7, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_inverse_cdf_equals_a_search_in_the_whole_cumulative_sum(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scaled = torch.randn(500, vocab, generator=generator) * 3
    uniform = torch.rand(500, generator=generator)
    ends = torch.softmax(scaled.double(), -1).cumsum(-1)
    expected = torch.searchsorted(ends, uniform.double()[:, None])[:, 0]
    got = inverse_cdf(scaled, uniform)
    # float32 weights may move a boundary by a hair; then the neighbour is drawn
    assert (got != expected).sum() <= 1


def test_inverse_cdf_never_draws_an_impossible_token() -> None:
    scaled = torch.full((4, 2 * BLOCK), -torch.inf)
    scaled[:, 5] = 1.0
    scaled[2:, BLOCK + 3] = 1.0
    almost_one = torch.tensor([0.0, 1 - 2**-24, 0.0, 1 - 2**-24])
    assert inverse_cdf(scaled, almost_one).tolist() == [5, 5, 5, BLOCK + 3]


def test_draws_follow_the_softmax_at_the_given_temperature() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    counts = torch.bincount(draws(logits, 40_000, temperature=torch.tensor(0.7)), minlength=4) / 40_000
    assert torch.allclose(counts, torch.softmax(logits / 0.7, -1), atol=0.012)


def test_temperature_zero_is_greedy_beside_rows_that_sample() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9], [0.0, 3.0, 2.9]])
    seen = {
        tuple(
            sample(
                logits, inputs(2, temperature=torch.tensor([0.0, 2.0]), seeds=torch.tensor([s, s]))
            ).token_ids.tolist()
        )
        for s in range(200)
    }
    assert {row for row, _ in seen} == {1}
    assert {row for _, row in seen} == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 2}, {3, 0}),
        ({"top_p": 0.6}, {3}),  # softmax of the row: 0.64, 0.24, 0.09, 0.03
        ({"top_p": 0.7}, {3, 0}),
        ({"top_k": 3, "top_p": 0.95}, {3, 0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"min_p": 0.2}, {3, 0}),
        ({"min_p": 0.2, "top_k": 3}, {3, 0}),
    ],
)
def test_filters_keep_exactly_the_tokens_of_their_definition(changes: dict[str, float], allowed: set[int]) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    arguments: dict[str, object] = {name: torch.tensor(value) for name, value in changes.items()}
    count = 5000
    narrow = 0 < changes.get("top_k", 0) <= MAX_CANDIDATES
    rows: dict[str, object] = {}
    if narrow:
        rows = {"narrow_rows": torch.arange(count), "max_top_k": int(changes["top_k"])}
    elif "top_k" in changes or "top_p" in changes:
        rows = {"wide_rows": torch.arange(count)}
    arguments["any_min_p"] = "min_p" in changes
    expanded = {name: v.expand(count) if isinstance(v, Tensor) else v for name, v in arguments.items()} | rows
    got = sample(logits.expand(count, -1), inputs(count, **expanded)).token_ids
    assert set(got.tolist()) == allowed


def test_sorted_and_gathered_candidates_draw_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(300, 5000, generator=generator) * 4).round() / 2  # many are equal
    common = {
        "top_k": torch.full((300,), 40),
        "top_p": torch.full((300,), 0.9),
    }
    gathered = sample(logits, inputs(300, narrow_rows=torch.arange(300), max_top_k=40, **common)).token_ids
    whole = sample(logits, inputs(300, wide_rows=torch.arange(300), **common)).token_ids
    assert torch.equal(gathered, whole)


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(64, 3000, generator=generator)
    together = sample(logits, inputs(64)).token_ids
    for row in (0, 17, 63):
        alone = sample(logits[row : row + 1], inputs(1, seeds=torch.tensor([row]))).token_ids
        assert alone[0] == together[row]


def test_penalties_follow_their_definitions() -> None:
    history = torch.tensor([[4, 1, 2, 2, 0]])  # prompt 4 1, output 2 2; the 0 is beyond the length
    penalties = Penalties(
        rows=torch.tensor([1]),
        history=history,
        lengths=torch.tensor([4]),
        num_prompt_tokens=torch.tensor([2]),
        repetition=torch.tensor([2.0]),
        frequency=torch.tensor([0.5]),
        presence=torch.tensor([0.25]),
    )
    from mizzen.model_runner.sampler import process

    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -1.0]] * 2)
    got = process(logits, inputs(2, penalties=penalties))
    assert got[0].tolist() == [1.0, 1.0, 1.0, 1.0, -1.0]
    assert got[1].tolist() == [1.0, 0.5, 0.5 - 2 * 0.5 - 0.25, 1.0, -2.0]
    assert logits[1, 1] == 1.0, "the raw logits must stay for the log-probabilities"


def test_bias_comes_before_repetition_and_bans_come_last() -> None:
    from mizzen.model_runner.sampler import process

    penalties = Penalties(
        torch.tensor([0]),
        torch.tensor([[0]]),
        torch.tensor([1]),
        torch.tensor([1]),
        torch.tensor([2.0]),
        torch.zeros(1),
        torch.zeros(1),
    )
    got = process(
        torch.tensor([[1.0, 0.0, 0.0]]),
        inputs(
            1,
            penalties=penalties,
            bias=Pairs(torch.tensor([0, 0]), torch.tensor([0, 1]), torch.tensor([3.0, 100.0])),
            banned=Pairs(torch.tensor([0]), torch.tensor([1])),
        ),
    )
    assert got.tolist() == [[2.0, -np.inf, 0.0]]


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    result = sample(
        logits,
        inputs(
            3,
            temperature=torch.full((3,), 0.5),
            bias=Pairs(torch.tensor([2]), torch.tensor([7]), torch.tensor([100.0])),
            logprob_rows=torch.tensor([0, 2]),
            num_logprobs=4,
        ),
    )
    assert result.token_ids[2] == 7
    expected = torch.log_softmax(logits[[0, 2]], -1)
    assert result.chosen_logprobs is not None
    assert torch.allclose(
        result.chosen_logprobs, expected.gather(1, result.token_ids[[0, 2]][:, None])[:, 0], atol=1e-5
    )
    assert result.top_logprobs is not None
    assert torch.allclose(result.top_logprobs, expected.topk(4).values, atol=1e-5)
