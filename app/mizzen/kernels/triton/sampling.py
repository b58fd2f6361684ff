"""Tokens from logits with one read of them: per-block statistics, then one block of each row again.

The first kernel leaves every block's largest logit and the sum of its weights, exp((logit - largest) / temperature).
The second, one program a row, finds the block in which the cumulated weight passes u * total (for greedy rows, that of
the largest logit) and reads that block alone. u is one Philox number keyed by the request's seed and output index. The
twin is model_runner/sampler.py: the same u and the same inverse CDF, but for rounding in the sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options, warps_for
from mizzen.kernels.triton.slots import SampledRows, SlotParams, draw_arguments
from mizzen.kernels.triton.top_k import GROUP, draw_top_k, in_vocabulary, load_block, min_p_threshold
from mizzen.kernels.triton.top_p import draw_top_p

# Vocabulary entries a program of the first kernel reads. Measured: docs/performance.md, "Sampler".
BLOCK = 4096
PER_THREAD = 32
DRAW_WARPS = 4
TOP_K_WARPS = 8
LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["row_indices", "slots", "maxima", "sums"])
def _block_stats_kernel(
    logits,
    row_stride,
    vocab,
    row_indices,
    slots,
    temperatures,
    float_stride,
    maxima,
    sums,
    group_maxima,
    RAW: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    index = tl.program_id(1).to(tl.int64)
    num_blocks = tl.num_programs(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = index
    scale = LOG2_E
    if RAW:
        row = tl.load(row_indices + index)
    else:
        temperature = tl.load(temperatures + tl.load(slots + index) * float_stride)
        scale = LOG2_E / tl.where(temperature == 0, 1.0, temperature)
    x = load_block(logits + row * row_stride, block * BLOCK, vocab, BLOCK)
    if GROUP:
        NUM: tl.constexpr = BLOCK // GROUP
        largest_of = tl.max(tl.reshape(x, (NUM, GROUP)), 1)
        tl.store(group_maxima + (index * num_blocks + block) * NUM + tl.arange(0, NUM), largest_of)
        largest = tl.max(largest_of, 0)
    else:
        largest = tl.max(x, 0)
    # a block of impossible tokens alone: its weights are exp(-inf), not exp(-inf + inf)
    weights = tl.exp2((x - tl.where(largest == NONE, 0.0, largest)) * scale)
    tl.store(maxima + index * num_blocks + block, largest)
    tl.store(sums + index * num_blocks + block, tl.sum(weights, 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "maxima", "sums"])
def _kept_sums_kernel(
    logits,
    row_stride,
    vocab,
    slots,
    temperatures,
    min_ps,
    float_stride,
    maxima,
    sums,
    all_maxima,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    NUM_BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows with min_p: the sums again, now of the tokens that stay, which takes the row's largest logit.

    all_maxima [S, ALL_BLOCKS]: those of all ranks' blocks; maxima [S, NUM_BLOCKS] on one rank."""
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot * float_stride)
    min_p = tl.load(min_ps + slot * float_stride)
    if (min_p > 0) & (temperature > 0):
        blocks = tl.arange(0, NUM_BLOCKS_PADDED)
        block_maxima = tl.load(all_maxima + row * ALL_BLOCKS + blocks, mask=blocks < ALL_BLOCKS, other=NONE)
        threshold = min_p_threshold(tl.max(block_maxima, 0), temperature, min_p)
        largest = tl.load(maxima + row * NUM_BLOCKS + block)
        if largest < threshold:
            tl.store(sums + row * NUM_BLOCKS + block, 0.0)
        else:
            x = load_block(logits + row * row_stride, block * BLOCK, vocab, BLOCK)
            weights = tl.exp2((x - largest) * (LOG2_E / temperature))
            tl.store(sums + row * NUM_BLOCKS + block, tl.sum(tl.where(x < threshold, 0.0, weights), 0))


@triton.jit(do_not_specialize_on_alignment=["slots", "seq_lens", "maxima", "sums"])
def _draw_kernel(
    logits,
    row_stride,
    vocab,
    slots,
    seq_lens,
    temperatures,
    top_ps,
    min_ps,
    float_stride,
    seeds,
    num_prompts,
    top_ks,
    int_stride,
    maxima,
    sums,
    token_table,
    token_stride,
    out,
    MIN_P: tl.constexpr,
    FILTERED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    SHARDED: tl.constexpr = False,
    FIRST_BLOCK: tl.constexpr = 0,
    OWN_BLOCKS: tl.constexpr = 0,
    START: tl.constexpr = 0,
):
    """SHARDED: the statistics are of all ranks' blocks, the logits of OWN_BLOCKS from FIRST_BLOCK on, which begin at
    token START. The rank that has the block writes the token to ``out``, the others 0."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    temperature = tl.load(temperatures + slot * float_stride)
    greedy = temperature == 0
    if FILTERED:
        top_k, top_p = tl.load(top_ks + slot * int_stride), tl.load(top_ps + slot * float_stride)
        if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
            if SHARDED:
                tl.store(out + row, 0)
            return  # drawn by another kernel
    scale = LOG2_E / tl.where(greedy, 1.0, temperature)
    output_index = length - tl.load(num_prompts + slot * int_stride)
    uniform = tl.rand(tl.load(seeds + slot * int_stride), output_index.to(tl.int32)).to(tl.float64)

    blocks = tl.arange(0, NUM_BLOCKS_PADDED)
    exists = blocks < NUM_BLOCKS
    block_maxima = tl.load(maxima + row * NUM_BLOCKS + blocks, mask=exists, other=NONE)
    block_sums = tl.load(sums + row * NUM_BLOCKS + blocks, mask=exists, other=0.0)
    largest = tl.max(block_maxima, 0)
    factors = tl.exp2((block_maxima - largest) * scale)
    weights = (block_sums * factors).to(tl.float64)
    ends = tl.cumsum(weights, 0)
    target = uniform * tl.sum(weights, 0)
    drawn = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.max(tl.where(weights > 0, blocks, 0), 0))
    first = tl.min(tl.where(block_maxima == largest, blocks, NUM_BLOCKS_PADDED), 0)
    block = tl.where(greedy, first, drawn)
    here = blocks == block
    block_largest = tl.sum(tl.where(here, block_maxima, 0.0), 0)
    factor = tl.sum(tl.where(here, factors, 0.0), 0)
    before = tl.sum(tl.where(blocks == block - 1, ends, 0.0), 0)

    if SHARDED:
        block -= FIRST_BLOCK
        if (block < 0) | (block >= OWN_BLOCKS):
            tl.store(out + row, 0)
            return
    offsets = tl.arange(0, BLOCK)
    x = load_block(logits + row * row_stride, block * BLOCK, vocab, BLOCK)
    token_weights = tl.exp2((x - block_largest) * scale)
    if MIN_P:
        threshold = min_p_threshold(largest, temperature, tl.load(min_ps + slot * float_stride))
        token_weights = tl.where(x < threshold, 0.0, token_weights)
    token_ends = tl.cumsum(token_weights.to(tl.float64), 0)
    passed = tl.sum((token_ends <= (target - before) / factor).to(tl.int32), 0)
    # rounding may put the target past the last possible token of the block
    passed = tl.minimum(passed, tl.max(tl.where(token_weights > 0, offsets, 0), 0))
    offset = tl.where(greedy, tl.min(tl.where(x == block_largest, offsets, BLOCK), 0), passed)
    token = START + in_vocabulary(block * BLOCK + offset, vocab)
    if not SHARDED:
        tl.store(token_table + slot * token_stride + length, token)
    tl.store(out + row, token)


@triton.jit
def _logprobs_kernel(
    logits,
    row_stride,
    row_indices,
    token_ids,
    maxima,
    sums,
    chosen,
    normalizers,
    NUM_BLOCKS: tl.constexpr,
    NUM_BLOCKS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(row_indices + index)
    blocks = tl.arange(0, NUM_BLOCKS_PADDED)
    exists = blocks < NUM_BLOCKS
    block_maxima = tl.load(maxima + index * NUM_BLOCKS + blocks, mask=exists, other=NONE)
    block_sums = tl.load(sums + index * NUM_BLOCKS + blocks, mask=exists, other=0.0)
    largest = tl.max(block_maxima, 0)
    normalizer = largest + tl.log(tl.sum(block_sums * tl.exp(block_maxima - largest), 0))
    logit = tl.load(logits + row * row_stride + tl.load(token_ids + row)).to(tl.float32)
    tl.store(chosen + index, logit - normalizer)
    tl.store(normalizers + index, normalizer)


def sample_tokens(
    logits: Tensor,
    rows: SampledRows,
    params: SlotParams,
    *,
    min_p: bool = False,
    filtered: bool = False,
    pdl: bool = True,
    block: int = BLOCK,
    num_warps: int | None = None,
    draw_warps: int = DRAW_WARPS,
    top_k_warps: int = TOP_K_WARPS,
) -> None:
    """Draws a token for each row of logits [S, V], rows contiguous, of any float type; the logits stay as they are.

    ``min_p``, ``filtered``: whether any row has min_p, top_k or top_p. What a CUDA graph of this holds depends on these
    two and on shapes only; rows without the parameters may be among the others.
    """
    assert logits.stride(1) == 1
    if not len(logits):
        return
    stats, group_maxima = block_stats(logits, rows, params, filtered=filtered, block=block, num_warps=num_warps)
    maxima, sums = stats.unbind(0)
    if min_p:
        keep_sums(logits, rows, params, maxima, sums, maxima, block=block, num_warps=num_warps, pdl=pdl)
    draw(logits, rows, params, maxima, sums, min_p=min_p, filtered=filtered, block=block, num_warps=draw_warps, pdl=pdl)
    if filtered:
        draw_top_k(logits, rows, params, group_maxima, pdl=pdl, num_warps=top_k_warps)
        draw_top_p(logits, rows, params, maxima, block, pdl=pdl)


def block_stats(
    logits: Tensor, rows: SampledRows, params: SlotParams, *, filtered: bool, block: int, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """The first kernel: each block's largest logit and the sum of its weights, [2, S, blocks] float32; and, of use only
    if ``filtered``, the largest of each GROUP."""
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, block)
    group = GROUP if filtered else 0
    stats = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    group_maxima = stats[0]
    if filtered:
        group_maxima = torch.empty((num_rows, num_blocks * (block // group)), dtype=torch.float32, device=logits.device)
    _block_stats_kernel[(num_blocks, num_rows)](
        logits,
        logits.stride(0),
        vocab,
        rows.slots,
        rows.slots,
        params.temperature,
        params.temperature.stride(0),
        stats[0],
        stats[1],
        group_maxima,
        RAW=False,
        GROUP=group,
        BLOCK=block,
        num_warps=num_warps or warps_for(block, PER_THREAD),
        **pdl_options(logits.device, False),  # it follows the output head's GEMM
    )
    return stats, group_maxima


def keep_sums(
    logits: Tensor,
    rows: SampledRows,
    params: SlotParams,
    maxima: Tensor,
    sums: Tensor,
    all_maxima: Tensor,
    *,
    block: int,
    num_warps: int | None = None,
    pdl: bool,
) -> None:
    """Takes what min_p removes out of ``sums``. all_maxima [S, all ranks' blocks]: the row's largest logit is there."""
    num_rows, vocab = logits.shape
    num_blocks, all_blocks = maxima.shape[1], all_maxima.shape[1]
    _kept_sums_kernel[(num_blocks, num_rows)](
        logits,
        logits.stride(0),
        vocab,
        rows.slots,
        params.temperature,
        params.min_p,
        params.temperature.stride(0),
        maxima,
        sums,
        all_maxima,
        NUM_BLOCKS=num_blocks,
        ALL_BLOCKS=all_blocks,
        NUM_BLOCKS_PADDED=triton.next_power_of_2(all_blocks),
        BLOCK=block,
        num_warps=num_warps or warps_for(block, PER_THREAD),
        **pdl_options(logits.device, pdl),
    )


def draw(
    logits: Tensor,
    rows: SampledRows,
    params: SlotParams,
    maxima: Tensor,
    sums: Tensor,
    *,
    min_p: bool,
    filtered: bool,
    block: int,
    num_warps: int = DRAW_WARPS,
    pdl: bool,
    start: int | None = None,
    first_block: int = 0,
) -> None:
    """The second kernel: a token for each row that has neither top_k nor top_p, unless not ``filtered``: then for all.

    With ``start``, logits are those of one rank: its first token, and its first block in ``maxima`` and ``sums``. Then
    rows.out is all that is written: the token, or 0 where another rank or kernel draws the row."""
    num_rows, vocab = logits.shape
    num_blocks = maxima.shape[1]
    _draw_kernel[(num_rows,)](
        *draw_arguments(logits, rows, params),
        maxima,
        sums,
        rows.token_table,
        rows.token_table.stride(0),
        rows.out,
        MIN_P=min_p,
        FILTERED=filtered,
        NUM_BLOCKS=num_blocks,
        NUM_BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        BLOCK=block,
        SHARDED=start is not None,
        FIRST_BLOCK=first_block,
        OWN_BLOCKS=triton.cdiv(vocab, block),
        START=start or 0,
        num_warps=num_warps,
        **pdl_options(logits.device, pdl),
    )


def logprobs(logits: Tensor, indices: Tensor, token_ids: Tensor, *, pdl: bool = True) -> tuple[Tensor, Tensor]:
    """Of rows ``indices`` [K] int64 of the raw logits [S, V]: log-probabilities of token_ids [S] int (all rows'), and
    the normalizers, log-sum-exp, of the rows; both [K] float32."""
    num_rows, vocab = len(indices), logits.shape[1]
    num_blocks = triton.cdiv(vocab, BLOCK)
    stats = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    chosen, normalizers = torch.empty((2, num_rows), dtype=torch.float32, device=logits.device)
    if num_rows:
        options = pdl_options(logits.device, pdl)
        _block_stats_kernel[(num_blocks, num_rows)](
            logits,
            logits.stride(0),
            vocab,
            indices,
            indices,
            stats,
            0,
            stats[0],
            stats[1],
            stats[0],
            RAW=True,
            GROUP=0,
            BLOCK=BLOCK,
            num_warps=warps_for(BLOCK, PER_THREAD),
            **pdl_options(logits.device, False),
        )
        _logprobs_kernel[(num_rows,)](
            logits,
            logits.stride(0),
            indices,
            token_ids,
            stats[0],
            stats[1],
            chosen,
            normalizers,
            NUM_BLOCKS=num_blocks,
            NUM_BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
            num_warps=1,
            **options,
        )
    return chosen, normalizers
