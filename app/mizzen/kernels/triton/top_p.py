"""top_p alone, or after a top_k too large for candidates; then min_p. No sort: the tokens that stay are those above a
threshold, and, of the tokens that equal it, the first few in the order of the vocabulary.

Thresholds are found two bits at a time, in passes of one program over its row.
Slower than kernels/triton/top_k.py (docs/performance.md, "Sampler"), but the host need not look at anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options
from mizzen.kernels.triton.slots import SampledRows, SlotParams, draw_arguments
from mizzen.kernels.triton.top_k import KEY_BITS, MAX_TOP_K, in_vocabulary, load_block, min_p_threshold, ordered

LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))


@triton.jit
def _reach(
    logits_row, vocab, t1, t2, t3, largest, scale, NUM_BLOCKS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """For three thresholds: how many tokens have keys that reach it, and the sum of their weights."""
    count_1 = tl.zeros((BLOCK,), tl.int32)
    count_2 = tl.zeros((BLOCK,), tl.int32)
    count_3 = tl.zeros((BLOCK,), tl.int32)
    mass_1 = tl.zeros((BLOCK,), tl.float32)
    mass_2 = tl.zeros((BLOCK,), tl.float32)
    mass_3 = tl.zeros((BLOCK,), tl.float32)
    for block in range(NUM_BLOCKS):
        # sums are kept by lane: a reduction a block would wait for each block's load
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_row + offsets, mask=offsets < vocab, other=NONE).to(tl.float32)
        key = ordered(x, BITS)
        weight = tl.exp2((x - largest) * scale)
        count_1 += (key >= t1).to(tl.int32)
        count_2 += (key >= t2).to(tl.int32)
        count_3 += (key >= t3).to(tl.int32)
        mass_1 += tl.where(key >= t1, weight, 0.0)
        mass_2 += tl.where(key >= t2, weight, 0.0)
        mass_3 += tl.where(key >= t3, weight, 0.0)
    return (
        tl.sum(count_1, 0),
        tl.sum(count_2, 0),
        tl.sum(count_3, 0),
        tl.sum(mass_1.to(tl.float64), 0),
        tl.sum(mass_2.to(tl.float64), 0),
        tl.sum(mass_3.to(tl.float64), 0),
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "seq_lens"])
def _draw_top_p_kernel(
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
    kept_sums,
    equal_before,
    token_table,
    token_stride,
    out,
    MAX_TOP_K: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_BLOCKS_PADDED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    temperature = tl.load(temperatures + slot * float_stride)
    top_p = tl.load(top_ps + slot * float_stride)
    top_k = tl.load(top_ks + slot * int_stride)
    if (temperature == 0) | ((top_k > 0) & (top_k <= MAX_TOP_K)) | ((top_k == 0) & (top_p >= 1)):
        return  # drawn by another kernel
    logits_row = logits + row * row_stride
    maxima_row = maxima + row * NUM_BLOCKS
    blocks = tl.arange(0, NUM_BLOCKS_PADDED)
    exists = blocks < NUM_BLOCKS
    largest = tl.max(tl.load(maxima_row + blocks, mask=exists, other=NONE), 0)
    scale = LOG2_E / temperature

    # top_k: the largest threshold that k tokens reach; the k-th token equals it
    k_threshold = tl.zeros((), tl.uint32)
    one = tl.full((), 1, tl.uint32)
    k = tl.minimum(top_k, vocab).to(tl.int32)
    if k > 0:
        for step in range(BITS // 2):
            bit = one << (BITS - 2 - 2 * step)
            c1, c2, c3, _m1, _m2, _m3 = _reach(
                logits_row,
                vocab,
                k_threshold + bit,
                k_threshold + 2 * bit,
                k_threshold + 3 * bit,
                largest,
                scale,
                NUM_BLOCKS,
                BITS,
                BLOCK,
            )
            k_threshold += bit * ((c1 >= k).to(tl.uint32) + (c2 >= k).to(tl.uint32) + (c3 >= k).to(tl.uint32))
    count, count_above, _c3, total, mass_above, _m3 = _reach(
        logits_row, vocab, k_threshold, k_threshold + 1, k_threshold, largest, scale, NUM_BLOCKS, BITS, BLOCK
    )
    k_equal = k - count_above
    if k > 0:
        total = mass_above + (total - mass_above) * (k_equal.to(tl.float64) / (count - count_above).to(tl.float64))

    # top_p: the largest threshold whose tokens hold top_p of that; above it all tokens stay
    wanted = total * top_p.to(tl.float64)
    threshold = tl.zeros((), tl.uint32)
    for step in range(BITS // 2):
        bit = one << (BITS - 2 - 2 * step)
        _c1, _c2, _c3, m1, m2, m3 = _reach(
            logits_row,
            vocab,
            threshold + bit,
            threshold + 2 * bit,
            threshold + 3 * bit,
            largest,
            scale,
            NUM_BLOCKS,
            BITS,
            BLOCK,
        )
        threshold += bit * ((m1 >= wanted).to(tl.uint32) + (m2 >= wanted).to(tl.uint32) + (m3 >= wanted).to(tl.uint32))
    # rounding of the sums, with top_p 1, may not let in what top_k removed
    threshold = tl.maximum(threshold, k_threshold)
    count_from, count_above, _c3, mass_from, mass_above, _m3 = _reach(
        logits_row, vocab, threshold, threshold + 1, threshold, largest, scale, NUM_BLOCKS, BITS, BLOCK
    )
    # of the tokens that equal it, those stay before which there is less than wanted
    each = (mass_from - mass_above) / tl.maximum(count_from - count_above, 1).to(tl.float64)
    num_equal = tl.ceil(tl.where(each > 0, (wanted - mass_above) / tl.where(each > 0, each, 1.0), 1.0))
    num_equal = tl.minimum(tl.maximum(num_equal, 1.0), vocab.to(tl.float64)).to(tl.int32)
    num_equal = tl.where((k > 0) & (threshold == k_threshold), tl.minimum(num_equal, k_equal), num_equal)

    # Sums of what stays, min_p applied, and from them the token.
    least = min_p_threshold(largest, temperature, tl.load(min_ps + slot * float_stride))
    seen = tl.zeros((), tl.int32)
    for block in range(NUM_BLOCKS):
        tl.store(equal_before + row * NUM_BLOCKS + block, seen)
        kept_sum = tl.zeros((), tl.float32)
        if ordered(tl.load(maxima_row + block), BITS) >= threshold:
            x = load_block(logits_row, block * BLOCK, vocab, BLOCK)
            key = ordered(x, BITS)
            equal = (key == threshold).to(tl.int32)
            kept = (key > threshold) | ((equal == 1) & (seen + tl.cumsum(equal, 0) <= num_equal))
            kept = kept & (x >= least)
            kept_sum = tl.sum(tl.where(kept, tl.exp2((x - largest) * scale), 0.0), 0)
            seen += tl.sum(equal, 0)
        tl.store(kept_sums + row * NUM_BLOCKS + block, kept_sum)
    tl.debug_barrier()

    output_index = length - tl.load(num_prompts + slot * int_stride)
    uniform = tl.rand(tl.load(seeds + slot * int_stride), output_index.to(tl.int32)).to(tl.float64)
    block_sums = tl.load(kept_sums + row * NUM_BLOCKS + blocks, mask=exists, other=0.0).to(tl.float64)
    ends = tl.cumsum(block_sums, 0)
    target = uniform * tl.sum(block_sums, 0)
    block = tl.minimum(tl.sum((ends <= target).to(tl.int32), 0), tl.max(tl.where(block_sums > 0, blocks, 0), 0))
    before = tl.sum(tl.where(blocks == block - 1, ends, 0.0), 0)
    offsets = tl.arange(0, BLOCK)
    x = load_block(logits_row, block * BLOCK, vocab, BLOCK)
    key = ordered(x, BITS)
    equal = (key == threshold).to(tl.int32)
    seen = tl.load(equal_before + row * NUM_BLOCKS + block)
    kept = (key > threshold) | ((equal == 1) & (seen + tl.cumsum(equal, 0) <= num_equal))
    kept = kept & (x >= least)
    weights = tl.where(kept, tl.exp2((x - largest) * scale), 0.0)
    passed = tl.sum((tl.cumsum(weights.to(tl.float64), 0) <= target - before).to(tl.int32), 0)
    passed = tl.minimum(passed, tl.max(tl.where(weights > 0, offsets, 0), 0))
    token = in_vocabulary(block * BLOCK + passed, vocab)
    tl.store(token_table + slot * token_stride + length, token)
    tl.store(out + row, token)


def draw_top_p(
    logits: Tensor,
    rows: SampledRows,
    params: SlotParams,
    maxima: Tensor,
    block: int,
    *,
    pdl: bool = True,
    num_warps: int = 8,
) -> None:
    """Draws the rows with top_k over 64, or with top_p and no top_k. maxima [S, blocks]: of ``block`` logits each."""
    num_rows = len(logits)
    num_blocks = maxima.shape[1]
    kept_sums = torch.empty_like(maxima)
    equal_before = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    _draw_top_p_kernel[(num_rows,)](
        *draw_arguments(logits, rows, params),
        maxima,
        kept_sums,
        equal_before,
        rows.token_table,
        rows.token_table.stride(0),
        rows.out,
        MAX_TOP_K=MAX_TOP_K,
        NUM_BLOCKS=num_blocks,
        NUM_BLOCKS_PADDED=triton.next_power_of_2(num_blocks),
        BITS=KEY_BITS[logits.dtype],
        BLOCK=block,
        num_warps=num_warps,
        **pdl_options(logits.device, pdl),
    )
