"""The running requests' counters, as arrays indexed by slot: a step touches them with a handful of vector operations.

    num_computed <= num_known <= num_tokens <= max_len        (num_computed may lead num_known by the steps in flight)

A token is known when the host has it; ``num_tokens`` counts those in flight too. What is left to compute,
``num_tokens - num_computed``, tells everything else: 1 is decode, more is prefill; at ``max_len`` nothing is scheduled.
"""

import numpy as np
import numpy.typing as npt

from mizzen.scheduler.output import Int32, Int64
from mizzen.scheduler.request import RequestState

NO_TOKEN = -1


class Slots:
    def __init__(self, num_slots: int, max_model_len: int) -> None:
        def counters() -> Int32:
            return np.zeros(num_slots, np.int32)

        self.tokens = np.zeros((num_slots, max_model_len), np.int32)
        self.num_prompt = counters()
        self.num_known = counters()
        self.num_tokens = counters()
        self.num_computed = counters()
        self.max_len = counters()
        self.stops_from = counters()  # a stop token counts from so many tokens on (min_tokens)
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, np.int32)  # padded
        self.handles: Int64 = np.zeros(num_slots, np.int64)
        self.last_step: Int64 = np.full(num_slots, -1, np.int64)  # the newest step with a row of the slot
        self.last_token_s: npt.NDArray[np.float64] = np.zeros(num_slots, np.float64)
        self.ended = np.zeros(num_slots, np.bool_)  # results still in flight, for nobody
        self.occupants: list[RequestState | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return len(self.occupants) - len(self._free)

    @property
    def next_free(self) -> int:
        return self._free[-1]

    def take(self, state: RequestState, num_computed: int, stop_ids: tuple[int, ...]) -> int:
        """Puts a waiting request into the next free slot."""
        slot = self._free.pop()
        count = len(state.tokens)
        self.tokens[slot, :count] = state.tokens
        self.num_prompt[slot] = state.num_prompt_tokens
        self.num_known[slot] = self.num_tokens[slot] = count
        self.num_computed[slot] = num_computed
        self.max_len[slot] = state.max_len
        self.stops_from[slot] = state.num_prompt_tokens + state.request.sampling.min_tokens
        self._set_stop_ids(slot, stop_ids)
        self.handles[slot] = state.request.handle
        self.last_token_s[slot] = state.timings.last_token_s or 0.0
        self.occupants[slot] = state
        return slot

    def put(self, slot: int) -> None:
        """The slot is free: no result for it is in flight."""
        assert self.occupants[slot] is not None
        self.occupants[slot] = None
        self.ended[slot] = False
        self.stop_ids[slot] = NO_TOKEN
        self._free.append(slot)

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(stop_ids) > width:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, len(stop_ids) - width)), constant_values=NO_TOKEN)
        elif width > 1 and len(stop_ids) < width // 2:
            # One request with 256 stop tokens must not make every later step compare with as many.
            needed = max(len(stop_ids), int((self.stop_ids != NO_TOKEN).sum(1).max()), 1)
            if needed < width:
                self.stop_ids = self.stop_ids[:, :needed].copy()
        self.stop_ids[slot, : len(stop_ids)] = stop_ids

    def check(self, updated_step: int) -> None:
        assert sorted(self._free) == [slot for slot, state in enumerate(self.occupants) if state is None]
        for slot, state in enumerate(self.occupants):
            if state is None or self.ended[slot]:
                assert state is None or self.last_step[slot] > updated_step, "an ended request keeps its slot"
                continue
            assert state.slot == slot
            assert self.handles[slot] == state.request.handle
            assert self.num_prompt[slot] <= self.num_known[slot] <= self.num_tokens[slot] <= self.max_len[slot]
            assert self.num_computed[slot] < self.num_tokens[slot], "the newest token is never computed yet"
            if self.last_step[slot] <= updated_step:
                assert self.num_known[slot] == self.num_tokens[slot], "a result was lost"
