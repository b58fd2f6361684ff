"""Triton's paged attention against float64, on fresh random data.

Outputs are poisoned, pages are in random order, and keys that no row owns are NaN.
The interpreter multiplies bf16 matrices wrongly (it takes their bits for integers), so there fp16 stands for both.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def _with_loops_of_device_bounds(interpreter_loops: None) -> None:
    pass


@dataclass
class Problem:
    q: Tensor  # [T, heads, D], a view into a wider tensor, as models make it
    k: Tensor
    v: Tensor
    page_table: Tensor
    row_slots: Tensor
    seq_lens: Tensor
    query_start: Tensor
    rows: list[tuple[int, int]]  # (new tokens, length)

    @classmethod
    def random(
        cls, rows: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> "Problem":  # fmt: skip
        """Keys and values that no row owns are NaN: to read one spoils the result."""
        width = max(-(-length // page_size) for _, length in rows) + 2
        slots = len(rows) + 3
        pages = torch.randperm(slots * width).view(slots, width)
        row_slots = torch.randperm(slots)[: len(rows)]
        k, v = (torch.full((slots * width, page_size, kv_heads, head_dim), float("nan")) for _ in range(2))
        for (_, length), slot in zip(rows, row_slots.tolist(), strict=True):
            for position in range(length):
                at = pages[slot, position // page_size], position % page_size
                k[at], v[at] = torch.randn(2, kv_heads, head_dim)
        starts = torch.tensor([0] + [new for new, _ in rows]).cumsum(0)
        q = torch.randn(int(starts[-1]), heads + 2 * kv_heads, head_dim)
        return cls(
            q.to(device, dtype)[:, :heads],
            k.to(device, dtype),
            v.to(device, dtype),
            pages.to(device, torch.int32),
            row_slots.to(device, torch.int32),
            torch.tensor([length for _, length in rows], dtype=torch.int32, device=device),
            starts.to(device, torch.int32),
            rows,
        )

    def poisoned(self) -> Tensor:
        return torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=self.q.device)

    def expected(self) -> Tensor:
        """[T, heads, D] float64"""
        page_size, kv_heads, head_dim = self.k.shape[1:]
        out, start = [], 0
        for (new, length), slot in zip(self.rows, self.row_slots.tolist(), strict=True):
            pages = self.page_table[slot, : -(-length // page_size)].long()
            k, v = (cache[pages].flatten(0, 1)[:length].double() for cache in (self.k, self.v))
            q = self.q[start : start + new].double().unflatten(1, (kv_heads, -1))
            scores = torch.einsum("thgd,nhd->thgn", q, k) * head_dim**-0.5
            if length:
                hidden = torch.ones(new, length, device=q.device).triu(length - new + 1).bool()
                scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
            out.append(torch.einsum("thgn,nhd->thgd", scores.softmax(-1), v).flatten(1, 2))
            start += new
        return torch.cat(out)

    def check(self, out: Tensor, tokens: Tensor | None = None) -> None:
        """``tokens``: those that must be right; the others must still be poisoned."""
        chosen = torch.ones(len(out), dtype=torch.bool, device=out.device) if tokens is None else tokens
        assert out[~chosen].isnan().all()
        expected, actual = self.expected()[chosen], out[chosen].double()
        for token, (right, wrong) in enumerate(zip(expected, actual - expected, strict=True)):
            error = wrong.norm() / right.norm() if right.any() else wrong.norm()
            assert error < TOLERANCE[out.dtype], f"token {token}: relative error {error:.3g}"


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16] if device.type == "cuda" else [torch.float16]


def decode(problem: Problem, rounds: int = 2, max_rows: int = 300, **config: Any) -> Tensor:
    from mizzen.kernels.triton.decode_attention import DecodeConfig, PagedDecode

    _, page_size, kv_heads, head_dim = problem.k.shape
    attention = PagedDecode(
        num_heads=problem.q.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_rows=max_rows,
        device=problem.q.device,
        config=DecodeConfig(**config),
    )
    attention.plan(problem.page_table, problem.row_slots, problem.seq_lens, problem.query_start)
    for _ in range(rounds):  # the workspace must be left as it was found
        out = problem.poisoned()
        attention.forward(problem.q, problem.k, problem.v, out)
    return out


def prefill(problem: Problem, min_tokens: int = 1, max_rows: int | None = None, **config: Any) -> Tensor:
    from mizzen.kernels.triton.prefill_attention import PagedPrefill, PrefillConfig

    _, page_size, kv_heads, head_dim = problem.k.shape
    num_tokens, num_heads, _ = problem.q.shape
    attention = PagedPrefill(
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_tokens=num_tokens,
        max_rows=16,
        device=problem.q.device,
        config=PrefillConfig(**config),
    )
    rows = (problem.page_table, problem.row_slots, problem.seq_lens, problem.query_start)
    attention.plan(num_tokens, *rows, min_tokens=min_tokens, max_rows=max_rows)
    out = problem.poisoned()
    attention.forward(problem.q, problem.k, problem.v, out)
    return out


SHAPES = [  # heads, kv_heads, head_dim, page_size
    (2, 2, 64, 16), (4, 2, 128, 64), (6, 2, 64, 32), (8, 2, 128, 16), (5, 1, 128, 32), (14, 2, 64, 64), (8, 1, 128, 16),
    (20, 1, 64, 16), (3, 1, 96, 16), (2, 1, 256, 32), (2, 1, 64, 1), (2, 1, 64, 256),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_equals_the_reference(device: torch.device, shape: tuple[int, int, int, int]) -> None:
    for dtype in dtypes(device):
        rows = [(1, length) for length in (1, 63, 64, 65, 300, 17, 129, 2, 40)]
        problem = Problem.random(rows, *shape, dtype, device)
        problem.check(decode(problem))


@pytest.mark.parametrize("block_n", [32, 64, 128])
def test_decode_configurations_agree(device: torch.device, block_n: int) -> None:
    for programs, tail, tail_from in ((1, 0, 99), (5, 0, 99), (1, 30, 0), (2, 90, 0)):
        problem = Problem.random([(1, 330), (1, 7), (1, 128)], 4, 2, 64, 16, torch.float16, device)
        out = decode(
            problem, block_n=block_n, programs_per_sm=programs, tail_percent=tail, tail_from=tail_from, num_stages=2
        )
        problem.check(out)


def test_decode_of_one_long_row_is_cut_among_many_programs(device: torch.device) -> None:
    length = 5000 if device.type == "cuda" else 900
    problem = Problem.random([(1, length)], 4, 1, 64, 16, torch.float16, device)
    problem.check(decode(problem, programs_per_sm=4))


def test_decode_of_many_rows(device: torch.device) -> None:
    """More rows than programs, and not a power of two of them."""
    lengths = torch.randint(1, 400 if device.type == "cuda" else 100, (259 if device.type == "cuda" else 21,)).tolist()
    problem = Problem.random([(1, length) for length in lengths], 4, 2, 64, 16, torch.float16, device)
    problem.check(decode(problem))


def test_decode_gives_rows_of_length_0_zeros(device: torch.device) -> None:
    problem = Problem.random([(1, 0), (1, 90), (1, 0), (1, 5), (1, 0)], 4, 2, 64, 16, torch.float16, device)
    problem.check(decode(problem))


def test_decode_and_prefill_share_a_mixed_batch(device: torch.device) -> None:
    """Each leaves the other's tokens alone; rows without tokens, as they pad a captured step, are nobody's."""
    rows = [(1, 100), (1, 1), (1, 33), (50, 170), (1, 60), (7, 7), (0, 0), (0, 0)]
    problem = Problem.random(rows, 4, 2, 64, 16, torch.float16, device)
    single = torch.cat([torch.full((new,), new == 1) for new, _ in rows]).to(device)
    problem.check(decode(problem), single)
    problem.check(prefill(problem, min_tokens=2), ~single)
    problem.check(prefill(problem, min_tokens=2, max_rows=2), ~single)  # a grid for no more rows than there are


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_equals_the_reference(device: torch.device, shape: tuple[int, int, int, int]) -> None:
    for dtype in dtypes(device):
        problem = Problem.random([(1, 1), (70, 70), (5, 200), (1, 64), (33, 65)], *shape, dtype, device)
        problem.check(prefill(problem, block_n=32, num_stages=2))


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (32, 32), (128, 64)])
def test_prefill_configurations_agree(device: torch.device, block_m: int, block_n: int) -> None:
    problem = Problem.random([(150, 150), (3, 260), (40, 300)], 6, 2, 64, 16, torch.float16, device)
    problem.check(prefill(problem, block_m=block_m, block_n=block_n, num_stages=2))


def test_prefill_of_a_slice_of_rows_and_many_empty_ones(device: torch.device) -> None:
    """query_start need not begin at 0: a batch's prefill rows can be given without its decode rows."""
    problem = Problem.random([(1, 40), (1, 9), (30, 80), (0, 0), (2, 2), (0, 0)], 4, 2, 64, 16, torch.float16, device)
    chosen = torch.arange(len(problem.q), device=device) >= 2
    tail = Problem(**{**vars(problem), "rows": problem.rows[2:]})
    tail.row_slots, tail.seq_lens, tail.query_start = (
        problem.row_slots[2:], problem.seq_lens[2:], problem.query_start[2:],
    )  # fmt: skip
    problem.check(prefill(tail), chosen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
def test_a_captured_step_serves_other_lengths(device: torch.device) -> None:
    from mizzen.kernels.triton.decode_attention import DecodeConfig, PagedDecode
    from mizzen.kernels.triton.prefill_attention import PagedPrefill

    def problem(rows: list[tuple[int, int]]) -> Problem:
        return Problem.random([*rows, (0, 2000)], 8, 2, 128, 16, torch.bfloat16, device)

    first, second = problem([(1, 70), (1, 3), (100, 100)]), problem([(1, 1900), (90, 1000), (11, 11)])
    out = first.poisoned()
    attention = PagedDecode(
        num_heads=8, kv_heads=2, head_dim=128, page_size=16, max_rows=8, device=device, config=DecodeConfig()
    )
    chunks = PagedPrefill(
        num_heads=8, kv_heads=2, head_dim=128, page_size=16, max_tokens=102, max_rows=8, device=device
    )

    def step() -> None:
        rows = first.page_table, first.row_slots, first.seq_lens, first.query_start
        attention.plan(*rows)
        chunks.plan(102, *rows, min_tokens=2)
        attention.forward(first.q, first.k, first.v, out)
        chunks.forward(first.q, first.k, first.v, out)

    step()
    first.check(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name in ("q", "k", "v", "page_table", "row_slots", "seq_lens", "query_start"):
        getattr(first, name).copy_(getattr(second, name))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    second.check(out)


@pytest.mark.parametrize("prefill_rows", [5, 200])
def test_rows_of_a_few_tokens_are_attended_whole(device: torch.device, prefill_rows: int) -> None:
    """200 rows leave less room for each: some of theirs are too long to be split into tokens."""
    from mizzen.attention.base import Batch, KVTensors
    from mizzen.attention.triton import TritonBackend

    rows = [(1, 40), (1, 1), (16, 90), (17, 60), (2, 2), (3, 30), (40, 41)]
    rows += [(2, 3), (3, 3)] * ((prefill_rows - 5) // 2) + [(2, 3)] * ((prefill_rows - 5) % 2)
    problem = Problem.random(rows, 4, 2, 64, 16, torch.float16, device)
    backend = TritonBackend(
        KVTensors([problem.k], [problem.v]), num_heads=4, max_rows=256, max_tokens=1024, device=device
    )
    batch = Batch(
        token_ids=torch.zeros(len(problem.q), dtype=torch.int64, device=device),
        positions=problem.seq_lens,
        kv_slots=problem.seq_lens,
        page_table=problem.page_table,
        row_slots=problem.row_slots,
        seq_lens=problem.seq_lens,
        query_start=problem.query_start,
        sample_tokens=problem.seq_lens,
        num_decode_rows=2,
        seq_lens_host=[],
        query_start_host=[],
    )
    backend.plan(batch)
    out = backend.forward(problem.q, 0).view(problem.q.shape)
    problem.check(out)


def test_pages_that_are_no_power_of_two_are_refused_by_their_setting() -> None:
    from mizzen.attention.base import KVTensors
    from mizzen.attention.triton import TritonBackend
    from mizzen.errors import ConfigError

    cpu = torch.device("cpu")
    kv = KVTensors.allocate(1, 1, 24, 1, 64, torch.float16, cpu)
    with pytest.raises(ConfigError, match="power of two of tokens, not 24") as caught:
        TritonBackend(kv, num_heads=1, max_rows=1, max_tokens=1, device=cpu)
    assert caught.value.setting == "MIZZEN_PAGE_SIZE"
