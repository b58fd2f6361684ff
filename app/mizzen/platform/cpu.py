"""The CPU as a device: its stream is a FIFO worker thread, so that overlap is as real here as on a GPU."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from mizzen.platform.base import Array, Outputs, P, StepHandle, Stream, T

DEFAULT_KV_BYTES = 2**30  # a host has other work: the KV cache takes no more unless MIZZEN_KV_CACHE_BYTES says so


class CpuHandle:
    """The result of one piece of work on the worker thread."""

    def __init__(self, stream: "CpuStream", work: Callable[[], Outputs]) -> None:
        self._stream = stream
        self._work: Callable[[], Outputs] | None = work
        self._done = threading.Event()
        self._result: list[Array | None] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._work is not None
        begun_s = time.perf_counter()
        try:
            self._result = [None if output is None else output.numpy() for output in self._work()]
        except BaseException as error:  # noqa: BLE001  # handed to whoever waits for the result
            self._error = error
        self._stream.busy_s += time.perf_counter() - begun_s
        self._work = None  # it holds the step's tensors
        self._done.set()

    def ready(self) -> bool:
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> list[Array | None]:
        if not self._done.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


class CpuStream:
    def __init__(self) -> None:
        self.busy_s = 0.0
        self._queue: queue.SimpleQueue[CpuHandle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="cpu-stream", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        torch.set_grad_enabled(False)  # a thread-local mode
        while (handle := self._queue.get()) is not None:
            handle.run()

    def submit(self, work: Callable[[], Outputs]) -> StepHandle:
        handle = CpuHandle(self, work)
        self._queue.put(handle)
        return handle

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class CpuPlatform:
    """``threads``: intra-op threads of torch in this process."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device("cpu")
        self.allocation_slack_bytes = self.graph_rows = 0

    def make_stream(self) -> Stream:
        return CpuStream()

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Without a copy, but of read-only arrays (decoded from another rank's message)."""
        return [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in arrays]

    def kv_budget_bytes(self, memory_fraction: float) -> int:
        # Half of what is free: steps are not measured here (peak_bytes), and under a container's limit they and the
        # other processes are killed for what the KV cache took too much (seen with 2 GB and SmolLM2-135M).
        return min(DEFAULT_KV_BYTES, int(self.free_memory_bytes() * memory_fraction / 2))

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Not measured: the budget is far from the host's memory."""
        work()
        return 0

    def annotate(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """For torch's profiler."""

        def annotated(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch.profiler.record_function(name):
                return function(*args, **kwargs)

        return annotated

    def free_memory_bytes(self) -> int:
        """The host's available memory, or what is left of the container's limit if that is less."""
        return min(psutil.virtual_memory().available, cgroup_free_bytes(Path("/sys/fs/cgroup")))


def cgroup_free_bytes(root: Path) -> int:
    """What is left under the cgroup's memory limit (v2, or v1), or a very large number without one."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = (root / limit_file).read_text().strip(), (root / usage_file).read_text().strip()
        except OSError:
            continue  # this cgroup version is not mounted
        if limit != "max":
            return max(0, int(limit) - int(usage))
    return 2**62
