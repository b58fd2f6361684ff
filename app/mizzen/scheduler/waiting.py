"""The waiting requests in policy order. Adding, removing and taking the first cost a binary search, not a sort."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice

from mizzen.config.config import SchedulingPolicy
from mizzen.scheduler.request import Request, RequestState

MAX_MATCHED = 64  # waiting requests whose prefix is looked up in one step
MAX_PASSED = 256  # times that others may overtake the oldest request because of their longer prefix


def policy_key(policy: SchedulingPolicy, request: Request, number: int) -> tuple[int, ...]:
    """Lowest first. ``number`` counts the requests, so that equals are served as they came."""
    if policy == "priority":
        return (request.priority, number)
    if policy == "longest-output":
        assert request.sampling.max_tokens is not None
        return (-request.sampling.max_tokens, number)
    return (number,)


class WaitingQueue:
    """A sorted list of (key, request). A preempted request goes before all others (by priority: of its priority)."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._sorted: list[tuple[tuple[int, ...], RequestState]] = []
        self.num_preempted = 0  # of those here
        self.num_tokens = 0  # of their prompts and longest outputs
        self._passed = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, state: RequestState) -> None:
        insort(self._sorted, (self._key(state), state))
        self.num_preempted += state.preempted
        self.num_tokens += state.max_len

    def remove(self, state: RequestState) -> None:
        index = bisect_left(self._sorted, (self._key(state),))
        assert self._sorted[index][1] is state
        del self._sorted[index]
        self.num_preempted -= state.preempted
        self.num_tokens -= state.max_len
        self._passed = self._passed + 1 if index else 0

    def _key(self, state: RequestState) -> tuple[int, ...]:
        return state.key if self._policy == "priority" else (not state.preempted, *state.key)

    @property
    def ends(self) -> tuple[RequestState, RequestState]:
        """The first and the last."""
        return self._sorted[0][1], self._sorted[-1][1]

    def candidates(self, match: Callable[[RequestState], int]) -> Iterator[RequestState]:
        """Requests in the order in which to admit them; the caller removes each before it asks for the next.

        ``match`` gives the length of a request's cached prefix.
        """
        if self._policy != "longest-prefix" or self.num_preempted or self._passed >= MAX_PASSED:
            while self._sorted:
                yield self._sorted[0][1]
                if self._policy == "longest-prefix" and not self.num_preempted:
                    return  # the others are ranked in the next step
            return
        first = [state for _, state in islice(self._sorted, MAX_MATCHED)]
        yield from sorted(first, key=lambda state: (-match(state), state.key))

    def states(self) -> list[RequestState]:
        return [state for _, state in self._sorted]
