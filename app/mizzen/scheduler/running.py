"""The running requests in policy order, and the rows that follow from their counters.

Both row lists are made anew only after something happened: a step in which all go on decoding reuses them.
"""

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from mizzen.scheduler.output import Int32
from mizzen.scheduler.request import RequestState
from mizzen.scheduler.slots import Slots

IntP = npt.NDArray[np.intp]


class Running:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sorted: list[tuple[tuple[int, ...], RequestState]] = []
        self._changed = False
        self._order: IntP = np.empty(0, np.intp)
        self._decode: IntP = np.empty(0, np.intp)
        self._decode32: Int32 = np.empty(0, np.int32)
        self._prefill: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def last(self) -> RequestState:
        return self._sorted[-1][1]

    def add(self, state: RequestState) -> None:
        insort(self._sorted, (state.key, state))
        self._changed = True

    def remove(self, state: RequestState) -> None:
        index = bisect_left(self._sorted, (state.key,))
        assert self._sorted[index][1] is state
        del self._sorted[index]
        self._changed = True

    def counters_changed(self) -> None:
        """A slot went over from prefill to decode, or has nothing left to compute."""
        self._changed = True

    def rows(self) -> tuple[IntP, Int32, list[int]]:
        """Slots in policy order: those with one token to compute (twice, in two types), those with more."""
        if self._changed:
            self._changed = False
            self._order = order = np.array([state.slot for _, state in self._sorted], np.intp)
            num_tokens = self._slots.num_tokens[order]
            left = num_tokens - self._slots.num_computed[order]
            self._decode = order[(left == 1) & (num_tokens < self._slots.max_len[order])]
            self._decode32 = self._decode.astype(np.int32)
            self._prefill = order[left > 1].tolist()
        return self._decode, self._decode32, self._prefill

    @property
    def order(self) -> IntP:
        """All slots in policy order."""
        self.rows()
        return self._order

    def states(self) -> list[RequestState]:
        return [state for _, state in self._sorted]

    def check(self) -> None:
        keys = [key for key, _ in self._sorted]
        assert keys == sorted(keys)
