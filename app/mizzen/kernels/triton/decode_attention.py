"""Paged decode attention, scheduled on the device: no host plan, one launch a layer, a grid that never changes.

The work of a step is cut into blocks of BLOCK_N keys of one (row, KV head), numbered row by row, head by head, and
program p of P takes an equal, contiguous share of them ("stream-K", Osama et al., 2023). So all programs finish
together whatever the lengths. A (row, head) that lies within one share is written at once; of one that is cut, each
part is left in the workspace, and the part that arrives last combines them. ``plan`` (once a step) finds where each
share starts; all layers use it. All query heads of a KV head are one tile, padded to 16 rows for the tensor cores, so
that keys and values are read once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options
from mizzen.kernels.triton.paging import pages_of

_PLAN_PROGRAMS = 16  # shares that one program of the plan finds


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``programs_per_sm``: shares a multiprocessor; ``tail_percent``: of the work, that is cut into as many shares
    again, small ones, for whoever is free first; ``pdl``: launch while the kernel before still runs (sm90)."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    prefetch: bool = True
    max_registers: int | None = None
    tail_percent: int = 0
    pdl: bool = False


class PagedDecode:
    """Attention of rows with one new token each; owns the workspace. q, out: [T, heads, D] bf16 or fp16; caches:
    [pages, page_size, KV heads, D]. Page sizes are powers of two."""

    def __init__(
        self,
        *,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        max_rows: int,
        device: torch.device,
        config: DecodeConfig | None = None,
    ) -> None:
        assert num_heads % kv_heads == 0
        assert page_size & (page_size - 1) == 0
        self._kv_heads, self._head_dim, self._page_size = kv_heads, head_dim, page_size
        self._group = num_heads // kv_heads
        self._scale = head_dim**-0.5 * 1.4426950408889634  # exp(x) = exp2(x * log2(e))
        self._config = config or DecodeConfig()
        self._programs = _num_multiprocessors(device) * self._config.programs_per_sm
        self._large_programs = 0
        if self._config.tail_percent:
            self._large_programs = self._programs
            self._programs *= 2
        self._page_table: Tensor

        def int32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._rows = int32(max_rows + 1, 4)  # of decode row i: length, page table row, token, and nothing
        self._shares = int32(
            self._programs + 1, 4
        )  # row, head, block, number of blocks; last: the total, a large share
        self._arrived = int32(max_rows * kv_heads)  # zero between launches
        parts = 2 * self._programs * self._group
        self._part_out = torch.empty((parts, head_dim), dtype=torch.float32, device=device)
        self._part_stats = torch.empty((parts, 2), dtype=torch.float32, device=device)  # maximum, sum

    def plan(self, page_table: Tensor, row_slots: Tensor, seq_lens: Tensor, query_start: Tensor) -> None:
        """``page_table`` [slots, max_pages], ``row_slots`` [R], ``seq_lens`` [R], ``query_start`` [R + 1], all int32.

        Rows that have not exactly one token are left to other kernels; one of length 0 gets zeros. With PDL, the plan
        must not be the launch just ahead of the first ``forward``.
        """
        rows = len(seq_lens)
        assert rows <= len(self._rows)
        self._page_table = page_table
        _plan_kernel[(triton.cdiv(self._programs, _PLAN_PROGRAMS),)](
            row_slots,
            seq_lens,
            query_start,
            self._rows,
            self._shares,
            rows,
            self._programs,
            self._large_programs,
            100 - self._config.tail_percent,
            KV_HEADS=self._kv_heads,
            BLOCK_N=self._config.block_n,
            ROWS=max(16, triton.next_power_of_2(rows)),
            PROGRAMS=_PLAN_PROGRAMS,
            num_warps=8,
        )

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
        """Writes out's planned tokens; others are left alone."""
        assert k_cache.stride() == v_cache.stride()
        assert q.stride(2) == out.stride(2) == k_cache.stride(3) == 1
        assert k_cache.shape[1:] == (self._page_size, self._kv_heads, self._head_dim)
        config = self._config
        _decode_kernel[(self._programs,)](
            q,
            k_cache,
            v_cache,
            out,
            self._page_table,
            self._rows,
            self._shares,
            self._part_out,
            self._part_stats,
            self._arrived,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            k_cache.stride(0),
            k_cache.stride(1),
            k_cache.stride(2),
            self._page_table.stride(0),
            self._scale,
            self._programs,
            self._large_programs,
            KV_HEADS=self._kv_heads,
            GROUP=self._group,
            GROUP_PAD=max(16, triton.next_power_of_2(self._group)),
            HEAD_DIM=self._head_dim,
            HEAD_DIM_PAD=triton.next_power_of_2(self._head_dim),
            PAGE_SIZE=self._page_size,
            BLOCK_N=config.block_n,
            PREFETCH=config.prefetch,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            maxnreg=config.max_registers,
            **pdl_options(q.device, config.pdl),
        )


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 6  # Triton's interpreter: few, but enough to cut rows
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["num_rows", "num_programs", "large_programs", "large_percent"])
def _plan_kernel(
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
    start = _start_of(program, total, large, large_programs, num_programs)
    size = _start_of(program + 1, total, large, large_programs, num_programs) - start
    before = end[None, :] <= start[:, None]  # [PROGRAMS, ROWS]: the row ends before the share starts
    record = tl.sum((before & planned[None, :]).to(tl.int32), 1)
    offset = start - tl.max(tl.where(before, end[None, :], 0), 1)  # blocks since the start of its row
    at = row[None, :] == tl.sum(before.to(tl.int32), 1)[:, None]
    row_blocks = tl.maximum(tl.sum(tl.where(at, blocks[None, :], 0), 1), 1)
    here = program < num_programs
    tl.store(shares_out + program * 4, record, mask=here)
    tl.store(shares_out + program * 4 + 1, offset // row_blocks, mask=here)
    tl.store(shares_out + program * 4 + 2, offset % row_blocks, mask=here)
    tl.store(shares_out + program * 4 + 3, size, mask=here)
    if tl.program_id(0) == 0:
        tl.store(shares_out + num_programs * 4, total)
        tl.store(shares_out + num_programs * 4 + 1, large)
        place = (tl.cumsum(planned.to(tl.int32), 0) - 1) * 4
        tl.store(rows_out + place, length, mask=planned)
        tl.store(rows_out + place + 1, slot, mask=planned)
        tl.store(rows_out + place + 2, token, mask=planned)


@triton.jit
def _start_of(program, total, large, large_programs, num_programs):
    """The number of the first block of a program's share: large ones first, then as equal ones as can be."""
    small = tl.maximum(program - large_programs, 0)
    rest = total - large * large_programs
    count = num_programs - large_programs
    return large * tl.minimum(program, large_programs) + rest // count * small + tl.minimum(small, rest % count)


@triton.jit
def _program_of(block, total, large, large_programs, num_programs):
    """The program whose share holds the block of that number."""
    rest = total - large * large_programs
    count = num_programs - large_programs
    share = rest // count
    extra = rest % count
    small = block - large * large_programs
    longer = extra * (share + 1)
    program = tl.where(small < longer, small // (share + 1), extra + (small - longer) // tl.maximum(share, 1))
    return tl.where(small < 0, block // tl.maximum(large, 1), large_programs + program)


@triton.jit(do_not_specialize=["num_programs", "large_programs"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    page_table,
    rows,
    shares,
    part_out,
    part_stats,
    arrived,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    page_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    scale,
    num_programs,
    large_programs,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    record = tl.load(shares + program * 4)
    head = tl.load(shares + program * 4 + 1)
    block = tl.load(shares + program * 4 + 2)
    left = tl.load(shares + program * 4 + 3)
    total = tl.load(shares + num_programs * 4)
    large = tl.load(shares + num_programs * 4 + 1)
    number = _start_of(program, total, large, large_programs, num_programs)
    length = tl.load(rows + record * 4)
    slot = tl.load(rows + record * 4 + 1)
    token = tl.load(rows + record * 4 + 2)

    dim = tl.arange(0, HEAD_DIM_PAD)
    member = tl.arange(0, GROUP_PAD)
    column = tl.arange(0, BLOCK_N)
    tile_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    part_offset = member[:, None] * HEAD_DIM + dim[None, :]
    if PDL:
        # What is read above was written before the kernel before this one started.
        gdc_wait()
        gdc_launch_dependents()

    while left > 0:
        table = page_table + slot.to(tl.int64) * table_stride
        q_token = q + token.to(tl.int64) * q_token_stride
        out_token = out + token.to(tl.int64) * out_token_stride
        counter = arrived + record * KV_HEADS + head
        row_blocks = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
        taken = tl.minimum(left, row_blocks - block)
        query_head = head * GROUP + member
        queries = tl.load(q_token + query_head[:, None] * q_head_stride + dim[None, :], mask=tile_mask, other=0.0)
        k_head = k_cache + head * kv_head_stride
        v_head = v_cache + head * kv_head_stride
        head += 1
        if head == KV_HEADS:
            head = 0
            record += 1
            # The next row's record, long before it is needed.
            length_after = tl.load(rows + record * 4)
            slot = tl.load(rows + record * 4 + 1)
            token = tl.load(rows + record * 4 + 2)
        else:
            length_after = length

        # Finite, so that a row without keys gives weights of 0 and not NaN.
        maximum = tl.full([GROUP_PAD], -1e30, tl.float32)
        weight = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
        next_page = pages_of(table, block * BLOCK_N, length, column, PAGE_SIZE, BLOCK_N)
        for index in tl.range(block, block + taken):
            first = index * BLOCK_N
            if PREFETCH:
                # A block's pages are read one block ahead, so that its keys need not wait for them.
                page = next_page
                next_page = pages_of(table, first + BLOCK_N, length, column, PAGE_SIZE, BLOCK_N)
            else:
                page = pages_of(table, first, length, column, PAGE_SIZE, BLOCK_N)
            live = first + column < length
            offset = page.to(tl.int64) * page_stride + ((first + column) % PAGE_SIZE) * slot_stride
            offset = offset[:, None] + dim[None, :]
            mask = live[:, None]
            if HEAD_DIM != HEAD_DIM_PAD:
                mask = mask & (dim < HEAD_DIM)[None, :]
            k = tl.load(k_head + offset, mask=mask, other=0.0)
            v = tl.load(v_head + offset, mask=mask, other=0.0)
            scores = tl.dot(queries, tl.trans(k)) * scale
            scores = tl.where(live[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - new_maximum[:, None])
            shrink = tl.exp2(maximum - new_maximum)
            weight = weight * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
            maximum = new_maximum

        done = taken == row_blocks
        if taken < row_blocks:
            part = (2 * program + tl.where(block == 0, 1, 0)) * GROUP
            tl.store(part_out + part * HEAD_DIM + part_offset, acc, mask=tile_mask)
            tl.store(part_stats + (part + member) * 2, maximum, mask=member < GROUP)
            tl.store(part_stats + (part + member) * 2 + 1, weight, mask=member < GROUP)
            start = number - block
            first_program = _program_of(start, total, large, large_programs, num_programs)
            last_program = _program_of(start + row_blocks - 1, total, large, large_programs, num_programs)
            num_parts = last_program - first_program + 1
            tl.debug_barrier()  # all threads' stores come before the one thread's release
            done = tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1
            if done:
                tl.store(counter, 0)
                maximum = tl.full([GROUP_PAD], -1e30, tl.float32)
                weight = tl.zeros([GROUP_PAD], tl.float32)
                acc = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
                for index in tl.range(0, num_parts, num_stages=3):
                    part = (2 * (first_program + index) + tl.where(index == 0, 1, 0)) * GROUP
                    stats = part_stats + (part + member) * 2
                    part_max = tl.load(stats, mask=member < GROUP, other=-1e30, cache_modifier=".cg")
                    part_weight = tl.load(stats + 1, mask=member < GROUP, other=0.0, cache_modifier=".cg")
                    part_acc = tl.load(
                        part_out + part * HEAD_DIM + part_offset, mask=tile_mask, other=0.0, cache_modifier=".cg"
                    )
                    new_maximum = tl.maximum(maximum, part_max)
                    shrink = tl.exp2(maximum - new_maximum)
                    grow = tl.exp2(part_max - new_maximum)
                    acc = acc * shrink[:, None] + part_acc * grow[:, None]
                    weight = weight * shrink + part_weight * grow
                    maximum = new_maximum
        if done:
            result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
            tl.store(
                out_token + query_head[:, None] * out_head_stride + dim[None, :],
                result.to(out.dtype.element_ty),
                mask=tile_mask,
            )
        number += taken
        left -= taken
        block = 0
        length = length_after
