"""What checks look at, gathered once and before any of them: a check is a function of facts and settings alone."""

import importlib
import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

Link = Literal["NVLink", "PCIe", "none"]


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    processes: int  # that compute on it now


@dataclass(frozen=True, slots=True)
class Driver:
    version: str
    cuda: tuple[int, int]  # the newest CUDA that it runs
    gpus: tuple[Gpu, ...]
    links: Mapping[tuple[int, int], Link]  # by pair of GPUs, the smaller index first


@dataclass(frozen=True, slots=True)
class Folder:
    path: str
    writable: bool  # it, or what would have to make it
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    driver: Driver | None
    no_driver: str  # why there is none
    torch: str
    torch_cuda: tuple[int, int] | None  # what torch was built for
    nccl: str | None
    cpus: int
    memory_free_bytes: int  # under the container's limit too
    shm_bytes: int
    open_files: int
    locked_memory_bytes: int | None  # None: unlimited
    compilers: tuple[str, ...]
    packages: Mapping[str, str]  # versions of triton and flashinfer-python, if installed
    environment: Mapping[str, str]


def gather(environment: Mapping[str, str]) -> Facts:
    """Imports torch, which takes seconds."""
    import torch

    from mizzen.config.resolve import available_cpus
    from mizzen.platform.cpu import CpuPlatform

    driver, no_driver = gather_driver()
    built_for = torch.version.cuda
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Facts(
        driver=driver,
        no_driver=no_driver,
        torch=torch.__version__,
        torch_cuda=_pair(built_for) if built_for else None,
        nccl=_first_version("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        cpus=available_cpus(),
        memory_free_bytes=CpuPlatform(1).free_memory_bytes(),
        shm_bytes=_total_bytes("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        compilers=tuple(name for name in ("gcc", "cc", "c++", "nvcc") if shutil.which(name)),
        packages={name: found for name in ("triton", "flashinfer-python") if (found := _first_version(name))},
        environment=environment,
    )


def gather_driver() -> tuple[Driver | None, str]:
    """The driver with its GPUs, or None and why."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None, "the package nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    try:
        return read_driver(pynvml), ""
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()


def read_driver(nvml: Any) -> Driver:
    """``nvml``: the module pynvml, initialized. Raises its NVMLError."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    number = nvml.nvmlSystemGetCudaDriverVersion()
    pairs = [(a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
    return Driver(
        version=nvml.nvmlSystemGetDriverVersion(),
        cuda=(number // 1000, number % 1000 // 10),
        gpus=tuple(_read_gpu(nvml, handle) for handle in handles),
        links={(a, b): _read_link(nvml, handles[a], handles[b]) for a, b in pairs},
    )


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    processes = len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(nvml.nvmlDeviceGetName(handle), (major, minor), memory.total, memory.free, processes)


def _read_link(nvml: Any, a: Any, b: Any) -> Link:
    ways: list[tuple[Link, Any]] = [
        ("NVLink", nvml.NVML_P2P_CAPS_INDEX_NVLINK),
        ("PCIe", nvml.NVML_P2P_CAPS_INDEX_READ),
    ]
    for link, capability in ways:
        if nvml.nvmlDeviceGetP2PStatus(a, b, capability) == nvml.NVML_P2P_STATUS_OK:
            return link
    return "none"


def look_at(path: str) -> Folder:
    """The folder, or the nearest one above that exists."""
    existing = Path(path).expanduser()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    return Folder(path, os.access(existing, os.W_OK | os.X_OK), shutil.disk_usage(existing).free)


def _total_bytes(path: str) -> int:
    return shutil.disk_usage(path).total if os.path.isdir(path) else 0


def _first_version(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _pair(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
