"""Ranks with a part of the logits each, drawing by kernels, against one rank's torch twin on the whole."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.test_triton_sampling import POISON, Case, logits_of
from mizzen.layers.embedding import VocabShard
from mizzen.model_runner.batch_state import DrawFlags
from model_runner.threads_as_ranks import Exchange, ThreadGroup, run_ranks

pytestmark = pytest.mark.gpu


class Ranks:
    """Draws a case on ``size`` ranks, as a CUDA graph of them would, and checks that all get and store the same."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, case: Case, flags: DrawFlags) -> tuple[Tensor, Exchange]:
        vocab = case.logits.shape[1]
        width = -(-vocab // self.size)
        padded = torch.nn.functional.pad(case.logits, (0, self.size * width - vocab), value=-torch.inf)

        def work(group: ThreadGroup) -> Tensor:
            from mizzen.kernels.triton.slots import SampledRows, SlotParams
            from mizzen.model_runner.kernel_sampler import ShardSampler

            start, rows, device = group.rank * width, len(padded), padded.device
            sampler = ShardSampler(VocabShard(group, start, width, vocab))  # type: ignore[arg-type]  # all it needs
            floats = torch.stack([case.temperature, case.top_p, case.min_p], 1)
            ints = torch.stack([case.top_k, case.seeds, case.num_prompt], 1)
            slots = torch.arange(rows, dtype=torch.int32, device=device)
            table = torch.full((rows, 50), POISON, dtype=torch.int32, device=device)
            out = torch.full((rows,), POISON, dtype=torch.int32, device=device)
            sampler.draw(
                padded[:, start : start + width],
                SampledRows(slots, case.seq_lens, table, out),
                SlotParams(floats[:, 0], floats[:, 1], floats[:, 2], ints[:, 0], ints[:, 1], ints[:, 2]),
                sampler.variant(flags),
            )
            assert torch.equal(table[slots.long(), case.seq_lens.long()], out)
            assert (table != POISON).sum() == rows
            return out.long()

        tokens, exchange = run_ranks(self.size, work)
        assert all(torch.equal(other, tokens[0]) for other in tokens)
        return tokens[0], exchange


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [33, 4096, 20_001])
def test_plain_rows_equal_the_twin_and_exchange_no_logits(
    device: torch.device, ranks: Ranks, dtype: torch.dtype, vocab: int
) -> None:
    case = Case.random(logits_of(30, vocab, dtype, device))
    tokens, exchange = ranks.run(case, DrawFlags())
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)
    blocks = math.ceil(math.ceil(vocab / ranks.size) / 4096)
    assert (exchange.calls, exchange.sent_bytes) == (2, 30 * (8 * blocks + 4))


def test_equal_logits_are_all_drawn_and_greedy_takes_the_first_of_any_rank(device: torch.device, ranks: Ranks) -> None:
    case = Case.random(torch.full((40, 9000), -3.0, dtype=torch.bfloat16, device=device), temperatures=(0.0, 0.5))
    tokens, _ = ranks.run(case, DrawFlags())
    case.check_by_definition(tokens)
    assert len(tokens.unique()) > 5


def test_min_p_is_of_all_ranks_largest_logit(device: torch.device, ranks: Ranks) -> None:
    case = Case.random(logits_of(24, 13_000, torch.float32, device))
    case.min_p[::2] = torch.rand(12, device=device) * 0.3
    tokens, _ = ranks.run(case, DrawFlags(min_p=True))
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)


@pytest.mark.parametrize("vocab", [33, 151, 13_000])
@pytest.mark.parametrize("min_p", [False, True])
def test_top_k_draws_from_gathered_candidates(device: torch.device, ranks: Ranks, vocab: int, min_p: bool) -> None:
    rows = 24
    logits = (logits_of(rows, vocab, torch.bfloat16, device).float() * 4).round().bfloat16()
    case = Case.random(logits, temperatures=(0.0, 0.8, 5.0))
    case.top_k[::2] = torch.randint(1, 65, (rows // 2,), device=device)
    case.top_p[::4] = 0.3 + 0.7 * torch.rand(rows // 4, device=device)
    if min_p:
        case.min_p[::3] = 0.05
    tokens, exchange = ranks.run(case, DrawFlags(min_p=min_p, narrow=True))
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)
    assert exchange.calls == 3 + min_p
    assert exchange.sent_bytes <= rows * (2 * 64 * 4 + 64)


def test_rows_with_top_p_alone_gather_logits(device: torch.device, ranks: Ranks) -> None:
    case = Case.random(logits_of(8, 5001, torch.float32, device))
    case.top_p[::2], case.top_k[1] = 0.8, 300
    tokens, exchange = ranks.run(case, DrawFlags(wide=True))
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)
    assert exchange.calls == 1


def test_ranks_draw_what_one_rank_draws(device: torch.device, ranks: Ranks) -> None:
    """Float rounding apart, which the seed's draws here do not meet."""
    case = Case.random(logits_of(60, 9000, torch.bfloat16, device))
    tokens, _ = ranks.run(case, DrawFlags())
    assert torch.equal(tokens, case.run())
    case = replace(case, top_k=torch.full_like(case.top_k, 50), top_p=torch.full_like(case.top_p, 0.9))
    tokens, _ = ranks.run(case, DrawFlags(narrow=True))
    assert torch.equal(tokens, case.run(filtered=True))
