"""The pages of a step's rows, end to end, from the page tables by slot: one launch, of a shape that never changes.

This is the form that FlashInfer takes page tables in. Each program copies a block of a row's pages behind those of the
rows before it, which it counts anew.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512  # pages that a program copies at a time


@triton.jit(do_not_specialize=["num_rows"])  # else a step of a new size might have to wait for the compiler
def _kernel(
    page_table,
    row_slots,
    seq_lens,
    indptr,
    indices,
    last_page_len,
    num_rows,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    others = tl.arange(0, ROWS)
    lengths = tl.load(seq_lens + others, mask=others < num_rows, other=0)
    pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    start = tl.sum(tl.where(others < row, pages, 0))
    length = tl.load(seq_lens + row)
    count = (length + PAGE_SIZE - 1) // PAGE_SIZE
    if tl.program_id(1) == 0:
        tl.store(indptr + row, start)
        tl.store(indptr + row + 1, start + count)  # the next row's program stores the same
        tl.store(last_page_len + row, length - (count - 1) * PAGE_SIZE)
    table = page_table + tl.load(row_slots + row).to(tl.int64) * page_stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < count
    tl.store(indices + start + columns, tl.load(table + columns, mask=inside), mask=inside)


def page_indices(
    page_table: Tensor,
    row_slots: Tensor,
    seq_lens: Tensor,
    page_size: int,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """page_table [slots, P], row_slots [R], seq_lens [R] (1 or more), all int32. Row r's pages become
    indices[indptr[r] : indptr[r + 1]], and last_page_len[r] how many tokens its last page holds. indptr [R + 1],
    indices [as many pages as the rows have, or more] and last_page_len [R] are int32."""
    rows = len(seq_lens)
    assert len(indptr) == rows + 1
    assert page_table.stride(1) == 1
    _kernel[(rows, triton.cdiv(page_table.shape[1], _BLOCK))](
        page_table,
        row_slots,
        seq_lens,
        indptr,
        indices,
        last_page_len,
        rows,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        ROWS=triton.next_power_of_2(rows),
        BLOCK=_BLOCK,
        num_warps=4,
    )
