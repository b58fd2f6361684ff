"""What the scheduler and KV cache cost a step, without a device: 256 running requests, decode-only and mixed.

    python loadtest/bench_scheduler.py [--json FILE]

A step is one ``schedule`` and one ``update`` of the step before (overlap depth 1), its result being ready at once.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from mizzen.kernels.key_compare import load_match_keys
from mizzen.kv_cache.cache import KVCache
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import SampledTokens, SchedulerOutput
from mizzen.scheduler.request import Request
from mizzen.scheduler.scheduler import Scheduler

RUNNING = 256
PAGE_SIZE = 16
MAX_MODEL_LEN = 16_384
VOCABULARY = 50_000
WARM_UP = 50
STEPS = 1_500

Figures = dict[str, float]


class SchedulerBench:
    """A scheduler whose device samples random tokens in no time."""

    def __init__(self, *, max_running_requests: int, max_batch_tokens: int, num_pages: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        kv_cache = KVCache(
            num_pages,
            PAGE_SIZE,
            prefix_cache="radix",
            allocation="on-demand",
            match_keys=load_match_keys(Path(tempfile.gettempdir()) / "mizzen-bench-kernels"),
        )
        self.scheduler = Scheduler(
            kv_cache,
            policy="fcfs",
            max_running_requests=max_running_requests,
            max_batch_tokens=max_batch_tokens,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(VOCABULARY, VOCABULARY + 1),  # never sampled
        )
        self._samples = self._random.integers(0, VOCABULARY, (64, RUNNING * 2)).astype(np.int32)
        self._handle = 0
        self.in_flight: list[SchedulerOutput] = []

    def add(self, prompt_tokens: int, max_tokens: int) -> None:
        prompt = self._random.integers(0, VOCABULARY, prompt_tokens).astype(np.int32)
        sampling = SamplingParams(max_tokens=max_tokens)
        self._handle += 1
        self.scheduler.add(Request(self._handle, str(self._handle), 0, 0, prompt, sampling, self._handle, 0.0), 0.0)

    def step(self) -> tuple[SchedulerOutput | None, float]:
        """Schedules a step, updates with the one before. Returns the step and the milliseconds taken."""
        sampled = None
        if self.in_flight:
            count = int(self.in_flight[0].samples.sum())
            sampled = SampledTokens(self._samples[self.in_flight[0].step % 64, :count])
        begin = time.perf_counter()
        output = self.scheduler.schedule(begin)
        if output is not None:
            self.in_flight.append(output)
        if sampled is not None:
            self.scheduler.update(self.in_flight.pop(0), sampled, begin)
            self.scheduler.expire(begin)
            self.scheduler.take_ended()
        return output, (time.perf_counter() - begin) * 1e3


def decode_only() -> Figures:
    """256 requests that decode all the time, each at its own place in its page."""
    bench = SchedulerBench(max_running_requests=RUNNING, max_batch_tokens=8_192, num_pages=100_000)
    for index in range(RUNNING):
        bench.add(512 + index % PAGE_SIZE, MAX_MODEL_LEN // 2)
    while True:
        output, _ = bench.step()
        if output is not None and output.num_decode_rows == RUNNING:
            break
    for _ in range(WARM_UP):
        bench.step()
    return _figures([bench.step()[1] for _ in range(STEPS)])


def turnover() -> Figures:
    """256 running requests of about 100 output tokens: each step two or three end and others take their place."""
    bench = SchedulerBench(max_running_requests=RUNNING, max_batch_tokens=8_192, num_pages=40_000)
    costs = []
    for step in range(WARM_UP + STEPS):
        while bench.scheduler.num_waiting < 8:
            bench.add(200 + step % 97, 50 + step * 37 % 101)
        costs.append(bench.step()[1])
    return _figures(costs[WARM_UP:])


def mixed() -> Figures:
    """256 running requests of which some prefill 8k-token prompts in chunks of what the budget leaves (2,048)."""
    bench = SchedulerBench(max_running_requests=RUNNING, max_batch_tokens=2_048, num_pages=100_000)
    for _ in range(RUNNING - 4):
        bench.add(256, MAX_MODEL_LEN // 2)
    costs = []
    while len(costs) < WARM_UP + STEPS:
        if bench.scheduler.num_waiting < 2:
            bench.add(8_000, 16)
        output, cost = bench.step()
        if output is not None and output.num_decode_rows >= RUNNING - 4:
            costs.append(cost)
    return _figures(costs[WARM_UP:])


def _figures(costs: list[float]) -> Figures:
    return {
        "p50_ms": round(float(np.percentile(costs, 50)), 4),
        "p99_ms": round(float(np.percentile(costs, 99)), 4),
        "max_ms": round(max(costs), 4),
    }


def run() -> dict[str, Figures]:
    """Milliseconds a step of schedule() and update()."""
    return {"decode_only": decode_only(), "turnover": turnover(), "mixed_8k_prefill": mixed()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run()
    print(f"{'scheduler, 256 running':24}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
    for name, figures in result.items():
        print(f"{name:24}{figures['p50_ms']:10.3f}{figures['p99_ms']:10.3f}{figures['max_ms']:10.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
