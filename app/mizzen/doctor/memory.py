"""Whether a model fits, worked out from its config.json alone: weights are counted, what steps take is a guess.

The engine measures what this guesses, and has the last word.
"""

from dataclasses import dataclass

from mizzen.models.config import ModelArchitecture

GIB = 2**30
# Of a GPU: context, graphs, the largest steps. Qwen3-14B left 5.9 GiB to them (loadtest/results/memory-14b.json).
STEPS_BYTES = 6 * GIB
CPU_STEPS_BYTES = GIB // 2
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


def num_parameters(arch: ModelArchitecture, ranks: int = 1) -> int:
    """Of one rank out of ``ranks``."""
    heads, kv_heads = arch.num_heads // ranks, arch.kv_heads_per_rank(ranks)
    width, mlp = arch.hidden_size, arch.intermediate_size // ranks
    attention = (2 * heads + 2 * kv_heads) * arch.head_dim * width
    biases = (heads + 2 * kv_heads) * arch.head_dim * arch.qkv_bias + width * arch.output_bias
    biases += (2 * mlp + width) * arch.mlp_bias
    norms = 2 * width + 2 * arch.head_dim * arch.qk_norm
    embeddings = (1 if arch.tie_word_embeddings else 2) * -(-arch.vocab_size // ranks) * width
    return arch.num_layers * (attention + biases + norms + 3 * width * mlp) + embeddings + width


@dataclass(frozen=True, slots=True)
class Fit:
    """Of each rank. ``tokens``: what the KV cache would hold; none or fewer says that the model does not fit."""

    weights_bytes: int
    kv_bytes: int
    tokens: int


def fit(arch: ModelArchitecture, *, ranks: int, itemsize: int, budget_bytes: int, kv_limit: int | None) -> Fit:
    """``budget_bytes``: what one rank may use of its memory, steps aside; ``kv_limit``: bytes that the KV cache takes
    at the most."""
    weights = num_parameters(arch, ranks) * itemsize
    kv_bytes = budget_bytes - weights
    if kv_limit is not None:
        kv_bytes = min(kv_bytes, kv_limit)
    return Fit(weights, max(0, kv_bytes), max(0, kv_bytes) // token_bytes(arch, ranks, itemsize))


def token_bytes(arch: ModelArchitecture, ranks: int, itemsize: int) -> int:
    """Of one token, in one rank's KV cache."""
    return 2 * arch.num_layers * arch.kv_heads_per_rank(ranks) * arch.head_dim * itemsize
