"""From logits to tokens, for all rows at once. A row's token depends on its own logits, seed and output index only.

Order: log-probabilities come from the raw logits; then logit_bias, repetition, frequency and presence penalties,
min_tokens, temperature, top_k, top_p, min_p. A token is drawn by inverse CDF over block sums, with one Philox number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mizzen.model_runner.philox import philox_uniform

BLOCK = 1024  # vocabulary entries a block sum covers
MAX_CANDIDATES = 64  # top_k up to this works on gathered candidates, beyond it on the sorted row


@dataclass(slots=True)
class Pairs:
    """(row, token) pairs, with a value each where one is needed."""

    rows: Tensor  # [N] int64
    tokens: Tensor  # [N] int64
    values: Tensor | None = None  # [N] float32


@dataclass(slots=True)
class Penalties:
    """Rows with any penalty, with all tokens known of them."""

    rows: Tensor  # [P] int64
    history: Tensor  # [P, L] int64: prompt, then output
    lengths: Tensor  # [P] int64: valid tokens of the history
    num_prompt_tokens: Tensor  # [P] int64
    repetition: Tensor  # [P] float32
    frequency: Tensor  # [P] float32
    presence: Tensor  # [P] float32


@dataclass(slots=True)
class SamplingInputs:
    """What the rows of one step ask for; None where no row asks."""

    slots: Tensor  # [S] int64
    lengths: Tensor  # [S] int64: tokens before the one to be sampled, which is also its place in the token table
    temperature: Tensor  # [S] float32; 0: greedy
    top_k: Tensor  # [S] int64; 0: off
    top_p: Tensor  # [S] float32
    min_p: Tensor  # [S] float32
    seeds: Tensor  # [S] int64
    output_index: Tensor  # [S] int64
    all_greedy: bool
    narrow_rows: Tensor | None = None  # [F] int64: rows with a top_k of at most MAX_CANDIDATES
    max_top_k: int = 0  # of the narrow rows
    wide_rows: Tensor | None = None  # [F] int64: rows with a larger top_k, or with top_p alone
    any_min_p: bool = False
    bias: Pairs | None = None
    banned: Pairs | None = None
    penalties: Penalties | None = None
    logprob_rows: Tensor | None = None  # [K] int64
    num_logprobs: int = 0


@dataclass(slots=True)
class Sampled:
    token_ids: Tensor  # [S] int64
    chosen_logprobs: Tensor | None = None  # [K]
    top_token_ids: Tensor | None = None  # [K, width]
    top_logprobs: Tensor | None = None  # [K, width]


def sample(logits: Tensor, inputs: SamplingInputs) -> Sampled:
    """logits [S, vocab] in the model's dtype; they are not changed. Arithmetic is float32."""
    raw = logits
    logits = process(logits, inputs)
    if inputs.all_greedy:
        token_ids = logits.argmax(-1)
    else:
        greedy = inputs.temperature == 0
        scaled = logits.float() / torch.where(greedy, 1.0, inputs.temperature)[:, None]
        token_ids = torch.where(greedy, logits.argmax(-1), draw(scaled, inputs))
    if inputs.logprob_rows is None:
        return Sampled(token_ids)
    rows = raw[inputs.logprob_rows].float()
    normalizer = rows.logsumexp(-1, keepdim=True)
    chosen = rows.gather(1, token_ids[inputs.logprob_rows][:, None])
    top, top_token_ids = rows.topk(inputs.num_logprobs, -1)
    return Sampled(token_ids, (chosen - normalizer)[:, 0], top_token_ids, top - normalizer)


def process(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """All that changes logits before temperature. Returns float32 if it changes any, else ``logits`` itself."""
    if inputs.bias is None and inputs.penalties is None and inputs.banned is None:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if inputs.bias is not None:
        assert inputs.bias.values is not None
        logits.index_put_((inputs.bias.rows, inputs.bias.tokens), inputs.bias.values, accumulate=True)
    if inputs.penalties is not None:
        penalties = inputs.penalties
        logits[penalties.rows] = penalize(logits[penalties.rows], penalties)
    if inputs.banned is not None:
        logits[inputs.banned.rows, inputs.banned.tokens] = -torch.inf
    return logits


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    """logits [P, vocab] float32. Repetition counts prompt and output, frequency and presence the output alone.

    Counts are made from the history each time: nothing to keep, and nothing to restore after a preemption.
    """
    position = torch.arange(penalties.history.shape[1], device=logits.device)
    valid = position < penalties.lengths[:, None]
    is_output = valid & (position >= penalties.num_prompt_tokens[:, None])
    seen = torch.zeros_like(logits).scatter_add_(1, penalties.history, valid.to(logits.dtype)) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, penalties.history, is_output.to(logits.dtype))
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - penalties.frequency[:, None] * counts - penalties.presence[:, None] * (counts > 0)


def draw(scaled: Tensor, inputs: SamplingInputs) -> Tensor:
    """scaled [S, vocab] float32, temperature applied -> token ids [S]."""
    uniform = philox_uniform(inputs.seeds, inputs.output_index)
    plain = scaled
    if inputs.any_min_p:
        # log(0) is -inf: rows without min_p keep everything
        threshold = scaled.amax(-1, keepdim=True) + inputs.min_p.log()[:, None]
        plain = scaled.masked_fill(scaled < threshold, -torch.inf)
    if inputs.narrow_rows is not None or inputs.wide_rows is not None:
        plain = plain.clone()
    for rows, max_top_k in ((inputs.narrow_rows, inputs.max_top_k), (inputs.wide_rows, 0)):
        if rows is not None:
            plain[rows] = keep_filtered(scaled[rows], inputs.top_k[rows], inputs.top_p[rows], plain[rows], max_top_k)
    return inverse_cdf(plain, uniform)


def inverse_cdf(scaled: Tensor, uniform: Tensor) -> Tensor:
    """scaled [S, vocab] float32 (-inf: impossible), uniform [S] in [0, 1) -> [S] int64.

    Block sums first: a running float32 sum over a whole vocabulary would lose the small probabilities.
    """
    weights, block_ends = weigh(scaled, scaled.amax(-1))
    return search(weights, block_ends, uniform.double() * block_ends[:, -1])


def weigh(scaled: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """exp(scaled - largest) [S, blocks, BLOCK], zeros filling up, and the running sums of its blocks [S, blocks]."""
    rows, vocab = scaled.shape
    num_blocks = -(-vocab // BLOCK)
    weights = torch.exp(scaled - largest[:, None])
    weights = torch.nn.functional.pad(weights, (0, num_blocks * BLOCK - vocab)).view(rows, num_blocks, BLOCK)
    return weights, weights.sum(-1).double().cumsum(-1)


def search(weights: Tensor, block_ends: Tensor, target: Tensor) -> Tensor:
    """Where the running sum of ``weights`` passes target [S] float64; where rounding puts that past all of them, the
    last weight that is not zero."""
    block = first_past(block_ends, target)
    row = torch.arange(len(target), device=target.device)
    start = torch.where(block > 0, block_ends[row, (block - 1).clamp(min=0)], 0.0)
    chosen = weights[row, block]  # [S, BLOCK]
    return block * BLOCK + first_past(chosen.double().cumsum(-1), target - start)


def first_past(ends: Tensor, target: Tensor) -> Tensor:
    """The first of ends [S, N], which never fall, that is over target [S]; at most the first that equals the last."""
    passed = torch.searchsorted(ends, target[:, None], right=True)
    return torch.minimum(passed, torch.searchsorted(ends, ends[:, -1:].contiguous()))[:, 0]


def keep_filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor, plain: Tensor, max_top_k: int) -> Tensor:
    """Rows with top_k or top_p: ``plain`` [F, vocab] with -inf for all that top_k, then top_p remove.

    ``max_top_k`` 0 sorts whole rows. The draw stays in the order of the vocabulary: in sorted order, two tokens whose
    logits are equal but for rounding would change places with the batch's composition, and the draw with them.
    """
    vocab = scaled.shape[1]
    values, ids = (
        largest_first(scaled, min(max_top_k, vocab)) if max_top_k else scaled.sort(dim=-1, descending=True, stable=True)
    )
    rank = torch.arange(values.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    probabilities = torch.softmax(values.masked_fill(rank >= limit, -torch.inf), -1)
    before = probabilities.cumsum(-1) - probabilities
    # a token stays while those before it hold less than top_p; the first always stays
    keep = (before < top_p[:, None]) & (rank < limit)
    keep[:, 0] = True
    kept = torch.full_like(plain, -torch.inf)
    return kept.scatter_(1, ids, plain.gather(1, ids).masked_fill_(~keep, -torch.inf))


def largest_first(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of scaled [F, vocab] float32, in falling order; of equal ones the earlier comes first, as
    torch.topk does not promise: bfloat16 logits are often equal."""
    bits = (scaled + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # integers in the order of the floats
    last = scaled.shape[1] - 1
    keys = bits.to(torch.int64).bitwise_left_shift_(32).add_(torch.arange(last, -1, -1, device=scaled.device))
    ids = last - (keys.topk(count, -1).values & 0xFFFFFFFF)
    return scaled.gather(1, ids), ids
