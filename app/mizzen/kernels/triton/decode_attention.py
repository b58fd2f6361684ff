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

from mizzen.kernels.triton.decode_plan import plan_kernel, program_of, start_of
from mizzen.kernels.triton.launch import num_multiprocessors, pdl_options
from mizzen.kernels.triton.paging import pages_of

_PLAN_PROGRAMS = 16  # shares that one program of the plan finds


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Measured on an H200: docs/performance.md, "Decode attention"."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3
    # Multiprocessors are not equally fast: this much of the work is cut into as many shares again, small ones, for
    # those free first. Only from so many (row, KV head) pairs a multiprocessor on: with fewer it costs too much.
    tail_percent: int = 8
    tail_from: int = 3
    pdl: bool = True  # launch while the kernel before still runs (sm90)


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
        self._multiprocessors = num_multiprocessors(device)
        self._programs = self._large_programs = 0  # of the step that is planned
        self._page_table: Tensor

        def int32(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._rows = int32(max_rows + 1, 4)  # of decode row i: length, page table row, token, and nothing
        # Of each program: record, head, block, blocks, length, slot, token; last: blocks in all, a large share.
        max_programs = 2 * self._multiprocessors * self._config.programs_per_sm
        self._shares = int32(max_programs + 1, 8)
        self._arrived = int32(max_rows * kv_heads)  # zero between launches
        parts = 2 * max_programs * self._group
        self._part_out = torch.empty((parts, head_dim), dtype=torch.float32, device=device)
        self._part_stats = torch.empty((parts, 2), dtype=torch.float32, device=device)  # maximum, sum

    def plan(self, page_table: Tensor, row_slots: Tensor, seq_lens: Tensor, query_start: Tensor) -> None:
        """``page_table`` [slots, max_pages], ``row_slots`` [R], ``seq_lens`` [R], ``query_start`` [R + 1], all int32.

        Rows that have not exactly one token are left to other kernels; one of length 0 gets zeros. With PDL, the plan
        must not be the launch just ahead of the first ``forward``.
        """
        rows = len(seq_lens)
        assert rows < len(self._rows)
        self._page_table = page_table
        self._programs, self._large_programs = self._multiprocessors * self._config.programs_per_sm, 0
        if rows * self._kv_heads >= self._config.tail_from * self._multiprocessors:
            self._programs, self._large_programs = 2 * self._programs, self._programs
        plan_kernel[(triton.cdiv(self._programs, _PLAN_PROGRAMS),)](
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

    def forward(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, *, beside_prefill: bool = False
    ) -> None:
        """Writes out's planned tokens; others are left alone. ``beside_prefill``: the launch just ahead is that of
        PagedPrefill.forward on the same tensors, and both run at once where the GPU has PDL."""
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
            GROUP_LOAD=triton.next_power_of_2(self._group),
            HEAD_DIM=self._head_dim,
            HEAD_DIM_PAD=triton.next_power_of_2(self._head_dim),
            PAGE_SIZE=self._page_size,
            BLOCK_N=config.block_n,
            BESIDE_PREFILL=beside_prefill,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **pdl_options(q.device, config.pdl),
        )


@triton.jit
def _combine(
    part_out,
    part_stats,
    first_program,
    num_parts,
    out,
    out_head_stride,
    GROUP: tl.constexpr,
    GROUP_LOAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Adds up the parts of a (row, head). Unrolled, so that many parts are under way at once: waiting for one after the
    other took 0.5 us each."""
    member = tl.arange(0, GROUP_LOAD)
    dim = tl.arange(0, HEAD_DIM_PAD)
    tile_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    maximum = tl.full([GROUP_LOAD], -1e30, tl.float32)
    weight = tl.zeros([GROUP_LOAD], tl.float32)
    acc = tl.zeros([GROUP_LOAD, HEAD_DIM_PAD], tl.float32)
    for first in tl.range(0, num_parts, UNROLL, num_stages=1):
        for step in tl.static_range(UNROLL):
            index = first + step
            # The first part is the last of its program's share, the others the first of theirs.
            row = (2 * (first_program + index) + tl.where(index == 0, 1, 0)) * GROUP
            mask = (member < GROUP) & (index < num_parts)
            stats = part_stats + (row + member) * 2
            part_maximum = tl.load(stats, mask=mask, other=-1e30, cache_modifier=".cg")
            part_weight = tl.load(stats + 1, mask=mask, other=0.0, cache_modifier=".cg")
            part_acc = tl.load(
                part_out + row * HEAD_DIM + member[:, None] * HEAD_DIM + dim[None, :],
                mask=tile_mask & (index < num_parts),
                other=0.0,
                cache_modifier=".cg",
            )
            new_maximum = tl.maximum(maximum, part_maximum)
            shrink = tl.exp2(maximum - new_maximum)
            grow = tl.exp2(part_maximum - new_maximum)
            weight = weight * shrink + part_weight * grow
            acc = acc * shrink[:, None] + part_acc * grow[:, None]
            maximum = new_maximum
    result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(out + member[:, None] * out_head_stride + dim[None, :], result.to(out.dtype.element_ty), mask=tile_mask)


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
    GROUP_LOAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BESIDE_PREFILL: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    record = tl.load(shares + program * 8)
    head = tl.load(shares + program * 8 + 1)
    block = tl.load(shares + program * 8 + 2)
    left = tl.load(shares + program * 8 + 3)
    length = tl.load(shares + program * 8 + 4)
    slot = tl.load(shares + program * 8 + 5)
    token = tl.load(shares + program * 8 + 6)
    total = tl.load(shares + num_programs * 8)
    large = tl.load(shares + num_programs * 8 + 1)
    number = start_of(program, total, large, large_programs, num_programs)

    dim = tl.arange(0, HEAD_DIM_PAD)
    member = tl.arange(0, GROUP_PAD)
    column = tl.arange(0, BLOCK_N)
    tile_mask = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    part_offset = member[:, None] * HEAD_DIM + dim[None, :]
    if PDL:
        # What is read above was written before the kernel before this one started. Beside prefill, so was all else: its
        # programs let this kernel in when each of them has waited for what came before.
        if not BESIDE_PREFILL:
            gdc_wait()
        gdc_launch_dependents()

    while left > 0:
        table = page_table + slot.to(tl.int64) * table_stride
        q_token = q + token.to(tl.int64) * q_token_stride
        out_token = out + token.to(tl.int64) * out_token_stride
        counter = arrived + record * KV_HEADS + head
        row_blocks = tl.maximum(tl.cdiv(length, BLOCK_N), 1)
        taken = tl.minimum(left, row_blocks - block)
        first_head = head * GROUP
        query_head = first_head + member
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
            # A block's pages are read one block ahead, so that its keys need not wait for them.
            page = next_page
            next_page = pages_of(table, first + BLOCK_N, length, column, PAGE_SIZE, BLOCK_N)
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

        if taken == row_blocks:
            result = acc / tl.where(weight > 0, weight, 1.0)[:, None]
            tl.store(
                out_token + query_head[:, None] * out_head_stride + dim[None, :],
                result.to(out.dtype.element_ty),
                mask=tile_mask,
            )
        else:
            part = (2 * program + tl.where(block == 0, 1, 0)) * GROUP
            tl.store(part_out + part * HEAD_DIM + part_offset, acc, mask=tile_mask)
            tl.store(part_stats + (part + member) * 2, maximum, mask=member < GROUP)
            tl.store(part_stats + (part + member) * 2 + 1, weight, mask=member < GROUP)
            start = number - block
            first_program = program_of(start, total, large, large_programs, num_programs)
            last_program = program_of(start + row_blocks - 1, total, large, large_programs, num_programs)
            num_parts = last_program - first_program + 1
            tl.debug_barrier()  # all threads' stores come before the one thread's release
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter, 0)
                _combine(
                    part_out, part_stats, first_program, num_parts, out_token + first_head * out_head_stride,
                    out_head_stride, GROUP, GROUP_LOAD, HEAD_DIM, HEAD_DIM_PAD, 8,
                )  # fmt: skip
        number += taken
        left -= taken
        block = 0
        length = length_after
    if PDL and BESIDE_PREFILL:
        gdc_wait()  # so that whoever waits for this kernel has waited for prefill too
