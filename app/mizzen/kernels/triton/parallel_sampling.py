"""The sampler where ranks have a part of the logits each: they exchange statistics of blocks, candidates and tokens.

Each rank's first kernel is that of kernels/triton/sampling.py. The statistics of all blocks, 8 bytes a block and row,
let every rank find the block that holds u * total; the rank that has it draws. A second exchange adds the ranks'
tokens, of which all but one are 0. The twin is model_runner/parallel_sampler.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mizzen.distributed.group import ProcessGroup
from mizzen.kernels.triton.sampling import BLOCK, block_stats, draw, keep_sums
from mizzen.kernels.triton.slots import SampledRows, SlotParams
from mizzen.kernels.triton.top_k import draw_top_k_of_shards

STORE_BLOCK = 256


@triton.jit
def _store_kernel(tokens, num_rows, slots, seq_lens, token_table, token_stride, out, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    token = tl.load(tokens + row, mask=exists)
    slot = tl.load(slots + row, mask=exists).to(tl.int64)
    tl.store(token_table + slot * token_stride + tl.load(seq_lens + row, mask=exists), token, mask=exists)
    tl.store(out + row, token, mask=exists)


def sample_shards(
    logits: Tensor,
    rows: SampledRows,
    params: SlotParams,
    group: ProcessGroup,
    start: int,
    *,
    min_p: bool = False,
    top_k: bool = False,
    block: int = BLOCK,
) -> None:
    """Draws a token for each row of the ranks' logits, [S, width] each, this one's from token ``start`` on; -inf where
    there is no token. A collective; the tokens are the same on all ranks.

    ``min_p``, ``top_k``: whether any row has min_p, or a top_k of 1 to 64. Rows with a larger one, or with top_p alone,
    cannot be drawn without gathering logits: what they get is no token of theirs."""
    if not len(logits):
        return
    stats, group_maxima = block_stats(logits, rows, params, filtered=top_k, block=block)
    maxima, sums = stats.unbind(0)
    if min_p:
        all_maxima = group.all_gather(maxima, dim=-1)
        keep_sums(logits, rows, params, maxima, sums, all_maxima, block=block, pdl=False)
        all_sums = group.all_gather(sums, dim=-1)
    else:
        all_maxima, all_sums = group.all_gather(stats, dim=-1).unbind(0)
    mine = SampledRows(rows.slots, rows.seq_lens, rows.token_table, torch.empty_like(rows.out))
    first_block = group.rank * maxima.shape[1]
    draw(
        logits,
        mine,
        params,
        all_maxima,
        all_sums,
        min_p=min_p,
        filtered=top_k,
        block=block,
        pdl=False,
        start=start,
        first_block=first_block,
    )
    tokens = group.all_reduce(mine.out)
    if top_k:
        found = SampledRows(rows.slots, rows.seq_lens, rows.token_table, tokens)
        draw_top_k_of_shards(logits, found, params, group_maxima, group, start)
    _store_kernel[(triton.cdiv(len(tokens), STORE_BLOCK),)](
        tokens,
        len(tokens),
        rows.slots,
        rows.seq_lens,
        rows.token_table,
        rows.token_table.stride(0),
        rows.out,
        BLOCK=STORE_BLOCK,
    )
