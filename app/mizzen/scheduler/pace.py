"""How many tokens a step should take under longest-output, where the whole work is known beforehand.

Nothing ends sooner than its longest request. Steps that are larger than it takes to be done by then only leave small
ones for the end, which read all weights for few tokens; smaller ones make the end later. Prompts must be through
earlier, by what the shortest of those that wait has to generate.
"""

import numpy as np

from mizzen.scheduler.running import Running
from mizzen.scheduler.slots import Slots
from mizzen.scheduler.waiting import WaitingQueue

TILE = 256  # tokens: GEMMs of what lies between take as long as the next multiple (docs/performance.md)


def paced_budget(limit: int, running: Running, waiting: WaitingQueue, slots: Slots) -> int:
    """Tokens for the next step: a multiple of TILE, at least one a running request, at most ``limit``."""
    order = running.order
    left = slots.max_len[order] - slots.num_computed[order]  # prompt and output, per request
    work = int(left.sum()) + waiting.num_tokens
    steps = int(np.minimum(left, slots.max_len[order] - slots.num_prompt[order]).max(initial=0))
    if len(waiting):
        longest, shortest = (state.max_len - state.num_prompt_tokens for state in waiting.ends)
        steps = max(steps, longest) - shortest
    tokens = max(-(-work // max(steps, 1)), len(order))
    return min(-(-tokens // TILE) * TILE, limit)
