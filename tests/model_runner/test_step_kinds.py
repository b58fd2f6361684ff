"""What a step says of its rows: which of them kernels can draw, and that the others can be drawn apart."""

import numpy as np
import pytest
import torch

from mizzen.model_runner.batch_state import DrawFlags
from mizzen.model_runner.runner import EagerExecutor
from mizzen.model_runner.sampler import sample
from mizzen.platform.cpu import CpuPlatform
from model_runner.every_kind import EOS, KINDS, PLAIN, VOCAB, Bigrams, NoAttention, Requests, make_state

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("kinds", "flags", "changed"),
    [
        (PLAIN, DrawFlags(), None),
        ((*PLAIN, "logprobs"), DrawFlags(), None),
        (("min_p", "plain"), DrawFlags(min_p=True), None),
        (("top_k",), DrawFlags(narrow=True), None),
        (("top_k, top_p, min_p",), DrawFlags(min_p=True, narrow=True), None),
        (("top_p",), DrawFlags(wide=True), None),
        (("large top_k", "top_k"), DrawFlags(narrow=True, wide=True), None),
        (("plain", "bias", "penalties"), DrawFlags(), [1, 2]),
        (("all", "top_p"), DrawFlags(wide=True), [0]),
        (("min_tokens", "plain"), DrawFlags(), [0]),
    ],
)
def test_the_flags_are_those_of_the_rows_that_kernels_draw(
    kinds: tuple[str, ...], flags: DrawFlags, changed: list[int] | None
) -> None:
    step = make_state(CpuPlatform(1), len(kinds)).prepare(Requests(kinds).next_step())
    assert step.draw == flags
    assert (None if step.changed_rows is None else step.changed_rows.tolist()) == changed


def test_min_tokens_leaves_its_row_to_kernels_once_they_are_reached() -> None:
    state, requests = make_state(CpuPlatform(1), 1), Requests(("min_tokens",))
    steps = [state.prepare(requests.next_step()) for _ in range(6)]
    assert [step.changed_rows is not None for step in steps] == [True, True, True, True, False, False]
    assert steps[-1].draw == DrawFlags(wide=True)


def test_changed_rows_drawn_apart_equal_those_drawn_with_all() -> None:
    kinds = tuple(KINDS)
    state, requests = make_state(CpuPlatform(1), len(kinds)), Requests(kinds)
    model = Bigrams(torch.float32, torch.device("cpu"))
    eager = EagerExecutor(model, NoAttention(), state)
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        eager.run(state.prepare(requests.next_step()))
        step = state.prepare(requests.next_step())
        arrays = state.upload(step)
        state.apply(step, arrays)
        logits = torch.randn((len(kinds), VOCAB), generator=generator) * 2
        logits[:, EOS] = 9.0  # what min_tokens bans
        inputs = state.sampling_inputs(step, arrays)
        expected = sample(logits, inputs).token_ids
        part, rows = step.changed_only(), step.changed_rows
        assert rows is not None
        got = sample(logits[rows], state.sampling_inputs(part, state.upload(part))).token_ids
        assert torch.equal(got, expected[rows])
        kernels = np.setdiff1d(np.arange(len(kinds)), rows)
        inputs.bias = inputs.banned = inputs.penalties = None
        assert torch.equal(sample(logits, inputs).token_ids[kernels], expected[kernels])
        state.store(inputs, expected)
