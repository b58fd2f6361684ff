"""How decode attention's work is shared out: the plan of a step, made on the device, and the arithmetic of shares.

A share is a run of consecutive blocks. The first ``large_programs`` shares have ``large`` blocks each, the others what
is left, as equally as can be; without large ones, all are equal.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_rows", "num_programs", "large_programs", "large_percent"],
    do_not_specialize_on_alignment=["seq_lens", "query_start"],
)
def plan_kernel(
    row_slots,
    seq_lens,
    query_start,
    rows_out,
    shares_out,
    num_rows,
    num_programs,
    large_programs,
    large_percent,
    KV_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Each program finds the starts of PROGRAMS shares; the first also writes the rows' records and the total."""
    row = tl.arange(0, ROWS)
    planned = row < num_rows
    length = tl.load(seq_lens + row, mask=planned, other=0)
    slot = tl.load(row_slots + row, mask=planned, other=0)
    token = tl.load(query_start + row, mask=planned, other=0)
    planned = planned & (tl.load(query_start + row + 1, mask=planned, other=0) == token + 1)
    blocks = tl.where(planned, tl.maximum(tl.cdiv(length, BLOCK_N), 1), 0)
    end = tl.cumsum(blocks, 0) * KV_HEADS
    total = tl.sum(blocks, 0) * KV_HEADS

    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    large = total * large_percent // 100 // tl.maximum(large_programs, 1)
    start = start_of(program, total, large, large_programs, num_programs)
    size = start_of(program + 1, total, large, large_programs, num_programs) - start
    before = end[None, :] <= start[:, None]  # [PROGRAMS, ROWS]: the row ends before the share starts
    record = tl.sum((before & planned[None, :]).to(tl.int32), 1)
    first_row = tl.sum(before.to(tl.int32), 1)
    offset = start - tl.max(tl.where(before, end[None, :], 0), 1)  # blocks since the start of its row
    at = row[None, :] == first_row[:, None]
    row_blocks = tl.maximum(tl.sum(tl.where(at, blocks[None, :], 0), 1), 1)
    here = program < num_programs
    share = shares_out + program * 8
    tl.store(share, record, mask=here)
    tl.store(share + 1, offset // row_blocks, mask=here)
    tl.store(share + 2, offset % row_blocks, mask=here)
    tl.store(share + 3, size, mask=here)
    exists = here & (first_row < num_rows)
    tl.store(share + 4, tl.load(seq_lens + first_row, mask=exists, other=0), mask=here)
    tl.store(share + 5, tl.load(row_slots + first_row, mask=exists, other=0), mask=here)
    tl.store(share + 6, tl.load(query_start + first_row, mask=exists, other=0), mask=here)
    if tl.program_id(0) == 0:
        tl.store(shares_out + num_programs * 8, total)
        tl.store(shares_out + num_programs * 8 + 1, large)
        place = (tl.cumsum(planned.to(tl.int32), 0) - 1) * 4
        tl.store(rows_out + place, length, mask=planned)
        tl.store(rows_out + place + 1, slot, mask=planned)
        tl.store(rows_out + place + 2, token, mask=planned)


@triton.jit
def start_of(program, total, large, large_programs, num_programs):
    """The number of the first block of a program's share: large ones first, then as equal ones as can be."""
    small = tl.maximum(program - large_programs, 0)
    rest = total - large * large_programs
    count = num_programs - large_programs
    return large * tl.minimum(program, large_programs) + rest // count * small + tl.minimum(small, rest % count)


@triton.jit
def program_of(block, total, large, large_programs, num_programs):
    """The program whose share holds the block of that number."""
    rest = total - large * large_programs
    count = num_programs - large_programs
    share = rest // count
    extra = rest % count
    small = block - large * large_programs
    longer = extra * (share + 1)
    program = tl.where(small < longer, small // (share + 1), extra + (small - longer) // tl.maximum(share, 1))
    return tl.where(small < 0, block // tl.maximum(large, 1), large_programs + program)
