"""What NVML says of the ranks' GPUs, read once a second by a thread of its own: a driver that hangs stops nothing else.

Without NVML, or its Python package (the extra ``gpu``), there are no series, and one line in the log says why.
"""

import contextlib
import importlib
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import structlog

from mizzen.observability.feed import Feed

READ_INTERVAL_S = 1.0

log = structlog.get_logger()


class GpuMetrics:
    """``nvml`` is the module pynvml. Raises its NVMLError where NVML does not work or a GPU is not found."""

    def __init__(self, feed: Feed, ranks: int, nvml: Any, environment: Mapping[str, str]) -> None:
        nvml.nvmlInit()
        self._feed = feed
        self._nvml = nvml
        self._gpus: list[tuple[str, str, Any]] = []  # rank, NVML's number, handle
        for rank, name in enumerate(gpus_of_ranks(ranks, environment)):
            by_number = name.isdigit()
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_number else nvml.nvmlDeviceGetHandleByUUID(name)
            self._gpus.append((str(rank), str(nvml.nvmlDeviceGetIndex(handle)), handle))
        self._known: set[tuple[str, str, str]] = set()  # series that have had a value
        self._failing: set[str] = set()  # ranks

    def read(self) -> None:
        """Notes and sends what there is now: NaN for what there was before and cannot be had any more."""
        for rank, gpu, handle in self._gpus:
            values: dict[str, float] = {}
            try:
                for ask in (self._memory, self._utilization):
                    # Of a part of a GPU (MIG) there is no utilization; of one with the host's memory, no memory.
                    with contextlib.suppress(self._nvml.NVMLError_NotSupported):
                        values |= ask(handle)
                self._failing.discard(rank)
            except self._nvml.NVMLError as error:
                if rank not in self._failing:
                    log.warning("a GPU's metrics cannot be read", rank=rank, gpu=gpu, reason=str(error))
                self._failing.add(rank)
            self._known |= {(name, rank, gpu) for name in values}
            for series in self._known:
                if series[1] == rank:
                    self._feed.gauge(*series).set(values.get(series[0], math.nan))
        self._feed.flush()

    def _memory(self, handle: Any) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"mizzen_gpu_memory_used_bytes": memory.used, "mizzen_gpu_memory_capacity_bytes": memory.total}

    def _utilization(self, handle: Any) -> dict[str, float]:
        return {"mizzen_gpu_utilization_ratio": self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}


def gpus_of_ranks(ranks: int, environment: Mapping[str, str]) -> list[str]:
    """Rank r's GPU is the r-th that CUDA shows: its number or UUID. CUDA counts as NVML does where all GPUs are alike,
    or CUDA_DEVICE_ORDER is PCI_BUS_ID."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(rank) for rank in range(ranks)] if listed is None else listed.split(",")
    return [name.strip() for name in names[:ranks]]


def watch_gpus(feed: Feed, ranks: int) -> None:
    """Reads for good, or returns if there is nothing to be read."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.info("no metrics of GPUs: nvidia-ml-py is not installed (pip install 'mizzen[gpu]')")
        return
    try:
        gpus = GpuMetrics(feed, ranks, nvml, os.environ)
    except nvml.NVMLError as error:
        log.info("no metrics of GPUs", reason=str(error))
        return
    while True:
        gpus.read()
        time.sleep(READ_INTERVAL_S)
