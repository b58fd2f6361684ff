"""A CUDA device: work is enqueued on one stream when submitted; its outputs are copied to pinned memory behind it.

All of a rank's device work is on this one stream, so state that steps change needs no other order. Pinned buffers come
from torch's caching host allocator, which reuses one only when the copy that read or wrote it is done.
"""

import gc
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mizzen.platform.base import Array, Outputs, P, StepHandle, Stream, T

ALIGNMENT = 16  # bytes, of each array in an upload
SPIN_S = 0.002  # a result this close is waited for without sleeping
SLEEP_S = 50e-6
SEGMENT_BYTES = 2 * 2**20  # torch's allocator rounds large tensors up to these
LARGE_GPU_BYTES = 120 << 30  # an H200 has 139 GiB, an H100 79


class CudaHandle:
    """The outputs of one piece of work, on their way to the host."""

    def __init__(self, stream: "CudaStream", work: Callable[[], Outputs]) -> None:
        self._stream = stream
        self._begun, self._done = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        self._begun.record()
        self._host = [None if output is None else _copy_out(output) for output in work()]
        self._done.record()

    def ready(self) -> bool:
        return self._done.query()

    def result(self, timeout_s: float | None = None) -> list[Array | None]:
        start = time.perf_counter()
        while not self._done.query():
            waited = time.perf_counter() - start
            if timeout_s is not None and waited > timeout_s:
                raise TimeoutError
            if waited > SPIN_S:
                time.sleep(SLEEP_S)
        self._stream.busy_s += self._begun.elapsed_time(self._done) / 1000  # from milliseconds
        return [None if output is None else output.numpy() for output in self._host]


def _copy_out(output: Tensor) -> Tensor:
    host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
    return host.copy_(output, non_blocking=True)


class CudaStream:
    """The thread's current stream: ``submit`` runs the work on the host at once, which enqueues it on the device."""

    def __init__(self) -> None:
        self.busy_s = 0.0

    def submit(self, work: Callable[[], Outputs]) -> StepHandle:
        return CudaHandle(self, work)

    def close(self) -> None:
        torch.cuda.current_stream().synchronize()


class CudaPlatform:
    """GPU number ``index`` of those that are visible."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self.allocation_slack_bytes = SEGMENT_BYTES
        total = torch.cuda.get_device_properties(self.device).total_memory
        self.graph_rows = 256 if total >= LARGE_GPU_BYTES else 160

    def make_stream(self) -> Stream:
        return CudaStream()

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """One copy for all: the arrays are packed into one pinned buffer, the tensors are views of one buffer."""
        offsets, total = [], 0
        for array in arrays:
            offsets.append(total)
            total += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        host = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        packed = host.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            packed[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        device = host.to(self.device, non_blocking=True)
        return [
            device[offset : offset + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def annotate(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """NVTX ranges, for Nsight Systems."""

        def annotated(*args: P.args, **kwargs: P.kwargs) -> T:
            with torch.cuda.nvtx.range(name):
                return function(*args, **kwargs)

        return annotated

    def free_memory_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free

    def kv_budget_bytes(self, memory_fraction: float) -> int:
        """What is left of the fraction after all that is in use now, by this process or another."""
        torch.cuda.empty_cache()  # what loading has freed is nobody's
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total * memory_fraction) - (total - free)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Of torch's allocator the peak; of CUDA graphs, kernels and NCCL what the device has less at the end."""
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        reserved, others = torch.cuda.memory_reserved(), self._others_bytes()
        held = work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved() - reserved + max(0, self._others_bytes() - others)
        del held
        gc.collect()  # graphs may be in cycles, and their memory with them
        torch._C._cuda_clearCublasWorkspaces()  # one may lie in the graphs' pool, and hold a part of it
        torch.cuda.empty_cache()
        return peak

    def _others_bytes(self) -> int:
        """Memory in use that torch's allocator did not hand out."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free - torch.cuda.memory_reserved()


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def _torch_dtype(array: Array) -> torch.dtype:
    return _DTYPES[array.dtype]
