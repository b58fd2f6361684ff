"""What a step costs the host: scheduler, KV cache, batch-state preparation, results, messages. No device work at all.

The real EngineLoop runs over a stream that drops the device's part and has its result at once, so that one turn is what
lies between a result's arrival and the next step being ready to launch, encoding and sending included. Attention
planning is apart: it belongs to the backend.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from mizzen.engine.loop import EngineLoop
from mizzen.engine.meter import StepMeter
from mizzen.engine.process import ProgressLine
from mizzen.ipc.channels import ZmqReceiver, ZmqSender
from mizzen.ipc.inproc import InprocChannel
from mizzen.ipc.messages import GenerateRequest, StepOutput
from mizzen.ipc.process import BEAT_INTERVAL_S
from mizzen.kernels.key_compare import load_match_keys
from mizzen.kv_cache.cache import KVCache
from mizzen.model_runner.batch_state import BatchState, PreparedStep
from mizzen.model_runner.runner import ModelRunner, NullExecutor
from mizzen.observability.feed import Feed
from mizzen.platform.cpu import CpuPlatform
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.scheduler import Scheduler

RUNNING = 256
PAGE_SIZE = 16
MAX_MODEL_LEN = 16_384
PROMPT = 512
LONG_PROMPT = 8192


class _Ready:
    def __init__(self, result: list[Any]) -> None:
        self._result = result

    def ready(self) -> bool:
        return True

    def result(self, timeout_s: float | None = None) -> list[Any]:
        return self._result


class _NoDevice:
    """A stream without a device."""

    busy_s = 0.0

    def submit(self, work: Callable[[], Any]) -> _Ready:
        return _Ready(work())

    def close(self) -> None:
        pass


class _HostRunner(ModelRunner):
    """Prepares steps as ever, and makes up their results instead of running them."""

    def _run(self, step: PreparedStep) -> Any:
        return (1000 + step.output_index % 1000).astype(np.int32), None, None, None


def _sink(run_dir: str) -> None:
    """The detokenizer's place: takes the messages off the socket, in a process of its own."""
    receiver = ZmqReceiver(zmq.Context(), Path(run_dir), "detokenizer", StepOutput)
    while receiver.recv_bytes(5.0) is not None:
        pass


def build(
    run_dir: Path, max_batch_tokens: int, metrics: bool
) -> tuple[EngineLoop, Scheduler, InprocChannel, StepMeter | None]:
    scheduler = Scheduler(
        KVCache(
            RUNNING * 3000 // PAGE_SIZE,
            PAGE_SIZE,
            prefix_cache="radix",
            allocation="on-demand",
            match_keys=load_match_keys(Path("build")),
        ),
        policy="fcfs",
        max_running_requests=RUNNING,
        max_batch_tokens=max_batch_tokens,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(0, 2),
    )
    state = BatchState(
        CpuPlatform(1),
        max_slots=RUNNING,
        max_model_len=MAX_MODEL_LEN,
        page_size=PAGE_SIZE,
        dummy_page=0,
        eos_token_ids=(0, 2),
    )
    runner = _HostRunner(state, NullExecutor(state, 1000, 1000), _NoDevice())
    inbox = InprocChannel()
    outbox = ZmqSender(zmq.Context.instance(), run_dir, "detokenizer")
    meter = StepMeter(Feed(lambda _: True), runner) if metrics else None
    loop = EngineLoop(scheduler, runner, inbox, outbox, depth=1, epoch=1, seed=0, meter=meter)
    return loop, scheduler, inbox, meter


def request(number: int, length: int, max_tokens: int) -> GenerateRequest:
    prompt = np.random.default_rng(number).integers(3, 30_000, length, dtype=np.int32)
    return GenerateRequest(
        f"r{number}",
        0,
        0,
        1,
        prompt.tobytes(),
        SamplingParams(temperature=0.6, max_tokens=max_tokens, seed=number),
        0.0,
    )


def measure(mode: str, steps: int, metrics: bool = True) -> dict[str, float]:
    """``mode``: "decode" is 256 decode rows a step; "mixed" is 255, and a chunk of an 8k prompt (budget 2,048)."""
    with tempfile.TemporaryDirectory(prefix="mz-") as folder:
        sink = multiprocessing.get_context("spawn").Process(target=_sink, args=(folder,), daemon=True)
        sink.start()
        loop, scheduler, inbox, meter = build(Path(folder), 8192 if mode == "decode" else 2048, metrics)
        rows = RUNNING if mode == "decode" else RUNNING - 1
        for number in range(rows):
            inbox.send(request(number, PROMPT, MAX_MODEL_LEN - PROMPT - 1))
        while scheduler.num_running < rows or scheduler.num_waiting:
            loop.step(0.0)
        for _ in range(20):
            loop.step(0.0)
        times: list[float] = []
        long_requests = 0
        progress, reported_s = ProgressLine(1.0), time.perf_counter()
        cpu_s = time.process_time()
        while len(times) < steps:
            if mode == "mixed" and scheduler.num_running + scheduler.num_waiting < RUNNING:
                inbox.send(request(100_000 + long_requests, LONG_PROMPT, 1))
                long_requests += 1
            start = time.perf_counter()
            loop.step(0.0)
            if meter is not None and start > reported_s + BEAT_INTERVAL_S:  # as the engine's process does
                reported_s = start
                load = loop.load()
                progress.update(load)
                meter.report(load)
            times.append((time.perf_counter() - start) * 1e3)
        cpu_s = time.process_time() - cpu_s
        sink.kill()
        sink.join()
    return {
        "steps": len(times),
        "running": RUNNING,
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "mean_ms": float(np.mean(times)),
        "cpu_ms": cpu_s * 1e3 / len(times),
    }


def run(steps: int = 1500) -> dict[str, dict[str, float]]:
    import gc

    gc.collect()
    gc.freeze()  # as the engine process does
    return {mode: measure(mode, steps) for mode in ("decode", "mixed")}


if __name__ == "__main__":
    for mode, row in run().items():
        print(mode, {name: round(value, 3) for name, value in row.items()})
