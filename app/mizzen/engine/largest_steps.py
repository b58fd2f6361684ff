"""The steps that need the most memory: run once before the KV cache is sized, so that none needs more while it serves.

A step's memory grows with its tokens (activations), with its sampled rows (logits, each asked for all that a sampler
can do) and, where tokens are penalized, with the longest sequence. Their KV goes to page 0, the dummy page of a pool
that has no other: a page table begins as zeros.
"""

import numpy as np

from mizzen.sampling_params import MAX_LOGPROBS, SamplingParams
from mizzen.scheduler.output import SchedulerOutput, SlotStart

COSTLY = SamplingParams(
    top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=MAX_LOGPROBS, seed=0
)


def largest_steps(*, max_batch_tokens: int, max_running_requests: int, max_model_len: int) -> list[SchedulerOutput]:
    """One of prompts that spend the token budget on as many rows as may run, one that decodes them all, the first at
    the end of the longest sequence."""
    rows = min(max_running_requests, max_batch_tokens)
    return [
        _step(prompt_lengths(max_batch_tokens, rows, max_model_len), decode=False),
        _step([max_model_len, *[1] * (rows - 1)], decode=True),
    ]


def prompt_lengths(tokens: int, rows: int, longest: int) -> list[int]:
    """So many prompts with so many tokens in all, or as many as fit, the first ones as long as they may be."""
    lengths, spare = [], tokens - rows
    for _ in range(rows):
        lengths.append(min(longest, 1 + spare))
        spare -= lengths[-1] - 1
    return lengths


def _step(lengths: list[int], *, decode: bool) -> SchedulerOutput:
    """A request of each length starts; to decode, all of its tokens but the last are in the KV cache already."""
    rows, counts = np.arange(len(lengths), dtype=np.int32), np.array(lengths, np.int32)
    num_computed = counts - 1 if decode else np.zeros_like(counts)
    nothing = np.empty(0, np.int32)
    return SchedulerOutput(
        step=0,
        slots=rows,
        num_computed=num_computed,
        num_scheduled=counts - num_computed,
        samples=np.ones(len(rows), np.bool_),
        num_decode_rows=len(rows) if decode else 0,
        started=[
            SlotStart(slot, slot, np.zeros(length, np.int32), length, int(num_computed[slot]), COSTLY, 0)
            for slot, length in enumerate(lengths)
        ],
        page_slots=nothing,
        page_columns=nothing,
        page_ids=nothing,
    )
