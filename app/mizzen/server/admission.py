"""Work in progress is bounded: what does not fit is refused at once, and told when to come back."""

import collections

from mizzen.errors import InvalidRequest, QueueFull

_REMEMBERED = 64  # completions from which the rate is estimated
_MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Counts the choices in flight of this api process against its share of the bound."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._ended_s: collections.deque[float] = collections.deque(maxlen=_REMEMBERED)

    def admit(self, num_choices: int, capacity: int, now_s: float) -> None:
        """Takes ``num_choices`` places. Raises QueueFull if they are not free, InvalidRequest if they never can be."""
        if num_choices > capacity:
            raise InvalidRequest(
                f"The request asks for {num_choices} answers (prompts times 'n') at once, at most {capacity} fit",
                param="n",
            )
        excess = self.in_flight + num_choices - capacity
        if excess > 0:
            raise QueueFull(
                f"The queue is full: {self.in_flight} of {capacity} answers are running or waiting."
                " Retry later, or raise MIZZEN_MAX_QUEUED_REQUESTS.",
                retry_after_s=self.retry_after_s(excess, now_s),
            )
        self.in_flight += num_choices

    def release(self, num_choices: int, now_s: float) -> None:
        self.in_flight -= num_choices
        assert self.in_flight >= 0
        self._ended_s.extend([now_s] * min(num_choices, _REMEMBERED))

    def retry_after_s(self, excess: int, now_s: float) -> float:
        """Seconds until ``excess`` more choices have ended, at the recent rate; 1 at least, 60 at most."""
        if len(self._ended_s) < 2:
            return 1.0
        rate = len(self._ended_s) / max(now_s - self._ended_s[0], 1e-3)
        return min(max(excess / rate, 1.0), _MAX_RETRY_AFTER_S)
