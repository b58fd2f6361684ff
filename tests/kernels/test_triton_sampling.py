"""Triton's sampler against the torch twin's definition: the same u, the same inverse CDF.

Sums in another order may move a boundary past u. Such rows are counted; u must then lie at the boundary.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mizzen.model_runner.philox import philox_uniform
from mizzen.model_runner.sampler import MAX_CANDIDATES, SamplingInputs, sample

pytestmark = pytest.mark.gpu

POISON = -9


@dataclass
class Case:
    """Rows in shuffled slots, with the parameters in tables as model_runner/batch_state.py keeps them."""

    logits: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor
    num_prompt: Tensor
    seq_lens: Tensor

    @classmethod
    def random(cls, logits: Tensor, temperatures: tuple[float, ...] = (0.0, 0.6, 1.0, 1.7)) -> "Case":
        rows, device = len(logits), logits.device
        num_prompt = torch.randint(1, 20, (rows,), device=device)
        return cls(
            logits,
            torch.tensor(temperatures, device=device)[torch.randint(len(temperatures), (rows,), device=device)],
            torch.ones(rows, device=device),
            torch.zeros(rows, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.randint(-(2**63), 2**63 - 1, (rows,), device=device),
            num_prompt,
            (num_prompt + torch.randint(0, 20, (rows,), device=device)).int(),
        )

    def run(self, **flags: bool) -> Tensor:
        from mizzen.kernels.triton.sampling import sample_tokens
        from mizzen.kernels.triton.slots import SampledRows, SlotParams

        rows, device = len(self.logits), self.logits.device
        num_slots = rows + 3
        slots = torch.randperm(num_slots, device=device)[:rows]
        floats = torch.full((num_slots, 6), torch.nan, device=device)
        floats[slots, 0], floats[slots, 1], floats[slots, 2] = self.temperature, self.top_p, self.min_p
        ints = torch.full((num_slots, 3), POISON, dtype=torch.int64, device=device)
        ints[slots, 0], ints[slots, 1], ints[slots, 2] = self.top_k, self.seeds, self.num_prompt
        table = torch.full((num_slots, 50), POISON, dtype=torch.int32, device=device)
        out = torch.full((rows,), POISON, dtype=torch.int32, device=device)
        before = self.logits.clone()
        sample_tokens(
            self.logits,
            SampledRows(slots, self.seq_lens, table, out),
            SlotParams(floats[:, 0], floats[:, 1], floats[:, 2], ints[:, 0], ints[:, 1], ints[:, 2]),
            **flags,
        )
        assert torch.allclose(self.logits, before, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(table[slots, self.seq_lens.long()], out)
        assert (table != POISON).sum() == rows
        return out.long()

    @property
    def output_index(self) -> Tensor:
        return self.seq_lens.long() - self.num_prompt

    def twin(self) -> Tensor:
        narrow = (self.temperature > 0) & (self.top_k > 0) & (self.top_k <= MAX_CANDIDATES)
        wide = (self.temperature > 0) & ~narrow & ((self.top_k > 0) | (self.top_p < 1))
        inputs = SamplingInputs(
            slots=torch.arange(len(self.logits), device=self.logits.device),
            lengths=self.seq_lens.long(),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seeds=self.seeds,
            output_index=self.output_index,
            all_greedy=bool((self.temperature == 0).all()),
            any_min_p=bool((self.min_p > 0).any()),
            narrow_rows=narrow.nonzero()[:, 0] if narrow.any() else None,
            max_top_k=int(self.top_k[narrow].max()) if narrow.any() else 0,
            wide_rows=wide.nonzero()[:, 0] if wide.any() else None,
        )
        return sample(self.logits, inputs).token_ids

    def kept(self, row: int) -> Tensor:
        """Weights [V] in float64 of what top_k, top_p and min_p leave; of equal logits, earlier tokens come first."""
        scaled = self.logits[row].double() / self.temperature[row].double()
        weights = torch.exp(scaled - scaled.max())
        ordered, ids = torch.sort(scaled, descending=True, stable=True)
        top = weights[ids]
        if self.top_k[row] > 0:
            top[self.top_k[row] :] = 0
        mass = top.cumsum(0) - top
        dropped = mass >= self.top_p[row].double() * top.sum()
        dropped[0] = False
        top[dropped] = 0
        if self.min_p[row] > 0:
            top[ordered < ordered[0] + self.min_p[row].double().log()] = 0
        return torch.zeros_like(weights).scatter_(0, ids, top)

    def check_by_definition(self, tokens: Tensor) -> None:
        """Each token's interval of the cumulated weights holds u, but for 1e-5 of the total."""
        uniform = philox_uniform(self.seeds, self.output_index).double()
        for row, token in enumerate(tokens.tolist()):
            if self.temperature[row] == 0:
                largest = self.logits[row].float()
                assert token == int((largest == largest.max()).nonzero()[0, 0])
                continue
            weights = self.kept(row)
            assert weights[token] > 0, f"row {row}: token {token} was not to be had"
            ends = weights.cumsum(0) / weights.sum()
            start = float(ends[token - 1]) if token else 0.0
            assert start - 1e-5 <= float(uniform[row]) <= float(ends[token]) + 1e-5, f"row {row}"

    def check_against_twin(self, tokens: Tensor, exceptions: int) -> None:
        different = (tokens != self.twin()).sum()
        assert different <= exceptions, f"{different} rows"


def logits_of(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device, stride: int = 0, scale: float = 3
) -> Tensor:
    """Normal values in the first ``vocab`` columns of wider rows, whose rest would win every draw."""
    wide = torch.full((rows, max(stride, vocab)), 1e4, device=device)
    wide[:, :vocab] = torch.randn(rows, vocab, device=device) * scale
    return wide.to(dtype)[:, :vocab]


SHAPES = [(1, 4096, 0), (5, 10_000, 0), (4, 151, 160), (3, 49_152, 0), (2, 20_001, 20_016), (9, 33, 0), (2, 151_936, 0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab", "stride"), SHAPES)
def test_plain_draws_equal_the_twin(
    device: torch.device, dtype: torch.dtype, rows: int, vocab: int, stride: int
) -> None:
    case = Case.random(logits_of(rows, vocab, dtype, device, stride))
    tokens = case.run()
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)


def test_a_thousand_draws_equal_the_twin(device: torch.device) -> None:
    rows = 1000 if device.type == "cuda" else 150
    case = Case.random(logits_of(rows, 9000, torch.bfloat16, device))
    tokens = case.run()
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=1)


def test_equal_logits_are_all_drawn_and_greedy_takes_the_first(device: torch.device) -> None:
    case = Case.random(torch.full((40, 5000), -3.0, dtype=torch.bfloat16, device=device), temperatures=(0.0, 0.5))
    tokens = case.run()
    case.check_by_definition(tokens)
    assert (tokens[case.temperature == 0] == 0).all()
    assert len(tokens.unique()) > 5


def test_banned_tokens_are_never_drawn(device: torch.device) -> None:
    logits = logits_of(30, 9000, torch.float32, device)
    logits[:, 17:] = -torch.inf  # whole blocks of them
    logits[::2] = -torch.inf
    logits[::2, 8999] = 1.0
    case = Case.random(logits)
    tokens = case.run()
    case.check_by_definition(tokens)
    assert (tokens[::2] == 8999).all()
    assert (tokens[1::2] < 17).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_min_p_removes_what_the_twin_removes(device: torch.device, dtype: torch.dtype) -> None:
    case = Case.random(logits_of(24, 13_000, dtype, device))
    case.min_p[::2] = torch.rand(12, device=device) * 0.3
    tokens = case.run(min_p=True)
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)


@pytest.mark.parametrize(("rows", "vocab", "stride"), SHAPES)
def test_top_k_equals_its_definition_where_logits_tie(device: torch.device, rows: int, vocab: int, stride: int) -> None:
    logits = (logits_of(rows, vocab, torch.bfloat16, device, stride).float() * 4).round().bfloat16()
    case = Case.random(logits, temperatures=(0.0, 0.8, 5.0))
    case.top_k = torch.randint(1, 65, (rows,), device=device)
    case.top_p[::2] = 0.3 + 0.7 * torch.rand(len(case.top_p[::2]), device=device)
    case.check_by_definition(case.run(filtered=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_top_k_top_p_and_min_p_equal_the_twin_beside_plain_rows(device: torch.device, dtype: torch.dtype) -> None:
    rows = 24
    if dtype == torch.float16:  # no two equal logits in a row: the order of equal ones is not torch's to promise
        values = torch.linspace(-12, 12, 12_000, device=device).half().unique()
        logits = torch.stack([values[torch.randperm(len(values), device=device)] for _ in range(rows)])
    else:
        logits = logits_of(rows, 30_000, dtype, device)
    case = Case.random(logits, temperatures=(0.0, 0.6, 1.0, 3.0))
    case.top_k[::2] = torch.randint(1, 65, (rows // 2,), device=device)
    case.top_k[0], case.top_k[2] = 1, 64
    case.top_p[::2] = 0.5 + 0.5 * torch.rand(rows // 2, device=device)
    case.min_p[::3] = 0.05
    tokens = case.run(filtered=True, min_p=True)
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("vocab", "stride"), [(9000, 0), (151, 160), (33, 0)])
def test_top_p_alone_and_large_top_k_equal_their_definition_where_logits_tie(
    device: torch.device, dtype: torch.dtype, vocab: int, stride: int
) -> None:
    rows = 12
    logits = (logits_of(rows, vocab, dtype, device, stride).float() * 4).round().to(dtype)
    case = Case.random(logits, temperatures=(0.8, 5.0, 50.0))
    case.temperature[0] = 0
    case.top_p = 0.2 + 0.8 * torch.rand(rows, device=device)
    case.top_k[::2] = torch.randint(65, 2000, (rows // 2,), device=device)
    case.top_p[4] = case.top_p[5] = 1.0
    case.min_p[3], case.min_p[6] = 0.02, 0.02
    case.check_by_definition(case.run(filtered=True, min_p=True))


def test_top_p_alone_and_large_top_k_equal_the_twin(device: torch.device) -> None:
    case = Case.random(logits_of(16, 9000, torch.float32, device), temperatures=(0.8, 2.0))
    case.top_p = 0.2 + 0.8 * torch.rand(16, device=device)
    case.top_k[::2] = torch.randint(65, 2000, (8,), device=device)
    tokens = case.run(filtered=True)
    case.check_by_definition(tokens)
    case.check_against_twin(tokens, exceptions=0)


def test_draws_follow_the_distribution(device: torch.device) -> None:
    rows = 20_000 if device.type == "cuda" else 400
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5], device=device).bfloat16().expand(rows, 4).contiguous()
    case = Case.random(logits, temperatures=(1.0,))
    counts = torch.bincount(case.run(), minlength=4).double() / rows
    expected = torch.softmax(logits[0].double(), 0)
    assert ((counts - expected).abs() < 5 * (expected * (1 - expected) / rows).sqrt()).all()


@pytest.mark.parametrize("vocab", [33, 4096, 10_000])
def test_logprobs_equal_the_twin(device: torch.device, vocab: int) -> None:
    from mizzen.kernels.triton.sampling import logprobs

    logits = logits_of(7, vocab, torch.bfloat16, device, stride=vocab + 8)
    logits[2, 5] = -torch.inf
    indices = torch.tensor([5, 2, 0], device=device)
    token_ids = torch.randint(vocab, (7,), dtype=torch.int32, device=device)
    chosen, normalizers = logprobs(logits, indices, token_ids)
    expected = torch.log_softmax(logits.float(), -1)
    torch.testing.assert_close(chosen, expected[indices, token_ids[indices].long()], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normalizers, logits[indices].float().logsumexp(-1), rtol=1e-6, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of which the interpreter is made
def test_logits_that_are_all_nan_give_a_token_of_the_vocabulary(device: torch.device) -> None:
    """Weights that overflow must not make the next step read beyond the embedding."""
    case = Case.random(torch.full((4, 5000), torch.nan, device=device), (0.0,))
    case.temperature[1:] = 0.7
    case.top_k[2] = 5
    case.top_p[3] = 0.5
    tokens = case.run(filtered=True)
    assert ((tokens >= 0) & (tokens < 5000)).all(), tokens.tolist()


def test_no_rows_and_pinned_output(device: torch.device) -> None:
    case = Case.random(logits_of(0, 100, torch.bfloat16, device))
    assert len(case.run(filtered=True)) == 0
