"""A decode step's inputs from the state by slot, in one launch: nothing of it is made on the host."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options

_ROWS = 32  # a warp's worth: rows do not depend on each other


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens"])
def _kernel(
    slots,
    seq_lens,
    token_table,
    page_table,
    token_ids,
    positions,
    kv_slots,
    num_rows,
    token_stride,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + rows, mask=inside, other=0).to(tl.int64)
    position = tl.load(seq_lens + rows, mask=inside, other=1).to(tl.int64) - 1
    token = tl.load(token_table + slot * token_stride + position, mask=inside)
    page = tl.load(page_table + slot * page_stride + position // PAGE_SIZE, mask=inside).to(tl.int64)
    tl.store(token_ids + rows, token.to(tl.int64), mask=inside)
    tl.store(positions + rows, position, mask=inside)
    tl.store(kv_slots + rows, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)


def prepare_decode(
    slots: Tensor,
    seq_lens: Tensor,
    token_table: Tensor,
    page_table: Tensor,
    page_size: int,
    token_ids: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
    *,
    pdl: bool = False,
) -> None:
    """slots and seq_lens [R] int, the step's token counted; token_table [slots, L] and page_table [slots, P] int32.
    Fills token_ids, positions and kv_slots [R] int64. Rows that only pad a graph name a slot kept for them, with a
    page that nobody reads and a length of 1."""
    rows = len(slots)
    assert token_table.stride(1) == page_table.stride(1) == 1
    _kernel[(triton.cdiv(rows, _ROWS),)](
        slots,
        seq_lens,
        token_table,
        page_table,
        token_ids,
        positions,
        kv_slots,
        rows,
        token_table.stride(0),
        page_table.stride(0),
        PAGE_SIZE=page_size,
        ROWS=_ROWS,
        num_warps=1,
        **pdl_options(slots.device, pdl),
    )
