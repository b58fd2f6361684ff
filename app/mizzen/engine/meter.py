"""What a step costs, counted in the loop: a few clock reads and three bucket increments a step, nothing a request."""

import time
from collections import deque

from mizzen.ipc.messages import Load
from mizzen.observability.feed import Feed
from mizzen.scheduler.output import SchedulerOutput


class StepMeter:
    """The loop calls these in the order of a turn: begin_turn, enqueued, begin_wait, result, end_turn.

    ``enqueued`` and (``begin_wait``, ``result``) may be missing. Host time of turns without a result (the pipeline
    fills) counts to the next step's.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._duration = feed.histogram("mizzen_step_duration_seconds")
        self._host = feed.histogram("mizzen_step_host_time_seconds")
        self._tokens = feed.histogram("mizzen_step_tokens")
        self._steps = feed.counter("mizzen_steps_total")
        self._preemptions = feed.counter("mizzen_preemptions_total")
        self._queries = feed.counter("mizzen_prefix_cache_queries_total")
        self._hits = feed.counter("mizzen_prefix_cache_hits_total")
        self._last = Load()
        self._in_flight: deque[float] = deque()  # when each step was enqueued
        self._last_result_s = 0.0
        self._turn_s = 0.0
        self._wait_s = 0.0
        self._waited_s = 0.0
        self._host_s = 0.0
        self._done = False

    def begin_turn(self) -> None:
        self._turn_s = time.monotonic()
        self._waited_s = 0.0

    def enqueued(self, output: SchedulerOutput) -> None:
        decode = output.num_decode_rows
        mixed = decode < output.num_rows
        self._tokens.observe(decode + int(output.num_scheduled[decode:].sum()) if mixed else decode)
        self._in_flight.append(time.monotonic())

    def begin_wait(self) -> None:
        self._wait_s = time.monotonic()

    def result(self, now: float) -> None:
        self._duration.observe(now - max(self._in_flight.popleft(), self._last_result_s))
        self._last_result_s = now
        self._waited_s = now - self._wait_s
        self._done = True

    def end_turn(self) -> None:
        if not self._done and not self._in_flight:  # an idle turn
            return
        self._host_s += time.monotonic() - self._turn_s - self._waited_s
        if self._done:
            self._host.observe(self._host_s)
            self._host_s, self._done = 0.0, False

    def report(self, load: Load) -> None:
        """Sends what was counted, and how ``load`` differs from the last one."""
        last, self._last = self._last, load
        self._steps.add(load.steps - last.steps)
        self._preemptions.add(load.preemptions - last.preemptions)
        self._queries.add(load.prefix_queries - last.prefix_queries)
        self._hits.add(load.prefix_hits - last.prefix_hits)
        self._feed.flush()
