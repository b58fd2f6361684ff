"""What the server says of itself, on the client's clock: /metrics is sampled beside the load, in a thread of its own.

A quantity has one name here and others at each server; the first that a server has is taken. No /metrics, no samples:
a load test runs without.
"""

import re
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from typing import Any

from loadtest.client import Target

# quantity: (how series of one name are put together, names in the order of preference)
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "running": ("sum", ("mizzen_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")),
    "waiting": ("sum", ("mizzen_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")),
    "kv_usage": ("max", ("mizzen_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
                         "sglang:token_usage")),
    "gpu_utilization": ("mean", ("mizzen_gpu_utilization_ratio",)),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("mizzen_prompt_tokens_total", "vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "generation_tokens": ("mizzen_generation_tokens_total", "vllm:generation_tokens_total",
                          "sglang:generation_tokens_total"),
    "prefix_hits": ("mizzen_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    "prefix_queries": ("mizzen_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
    "preemptions": ("mizzen_preemptions_total", "vllm:num_preemptions_total"),
    "steps": ("mizzen_steps_total", "vllm:iteration_tokens_total_count"),
    "step_tokens": ("mizzen_step_tokens_sum", "vllm:iteration_tokens_total_sum"),
    "device_busy_s": ("mizzen_device_busy_seconds_total",),
}  # fmt: skip
_WANTED = {name for _, names in GAUGES.values() for name in names} | {n for names in COUNTERS.values() for n in names}
# One pass in C, so that the load's own thread is not kept from its turn.
_LINE = re.compile(r"^(" + "|".join(map(re.escape, sorted(_WANTED))) + r")(?:\{[^\n]*\})? ([^\s]+)", re.MULTILINE)
_INFO = re.compile(r"^mizzen_(?:build|config)_info\{([^\n]*)\} 1", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def read(text: str) -> dict[str, float]:
    """The quantities that an exposition has."""
    series: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        series.setdefault(name, []).append(float(value))
    found: dict[str, float] = {}
    for quantity, (how, names) in GAUGES.items():
        if (values := next((series[name] for name in names if name in series), None)) is not None:
            found[quantity] = max(values) if how == "max" else sum(values) / (len(values) if how == "mean" else 1)
    for quantity, names in COUNTERS.items():
        if (values := next((series[name] for name in names if name in series), None)) is not None:
            found[quantity] = sum(values)
    return found


def information(text: str) -> dict[str, str]:
    """Version and settings, where the server tells them."""
    return {name: value for labels in _INFO.findall(text) for name, value in _LABEL.findall(labels)}


def fetch(target: Target, url: str, timeout_s: float) -> str:
    """Without a proxy, as the load itself goes. Raises OSError."""
    tls = urllib.request.HTTPSHandler(context=target.tls())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)
    with opener.open(urllib.request.Request(url, headers=target.all_headers()), timeout=timeout_s) as answer:
        body: bytes = answer.read()
    return body.decode("utf-8", "replace")


@dataclass(slots=True)
class Sampler:
    """Samples ``url`` every ``period_s`` between start and stop."""

    target: Target
    url: str
    period_s: float
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)  # when (monotonic) and what
    information: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._take()
        self._thread = threading.Thread(target=self._sample, name="metrics sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._take()

    def _sample(self) -> None:
        due_s = time.monotonic()
        while not self._stopped.wait(max(0.0, (due_s := due_s + self.period_s) - time.monotonic())):
            self._take()
            due_s = max(due_s, time.monotonic() - self.period_s)  # after a slow answer none is made up for

    def _take(self) -> None:
        if self.failures and not self.samples:
            return  # it has none
        began_s = time.monotonic()
        try:
            text = fetch(self.target, self.url, timeout_s=5.0)
        except (OSError, ValueError):
            self.failures += 1
            return
        if found := read(text):
            self.samples.append(((began_s + time.monotonic()) / 2, found))
            self.information = self.information or information(text)
        else:
            self.failures += 1

    def result(self, start_s: float) -> dict[str, Any]:
        """``timeline``: gauges as they were, counters as rates a second since the sample before; times from
        ``start_s``. ``increase``: of the counters, over all samples. Empty without samples."""
        if not self.samples:
            return {"url": self.url, "samples": 0, "failures": self.failures}
        times = [at for at, _ in self.samples]
        line: dict[str, list[float | None]] = {"at_s": [at - start_s for at in times]}
        for name in GAUGES:
            if any(name in found for _, found in self.samples):
                line[name] = [found.get(name) for _, found in self.samples]
        for name in COUNTERS:
            values = [found.get(name) for _, found in self.samples]
            if any(value is not None for value in values):
                line[f"{name}_per_s"] = [None, *map(_per_s, values, values[1:], times, times[1:])]
        increase = {name: increased for name in COUNTERS if (increased := self._increase(name)) is not None}
        return {"url": self.url, "samples": len(times), "failures": self.failures, "information": self.information,
                "timeline": line, "increase": increase}  # fmt: skip

    def _increase(self, name: str) -> float | None:
        values = [found[name] for _, found in self.samples if name in found]
        return values[-1] - values[0] if len(values) > 1 else None


def _per_s(before: float | None, after: float | None, at_s: float, then_s: float) -> float | None:
    if before is None or after is None or then_s <= at_s or after < before:  # less than before: it began again
        return None
    return (after - before) / (then_s - at_s)
