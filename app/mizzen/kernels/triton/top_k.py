"""top_k up to 64, then top_p and min_p, without a sort and without a second read of the logits.

The k groups of neighbouring tokens with the largest maxima hold the k largest tokens: every other group lies wholly
below k tokens. Equal tokens count in the order of the vocabulary, groups too: the choice is exact, and always the same.
The k-th largest of anything is found bit by bit: the largest value that at least k elements reach.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.distributed.group import ProcessGroup
from mizzen.kernels.triton.launch import pdl_options
from mizzen.kernels.triton.slots import SampledRows, SlotParams, draw_arguments

MAX_TOP_K = 64
GROUP = 64  # tokens whose maximum the first pass leaves
LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(float("-inf"))

# Leading bits in which any two different float32 made from such numbers differ; an even number of them.
KEY_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}


@triton.jit
def load_block(logits_row, start, vocab, BLOCK: tl.constexpr):
    """[BLOCK] float32, -inf beyond the vocabulary. Whole blocks load without a mask: 16 bytes at a time."""
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= vocab:
        x = tl.load(logits_row + offsets).to(tl.float32)
    else:
        x = tl.load(logits_row + offsets, mask=offsets < vocab, other=NONE).to(tl.float32)
    return x


@triton.jit
def in_vocabulary(token, vocab):
    """Of logits that are all NaN any token may be drawn, but one that exists: the next step reads its embedding."""
    return tl.minimum(tl.maximum(token, 0), vocab - 1)


@triton.jit
def min_p_threshold(largest, temperature, min_p):
    """What a row's logits must reach; rows without min_p keep everything."""
    return tl.where(min_p > 0, largest + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0)), NONE)


@triton.jit
def ordered(x, BITS: tl.constexpr):
    """Unsigned integers in the order of float32 x, of the leading BITS bits."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return ordered >> (32 - BITS)


@triton.jit
def _first_k(keys, k, BITS: tl.constexpr):
    """Which of keys [N] are the k largest, the earlier of equal ones first; and how many of those stand before each."""
    threshold = tl.zeros((), tl.uint32)
    for step in tl.static_range(BITS):
        candidate = threshold | (1 << (BITS - 1 - step))
        reach = tl.sum((keys >= candidate).to(tl.int32), 0)
        threshold = tl.where(reach >= k, candidate, threshold)
    above = (keys > threshold).to(tl.int32)
    equal = (keys == threshold).to(tl.int32)
    chosen = (above == 1) | ((equal == 1) & (tl.cumsum(equal, 0) <= k - tl.sum(above, 0)))
    return chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1


@triton.jit
def _find_candidates(
    logits,
    vocab,
    group_maxima,
    chosen_groups,
    values,
    ids,
    k,
    START: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
):
    """A row's k largest logits and their tokens, in the order of the vocabulary, whose first is token START."""
    groups = tl.arange(0, NUM_GROUPS_PADDED)
    of_group = tl.load(group_maxima + groups, mask=groups < NUM_GROUPS, other=NONE)
    chosen, place = _first_k(ordered(of_group, BITS), k, BITS)
    tl.store(chosen_groups + place, groups, mask=chosen)
    tl.debug_barrier()

    element = tl.arange(0, K * GROUP)
    held = element // GROUP < k
    group = tl.load(chosen_groups + element // GROUP, mask=held, other=0)
    token_ids = group * GROUP + element % GROUP
    x = tl.load(logits + token_ids, mask=held & (token_ids < vocab), other=NONE).to(tl.float32)
    chosen, place = _first_k(ordered(x, BITS), k, BITS)
    tl.store(values + place, x, mask=chosen)
    tl.store(ids + place, START + in_vocabulary(token_ids, vocab), mask=chosen)
    tl.debug_barrier()


@triton.jit
def _draw_candidate(values, ids, k, temperature, top_p, min_p, uniform, K: tl.constexpr):
    """A row's token from its k candidates."""
    # The candidates, in the order of the vocabulary.
    index = tl.arange(0, K)
    value = tl.load(values + index, mask=index < k, other=NONE)
    token_id = tl.load(ids + index, mask=index < k, other=0)
    scaled = tl.div_rn(value, temperature)
    largest = tl.max(scaled, 0)
    weights = tl.exp2((scaled - largest) * LOG2_E)
    # Who stands before whom: the second axis before the first. Every value is there twice, as a row and as a column.
    index_2 = tl.arange(0, K)
    value_2 = tl.load(values + index_2, mask=index_2 < k, other=NONE)
    weights_2 = tl.exp2((tl.div_rn(value_2, temperature) - largest) * LOG2_E)
    ahead = (value_2[None, :] > value[:, None]) | (
        (value_2[None, :] == value[:, None]) & (index_2[None, :] < index[:, None])
    )
    mass_before = tl.sum(tl.where(ahead, weights_2[None, :], 0.0), 1) / tl.sum(weights, 0)
    num_before = tl.sum(ahead.to(tl.int32), 1)
    kept = (mass_before < top_p) | (num_before == 0)
    kept = kept & (value >= min_p_threshold(tl.max(value, 0), temperature, min_p))
    weights = tl.where(kept, weights, 0.0).to(tl.float64)

    ends = tl.cumsum(weights, 0)
    passed = tl.sum((ends <= uniform * tl.sum(weights, 0)).to(tl.int32), 0)
    passed = tl.minimum(passed, tl.max(tl.where(weights > 0, index, 0), 0))
    return tl.sum(tl.where(index == passed, token_id, 0), 0)


@triton.jit(do_not_specialize_on_alignment=["slots", "seq_lens"])
def _draw_top_k_kernel(
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
    group_maxima,
    chosen_groups,
    values,
    ids,
    token_table,
    token_stride,
    out,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(seq_lens + row)
    temperature = tl.load(temperatures + slot * float_stride)
    top_k = tl.load(top_ks + slot * int_stride).to(tl.int32)
    if (top_k == 0) | (top_k > K) | (temperature == 0):
        return  # drawn by another kernel
    k = top_k

    _find_candidates(
        logits + row * row_stride,
        vocab,
        group_maxima + row * NUM_GROUPS,
        chosen_groups + row * K,
        values + row * K,
        ids + row * K,
        k,
        0,
        NUM_GROUPS,
        NUM_GROUPS_PADDED,
        GROUP,
        K,
        BITS,
    )
    output_index = length - tl.load(num_prompts + slot * int_stride)
    uniform = tl.rand(tl.load(seeds + slot * int_stride), output_index.to(tl.int32)).to(tl.float64)
    top_p, min_p = tl.load(top_ps + slot * float_stride), tl.load(min_ps + slot * float_stride)
    token = _draw_candidate(values + row * K, ids + row * K, k, temperature, top_p, min_p, uniform, K)
    tl.store(token_table + slot * token_stride + length, token)
    tl.store(out + row, token)


@triton.jit
def _shard_top_k_kernel(
    logits,
    row_stride,
    vocab,
    slots,
    temperatures,
    float_stride,
    top_ks,
    int_stride,
    group_maxima,
    chosen_groups,
    values,
    ids,
    START: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
):
    """A rank's candidates: values and ids are columns of one table [S, 2 * K]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    k = tl.load(top_ks + slot * int_stride).to(tl.int32)
    if (k == 0) | (k > K) | (tl.load(temperatures + slot * float_stride) == 0):
        return
    _find_candidates(
        logits + row * row_stride,
        vocab,
        group_maxima + row * NUM_GROUPS,
        chosen_groups + row * K,
        values + row * 2 * K,
        ids + row * 2 * K,
        k,
        START,
        NUM_GROUPS,
        NUM_GROUPS_PADDED,
        GROUP,
        K,
        BITS,
    )


@triton.jit
def _draw_gathered_kernel(
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
    gathered,
    values,
    ids,
    out,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
):
    """gathered [S, SIZE, 2, K] int32: each rank's k candidates, values as bits and ids. The k largest of all are drawn
    from."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    temperature = tl.load(temperatures + slot * float_stride)
    k = tl.load(top_ks + slot * int_stride).to(tl.int32)
    if (k == 0) | (k > K) | (temperature == 0):
        return
    element = tl.arange(0, PADDED)
    place = gathered + row * SIZE * 2 * K + element // K * 2 * K + element % K
    held = (element < SIZE * K) & (element % K < k)
    value = tl.load(place, mask=held, other=0).to(tl.float32, bitcast=True)
    token_id = tl.load(place + K, mask=held, other=0)
    chosen, index = _first_k(ordered(tl.where(held, value, NONE), BITS), k, BITS)
    tl.store(values + row * K + index, value, mask=chosen)
    tl.store(ids + row * K + index, token_id, mask=chosen)
    tl.debug_barrier()
    output_index = tl.load(seq_lens + row) - tl.load(num_prompts + slot * int_stride)
    uniform = tl.rand(tl.load(seeds + slot * int_stride), output_index.to(tl.int32)).to(tl.float64)
    top_p, min_p = tl.load(top_ps + slot * float_stride), tl.load(min_ps + slot * float_stride)
    tl.store(out + row, _draw_candidate(values + row * K, ids + row * K, k, temperature, top_p, min_p, uniform, K))


def draw_top_k(
    logits: Tensor,
    rows: SampledRows,
    params: SlotParams,
    group_maxima: Tensor,
    *,
    pdl: bool = True,
    num_warps: int = 8,
) -> None:
    """Draws the rows with a top_k of 1 to 64. group_maxima [S, groups]: of GROUP tokens each; -inf beyond V."""
    num_rows = len(logits)
    num_groups = group_maxima.shape[1]
    chosen_groups = torch.empty((num_rows, MAX_TOP_K), dtype=torch.int32, device=logits.device)
    ids = torch.empty_like(chosen_groups)
    values = torch.empty((num_rows, MAX_TOP_K), dtype=torch.float32, device=logits.device)
    _draw_top_k_kernel[(num_rows,)](
        *draw_arguments(logits, rows, params),
        group_maxima,
        chosen_groups,
        values,
        ids,
        rows.token_table,
        rows.token_table.stride(0),
        rows.out,
        NUM_GROUPS=num_groups,
        NUM_GROUPS_PADDED=max(triton.next_power_of_2(num_groups), MAX_TOP_K),
        GROUP=GROUP,
        K=MAX_TOP_K,
        BITS=KEY_BITS[logits.dtype],
        num_warps=num_warps,
        **pdl_options(logits.device, pdl),
    )


def draw_top_k_of_shards(
    logits: Tensor, rows: SampledRows, params: SlotParams, group_maxima: Tensor, group: ProcessGroup, start: int
) -> None:
    """Likewise where ranks have a part of the logits each, this one from token ``start`` on: only rows.out is written,
    the same on all ranks."""
    num_rows, vocab = logits.shape
    num_groups = group_maxima.shape[1]
    mine = torch.empty((num_rows, 2, MAX_TOP_K), dtype=torch.int32, device=logits.device)
    ids = torch.empty((num_rows, MAX_TOP_K), dtype=torch.int32, device=logits.device)
    values = torch.empty((num_rows, MAX_TOP_K), dtype=torch.float32, device=logits.device)
    _shard_top_k_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        vocab,
        rows.slots,
        params.temperature,
        params.temperature.stride(0),
        params.top_k,
        params.seeds.stride(0),
        group_maxima,
        ids,
        mine.view(torch.float32),
        mine[:, 1],
        START=start,
        NUM_GROUPS=num_groups,
        NUM_GROUPS_PADDED=max(triton.next_power_of_2(num_groups), MAX_TOP_K),
        GROUP=GROUP,
        K=MAX_TOP_K,
        BITS=KEY_BITS[logits.dtype],
        num_warps=8,
    )
    _draw_gathered_kernel[(num_rows,)](
        rows.slots,
        rows.seq_lens,
        params.temperature,
        params.top_p,
        params.min_p,
        params.temperature.stride(0),
        params.seeds,
        params.num_prompt_tokens,
        params.top_k,
        params.seeds.stride(0),
        group.all_gather(mine.flatten(1), dim=-1),
        values,
        ids,
        rows.out,
        SIZE=group.size,
        PADDED=triton.next_power_of_2(group.size * MAX_TOP_K),
        K=MAX_TOP_K,
        BITS=KEY_BITS[logits.dtype],
        num_warps=8,
    )
