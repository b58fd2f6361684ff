"""The checks of a host: each looks at facts and settings, and says in a line what is there and what to do about it."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mizzen.config.config import Config
from mizzen.doctor.facts import Facts, Folder

Status = Literal["ok", "warn", "fail", "skip"]
GIB = 2**30
SHM_BYTES = GIB  # that NCCL wants between ranks; Docker's default is 64 MB
OPEN_FILES = 4096  # a connection of a client takes one, and so do sockets between processes
DISK_BYTES = 2 * GIB  # compiled kernels, logs and a converted small model


class Check(msgspec.Struct, frozen=True):
    name: str
    status: Status
    detail: str
    advice: str = ""  # what to do, if not ok


def gib(size: int) -> str:
    """In MiB below one."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def check_driver(config: Config, facts: Facts) -> Check:
    return driver_for(config.engine.device, facts)


def driver_for(device: str, facts: Facts) -> Check:
    """``check_driver`` for when the settings ask for a device that is not there."""
    name, driver = "driver", facts.driver
    if driver is None:
        if device == "cpu":
            return Check(name, "skip", f"none, and none is needed on the CPU ({facts.no_driver})")
        return Check(name, "fail", facts.no_driver, "install NVIDIA's driver, and the container toolkit for containers")
    detail = f"{driver.version}, for CUDA up to {_dotted(driver.cuda)}"
    if facts.torch_cuda is not None and driver.cuda[0] < facts.torch_cuda[0]:
        return Check(
            name, "fail", detail, f"torch {facts.torch} is for CUDA {_dotted(facts.torch_cuda)}: update the driver"
        )
    return Check(name, "ok", detail)


def check_torch(config: Config, facts: Facts) -> Check:
    built = f"CUDA {_dotted(facts.torch_cuda)}" if facts.torch_cuda else "the CPU alone"
    packages = "".join(f", {package} {found}" for package, found in facts.packages.items())
    detail = f"torch {facts.torch} for {built}{packages}"
    if config.engine.device == "cpu" and facts.torch_cuda is not None:
        return Check("torch", "warn", detail, "no GPU is used: MIZZEN_DEVICE is cpu, or none was found")
    if facts.driver is not None and facts.driver.gpus and facts.torch_cuda is None:
        return Check("torch", "warn", detail, "this host has GPUs that this torch cannot use: take the cuda image")
    return Check("torch", "ok", detail)


def check_gpus(config: Config, facts: Facts) -> Check:
    name, ranks = "gpus", config.engine.tensor_parallel_size
    if config.engine.device == "cpu":
        return Check(name, "skip", "MIZZEN_DEVICE is cpu here")
    gpus = facts.driver.gpus if facts.driver is not None else ()
    if len(gpus) < ranks:
        advice = "lower MIZZEN_TENSOR_PARALLEL_SIZE, or give the container more GPUs (docker run --gpus all)"
        return Check(name, "fail", f"{len(gpus)}, but {ranks} ranks want one each", advice)
    names = sorted({gpu.name for gpu in gpus})
    detail = f"{len(gpus)} x {' and '.join(names)}, {gib(min(gpu.free_bytes for gpu in gpus))} free on the fullest"
    if min(gpu.capability for gpu in gpus) < (8, 0):
        return Check(name, "fail", detail, "kernels and bfloat16 need compute capability 8.0 (Ampere) or newer")
    if len(names) > 1:
        return Check(name, "warn", detail, "ranks are as fast as the slowest: choose with CUDA_VISIBLE_DEVICES")
    if busy := sum(gpu.processes for gpu in gpus):
        return Check(
            name, "warn", f"{detail}, {busy} processes on them", "fine if they are Mizzen's; nvidia-smi names them"
        )
    return Check(name, "ok", detail)


def check_links(config: Config, facts: Facts) -> Check:
    name, ranks = "links", config.engine.tensor_parallel_size
    if config.engine.device == "cpu" or ranks == 1 or facts.driver is None:
        return Check(name, "skip", "one rank needs none" if ranks == 1 else "ranks on the CPU talk over sockets")
    between = {link for (a, b), link in facts.driver.links.items() if b < ranks}
    if between <= {"NVLink"}:
        return Check(name, "ok", f"NVLink between all {ranks} GPUs")
    slow = "PCIe" if "none" not in between else "no direct link"
    return Check(
        name, "warn", f"{slow} between some of {ranks} GPUs", "sums will take longer: fewer ranks may be faster"
    )


def check_nccl(config: Config, facts: Facts) -> Check:
    ranks = config.engine.tensor_parallel_size
    if config.engine.device == "cpu" or ranks == 1:
        return Check("nccl", "skip", "not needed: gloo is used on the CPU" if ranks > 1 else "not needed by one rank")
    if facts.nccl is None:
        return Check("nccl", "fail", "not installed", "pip install torch for CUDA brings it")
    return Check("nccl", "ok", facts.nccl)


def check_shm(config: Config, facts: Facts) -> Check:
    detail = f"/dev/shm has {gib(facts.shm_bytes)}"
    if config.engine.device == "cpu" or config.engine.tensor_parallel_size == 1:
        return Check("shm", "ok", detail)
    if facts.shm_bytes < SHM_BYTES:
        return Check(
            "shm", "fail", detail, "NCCL breaks with so little: docker run --shm-size 4g, or an emptyDir in memory"
        )
    return Check("shm", "ok", detail)


def check_limits(config: Config, facts: Facts) -> Check:
    locked = facts.locked_memory_bytes
    detail = f"{facts.open_files} open files, {'unlimited' if locked is None else gib(locked)} locked memory"
    if facts.open_files < OPEN_FILES:
        return Check("limits", "warn", detail, f"raise open files (ulimit -n) to {OPEN_FILES} or more")
    if locked is not None and config.engine.device == "cuda" and config.engine.tensor_parallel_size > 1:
        return Check("limits", "warn", detail, "NCCL may want to lock more: docker run --ulimit memlock=-1")
    return Check("limits", "ok", detail)


def check_cpu(config: Config, facts: Facts) -> Check:
    ranks = config.engine.tensor_parallel_size
    detail = f"{facts.cpus} cores, {gib(facts.memory_free_bytes)} of memory free"
    if config.engine.device == "cuda" and facts.cpus < 2 * ranks + 2:
        return Check("cpu", "warn", detail, f"{ranks} ranks want two cores each, the API two more")
    return Check("cpu", "ok", detail)


def check_compiler(config: Config, facts: Facts) -> Check:
    compilers = ", ".join(facts.compilers) or "no compiler"
    if config.engine.device == "cpu":
        return Check(
            "compiler", "skip", f"{compilers}; nothing is compiled on the CPU but one small file, which has a twin"
        )
    if not {"gcc", "cc"} & set(facts.compilers):
        return Check("compiler", "fail", compilers, "Triton builds its launchers with gcc: install it")
    return Check("compiler", "ok", compilers)


def check_folders(folders: Sequence[tuple[str, Folder]]) -> list[Check]:
    """``folders``: what each is for, and the folder."""
    checks = []
    for name, folder in folders:
        detail = f"{folder.path}, {gib(folder.free_bytes)} free"
        if not folder.writable:
            checks.append(Check(name, "fail", f"{folder.path} cannot be written", "mount a volume there, for this uid"))
        elif folder.free_bytes < DISK_BYTES:
            checks.append(Check(name, "warn", detail, f"less than {gib(DISK_BYTES)}"))
        else:
            checks.append(Check(name, "ok", detail))
    return checks


def check_keys(config: Config) -> Check:
    server = config.server
    if server.api_keys:
        return Check("keys", "ok", f"{len(server.api_keys)} API keys")
    if server.host in ("127.0.0.1", "::1", "localhost"):
        return Check("keys", "ok", f"none; only this host reaches {server.host}")
    advice = (
        "set MIZZEN_API_KEYS_FILE unless something in front asks for keys (in a container: what publishes the port)"
    )
    return Check("keys", "warn", f"none, and {server.host} is open to other hosts", advice)


def _dotted(number: tuple[int, int]) -> str:
    return f"{number[0]}.{number[1]}"
