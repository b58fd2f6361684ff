"""What the running requests compute in the next step: first those that decode, then chunks, as far as the budget goes.

Planning changes nothing: whom a plan would serve may have to be preempted for another, and then a new one is made.
"""

from typing import Literal, NamedTuple

from mizzen.kv_cache.cache import KVCache
from mizzen.kv_cache.page_tables import PageTables
from mizzen.scheduler.output import Int32
from mizzen.scheduler.running import IntP, Running
from mizzen.scheduler.slots import Slots

# Where batches are not mixed, a step either takes on prompts or decodes.
StepKind = Literal["mixed", "prefill", "decode"]


class Plan(NamedTuple):
    decode: IntP  # slots with one token to compute, in policy order
    decode32: Int32  # the same
    num_computed: Int32  # of these, before the step
    full_pages: IntP  # those of these that need a page
    chunks: list[tuple[int, int]]  # slots in prefill, and how many tokens they compute


def plan_step(
    kind: StepKind, budget: int, running: Running, slots: Slots, pages: PageTables, kv_cache: KVCache
) -> Plan | None:
    """None if the pages do not suffice: the last request has to be preempted. ``budget`` is in tokens."""
    decode, decode32, prefill = running.rows()
    if kind == "prefill":
        decode, decode32 = decode[:0], decode32[:0]
    elif kind == "decode":
        prefill = []
    if len(decode) > budget:
        decode, decode32 = decode[:budget], decode32[:budget]
    computed = slots.num_computed[decode]
    full_pages = decode[computed >= pages.capacity[decode]]
    room = kv_cache.num_available - len(full_pages)
    if room < 0:
        return None
    budget -= len(decode)
    chunks: list[tuple[int, int]] = []
    for slot in prefill:
        if not budget:
            break
        start = int(slots.num_computed[slot])
        count = min(int(slots.num_tokens[slot]) - start, budget)
        missing = pages.missing(slot, start + count)
        if missing > room:
            if slot != running.last.slot:
                return None
            # Nobody is left to preempt for it: it takes what there is, and keeps what it has while others end.
            missing = room
            count = int(pages.capacity[slot]) + room * kv_cache.page_size - start
            if count <= 0:
                break
        chunks.append((slot, count))
        room -= missing
        budget -= count
    return Plan(decode, decode32, computed, full_pages, chunks)
