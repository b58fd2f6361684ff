"""A process counts for itself and sends what was added, a few times a second: nobody waits for the metrics process.

Counters and histograms travel as differences, gauges as they are. What could not be sent, because the metrics process
is down, is kept and goes with the next message; what a killed process had not sent is half a second's worth at most.
One thread owns a feed.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mizzen.ipc.channels import address, configure, encode
from mizzen.observability.metrics import BY_NAME, Kind

SEND_INTERVAL_S = 0.25
METRICS = "metrics"  # the process, and the channel that feeds it
QUERY = "metrics-query"  # the channel that is asked for the exposition
QUERY_TIMEOUT_S = 2.0
UNAVAILABLE = b"The metrics process does not answer: it is starting or restarting.\n"
EXPOSITION_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]  # values, in the order of the metric's labels


class Samples(msgspec.Struct, array_like=True):
    """What one process counted since its last message. ``histograms``: counts by bucket (the last is +Inf), and sum."""

    counters: list[tuple[str, Labels, float]]
    gauges: list[tuple[str, Labels, float]]
    histograms: list[tuple[str, Labels, list[int], float]]


class Counter:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float = 1.0) -> None:
        self.value += value


class Gauge:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)


class Histogram:
    """Counts by bucket: ``counts[i]`` are the values in (bounds[i - 1], bounds[i]]."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Feed:
    """``send`` returns whether the message left. The same name and labels give the same object each time."""

    def __init__(self, send: Callable[[Samples], bool], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._next_s = 0.0
        self._counters: dict[tuple[str, Labels], Counter] = {}
        self._gauges: dict[tuple[str, Labels], Gauge] = {}
        self._histograms: dict[tuple[str, Labels], Histogram] = {}

    def counter(self, name: str, *labels: str) -> Counter:
        found = self._counters.get((name, labels))
        if found is None:
            _check(name, "counter", labels)
            found = self._counters[name, labels] = Counter()
        return found

    def gauge(self, name: str, *labels: str) -> Gauge:
        found = self._gauges.get((name, labels))
        if found is None:
            _check(name, "gauge", labels)
            found = self._gauges[name, labels] = Gauge()
        return found

    def histogram(self, name: str, *labels: str) -> Histogram:
        found = self._histograms.get((name, labels))
        if found is None:
            _check(name, "histogram", labels)
            found = self._histograms[name, labels] = Histogram(BY_NAME[name].buckets)
        return found

    def due(self) -> bool:
        return self._clock() >= self._next_s

    def flush(self) -> bool:
        """Sends what is new, at most every SEND_INTERVAL_S; whether it did.

        Counters are sent even if nothing was added: the metrics process may have been restarted, and must know them.
        """
        now = self._clock()
        if now < self._next_s:
            return False
        self._next_s = now + SEND_INTERVAL_S
        samples = Samples(
            counters=[(name, labels, counter.value) for (name, labels), counter in self._counters.items()],
            gauges=[(name, labels, gauge.value) for (name, labels), gauge in self._gauges.items()],
            histograms=[
                (name, labels, histogram.counts, histogram.sum)
                for (name, labels), histogram in self._histograms.items()
                if any(histogram.counts)
            ],
        )
        if not self._send(samples):
            return False
        for counter in self._counters.values():
            counter.value = 0.0
        for histogram in self._histograms.values():
            histogram.counts = [0] * len(histogram.counts)
            histogram.sum = 0.0
        return True


def _check(name: str, kind: Kind, labels: Labels) -> None:
    metric = BY_NAME[name]
    assert metric.kind == kind, f"{name} is a {metric.kind}"
    assert len(metric.labels) == len(labels), f"{name} has the labels {metric.labels}"


class MetricsSender:
    """PUSH to the metrics process. Nothing is queued for one that is not there."""

    def __init__(self, context: Any, run_dir: Path) -> None:
        self._socket = context.socket(zmq.PUSH)
        configure(self._socket)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.connect(address(run_dir, METRICS))

    def send(self, samples: Samples) -> bool:
        try:
            self._socket.send(encode(samples), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close(0)


def query_metrics(context: Any, run_dir: Path, timeout_s: float) -> bytes | None:
    """The merged exposition as text, or None if the metrics process does not answer in time. From any thread."""
    socket = context.socket(zmq.REQ)
    try:
        configure(socket)
        socket.connect(address(run_dir, QUERY))
        socket.send(b"")
        if not socket.poll(int(timeout_s * 1000)):
            return None
        text: bytes = socket.recv()
        return text
    finally:
        socket.close(0)
