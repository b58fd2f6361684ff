"""All unended requests, wherever they are: by handle, by request id, by deadline. An ended one is in none of these."""

from collections.abc import Iterator
from heapq import heappop, heappush

from mizzen.scheduler.request import RequestState


class Registry:
    """Iterates in the order in which the requests came."""

    def __init__(self) -> None:
        self._states: dict[int, RequestState] = {}
        self._choices: dict[str, list[RequestState]] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap; its handles may have ended

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add(self, state: RequestState) -> None:
        request = state.request
        assert request.handle not in self._states
        self._states[request.handle] = state
        self._choices.setdefault(request.request_id, []).append(state)
        if request.deadline_s is not None:
            heappush(self._deadlines, (request.deadline_s, request.handle))

    def remove(self, state: RequestState) -> None:
        request = state.request
        del self._states[request.handle]
        choices = self._choices[request.request_id]
        choices.remove(state)
        if not choices:
            del self._choices[request.request_id]

    def get(self, handle: int) -> RequestState | None:
        return self._states.get(handle)

    def choices(self, request_id: str) -> list[RequestState]:
        """The unended choices of a request; none if it is unknown."""
        return list(self._choices.get(request_id, ()))

    def take_expired(self, now: float) -> list[RequestState]:
        """Unended requests whose deadline has come; each is returned once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            state = self._states.get(heappop(self._deadlines)[1])
            if state is not None:
                expired.append(state)
        return expired

    def check(self) -> None:
        assert sum(map(len, self._choices.values())) == len(self._states)
        assert all(self._states[handle].request.handle == handle for handle in self._states)
