"""Rows of a few tokens become rows of one token each, so that decode attention, which cuts long histories among many
programs, serves them: a prefill tile walks its row's keys alone, which takes longer than a step's whole decode rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


class ShortRows:
    """``max_rows``: the most that ``split`` may return."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._slots, self._lens, self._starts = (
            torch.zeros(max_rows + 1, dtype=torch.int32, device=device) for _ in range(3)
        )

    def split(
        self, row_slots: Tensor, seq_lens: Tensor, query_start: Tensor, *, max_tokens: int, num_rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """row_slots [R], seq_lens [R], query_start [R + 1], all int32, in the same form, of ``num_rows`` rows: a row of
        2 to ``max_tokens`` tokens is replaced by one row a token, others stay, rows without tokens fill up. The caller
        knows that they suffice. The tensors returned are overwritten by the next call."""
        rows = len(seq_lens)
        assert rows <= num_rows < len(self._slots)
        _kernel[(1,)](
            row_slots,
            seq_lens,
            query_start,
            self._slots,
            self._lens,
            self._starts,
            rows,
            num_rows,
            max_tokens,
            ROWS=max(16, triton.next_power_of_2(num_rows)),  # of what few values there are: each is compiled anew
            PLACES=triton.next_power_of_2(num_rows + 1),
            num_warps=8,
        )
        return self._slots[:num_rows], self._lens[:num_rows], self._starts[: num_rows + 1]


@triton.jit(
    do_not_specialize=["num_rows", "num_places", "max_tokens"],
    do_not_specialize_on_alignment=["seq_lens", "query_start"],
)
def _kernel(
    row_slots,
    seq_lens,
    query_start,
    slots_out,
    lens_out,
    starts_out,
    num_rows,
    num_places,
    max_tokens,
    ROWS: tl.constexpr,
    PLACES: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.load(row_slots + row, mask=inside, other=0)
    length = tl.load(seq_lens + row, mask=inside, other=0)
    start = tl.load(query_start + row, mask=inside, other=0)
    tokens = tl.load(query_start + row + 1, mask=inside, other=0) - start
    short = (tokens > 1) & (tokens <= max_tokens)
    parts = tl.where(inside, tl.where(short, tokens, 1), 0)
    first = tl.cumsum(parts, 0) - parts
    for part in tl.range(0, max_tokens):
        exists = part < parts
        tl.store(slots_out + first + part, slot, mask=exists)
        tl.store(lens_out + first + part, tl.where(short, length - tokens + part + 1, length), mask=exists)
        tl.store(starts_out + first + part, start + part, mask=exists)
    place = tl.arange(0, PLACES)
    rest = (place >= tl.sum(parts, 0)) & (place <= num_places)
    tl.store(lens_out + place, tl.zeros([PLACES], tl.int32), mask=rest)
    tl.store(starts_out + place, tl.load(query_start + num_rows + place * 0, mask=rest, other=0), mask=rest)
