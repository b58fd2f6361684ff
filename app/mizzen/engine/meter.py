"""What a step costs: noted in the loop with one more clock read a step, counted when reported, many steps at once.

Host time is what lies between a step's result and the next wait for one: results, messages, scheduling, preparing. In
that time the device may already run the next step (overlap), or wait.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from mizzen.ipc.messages import Load
from mizzen.observability.feed import Feed, Histogram
from mizzen.scheduler.output import SchedulerOutput


class Runner(Protocol):
    """What a ModelRunner knows of its work: both grow."""

    @property
    def steps(self) -> Mapping[str, int]: ...

    @property
    def busy_s(self) -> float: ...


class StepMeter:
    """``enqueued``, ``begin_wait`` and ``result`` for each step, ``woke`` when the idle loop got a message."""

    def __init__(self, feed: Feed, runner: Runner) -> None:
        self._feed = feed
        self._runner = runner
        self._last_steps: dict[str, int] = {}
        self._last_busy_s = 0.0
        # in the order of the columns of what is noted
        self._histograms = [
            feed.histogram(name)
            for name in ("mizzen_step_duration_seconds", "mizzen_step_host_time_seconds", "mizzen_step_tokens")
        ]
        self._busy = feed.counter("mizzen_device_busy_seconds_total")
        self._preemptions = feed.counter("mizzen_preemptions_total")
        self._queries = feed.counter("mizzen_prefix_cache_queries_total")
        self._hits = feed.counter("mizzen_prefix_cache_hits_total")
        self._last = Load()
        self._in_flight: deque[tuple[float, int]] = deque()  # when each step was enqueued, its tokens
        self._noted: list[tuple[float, float, int]] = []
        self._enqueued_s = 0.0  # the newest step
        self._result_s = 0.0
        self._busy_s = 0.0  # since when the host has been at work
        self._host_s = 0.0

    def woke(self) -> None:
        self._busy_s = time.monotonic()

    def enqueued(self, output: SchedulerOutput) -> None:
        tokens = decode = output.num_decode_rows
        if decode < len(output.slots):
            tokens += int(output.num_scheduled[decode:].sum())
        self._enqueued_s = now = time.monotonic()
        self._in_flight.append((now, tokens))

    def begin_wait(self) -> None:
        # Usually right after a step was enqueued: not worth a clock read of its own.
        since_s = self._enqueued_s if self._enqueued_s > self._busy_s else time.monotonic()
        self._host_s = since_s - self._busy_s

    def result(self, now: float) -> None:
        enqueued_s, tokens = self._in_flight.popleft()
        self._noted.append((now - max(enqueued_s, self._result_s), self._host_s, tokens))
        self._result_s = self._busy_s = now

    def report(self, load: Load) -> None:
        """Sends what was noted, and how ``load`` and what the runner has done differ from the last time."""
        if self._noted:
            columns = np.array(self._noted).T
            self._noted = []
            for histogram, values in zip(self._histograms, columns, strict=True):
                _observe_all(histogram, values)
        last, self._last = self._last, load
        for executor, steps in self._runner.steps.items():
            self._feed.counter("mizzen_steps_total", executor).add(steps - self._last_steps.get(executor, 0))
            self._last_steps[executor] = steps
        busy_s = self._runner.busy_s
        self._busy.add(busy_s - self._last_busy_s)
        self._last_busy_s = busy_s
        self._preemptions.add(load.preemptions - last.preemptions)
        self._queries.add(load.prefix_queries - last.prefix_queries)
        self._hits.add(load.prefix_hits - last.prefix_hits)
        self._feed.flush()


def _observe_all(histogram: Histogram, values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> None:
    buckets = np.searchsorted(histogram.bounds, values, side="left")
    counts = np.bincount(buckets, minlength=len(histogram.counts))
    histogram.counts = [a + b for a, b in zip(histogram.counts, counts.tolist(), strict=True)]
    histogram.sum += float(values.sum())
