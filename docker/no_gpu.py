"""The engine's start without a GPU: all graphs of its ladders are captured over tensors on torch's "meta" device.

Those have shapes, strides and offsets, but no memory. So the wrappers choose each launch's constants, and Triton each
kernel's specialization, as they will on a GPU. Nothing here computes: what would need values is patched away.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

META = torch.device("meta")
ALIGNMENT = 512  # bytes, of every allocation on a GPU
# By which GEMMs share out their work: of A100; L40S; H100 SXM, H200 and GH200; B200. Another GPU of one of these
# architectures compiles its GEMMs at its first start.
MULTIPROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148}
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("triton_models.json").read_text())


@dataclass(frozen=True)
class Start:
    """One rank's. The model is one of MODELS, or a folder of its own."""

    architecture: int  # 90 for 9.0
    model: str
    ranks: int
    rank: int


class BuildDriver:
    """What Triton asks of a driver. The "device" is the architecture: Triton keeps kernels apart by it."""

    def __init__(self, architecture: int) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.driver import CudaLauncher

        self.architecture = architecture
        self.target = GPUTarget("cuda", architecture, 32)
        self.utils = self
        self.launcher_cls = CudaLauncher

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": sys.maxsize}  # whether a GPU has enough is for a real start to find out

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024


def make_libcuda(folder: Path) -> None:
    """A library to link C modules with: it has the name and the functions of the GPU driver's, which takes its place at
    run time."""
    from triton.backends.nvidia import driver

    sources = Path(driver.__file__), Path(driver.__file__).with_name("driver.c")
    names = set(re.findall(r"\bcu[A-Z]\w+(?=\()", "".join(path.read_text() for path in sources)))
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-x", "c", "-", "-o", str(library), f"-Wl,-soname,{library.name}"]
    subprocess.run(command, input="".join(f"void {name}(void) {{}}\n" for name in names), text=True, check=True)


def prepare_process(cache: Path, libcuda: Path) -> None:
    """Of a process that may compile, into ``cache``; C modules are made but not loaded."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(libcuda)
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    os.environ["TRITON_STORE_BINARY_ONLY"] = "1"  # nobody reads the stages before it
    torch.set_num_threads(1)
    torch.Tensor.data_ptr = _data_ptr  # type: ignore[method-assign, assignment]
    from triton.runtime import build

    build._load_module_from_path = mock.MagicMock()


def _data_ptr(tensor: Tensor) -> int:
    return ALIGNMENT + int(tensor.storage_offset()) * tensor.itemsize


def use_driver(architecture: int) -> None:
    from triton.runtime.driver import driver

    driver.set_active(BuildDriver(architecture))


class OnMeta(TorchFunctionMode):
    """What is asked for on the GPU comes to be on the meta device."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("device") == "cuda":
            given["device"] = META
        given.pop("pin_memory", None)
        return args[0].to(META) if function is torch.Tensor.cuda else function(*args, **given)


class MetaPlatform:
    """Of a GPU large enough for all graphs. Its stream runs a step at once, and knows no results."""

    device = META
    graph_rows = 256
    allocation_slack_bytes = 0
    busy_s = 0.0

    def make_stream(self) -> "MetaPlatform":
        return self

    def submit(self, work: Callable[[], object]) -> "MetaPlatform":
        work()
        return self

    def result(self, timeout_s: float | None = None) -> list[Any]:
        return [np.zeros(1, np.int32), None, None, None]

    def close(self) -> None: ...

    def upload(self, arrays: Iterable[Any]) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(META) for array in arrays]

    def free_memory_bytes(self) -> int:
        return 128 << 30

    def kv_budget_bytes(self, memory_fraction: float) -> int:
        return 64 << 30

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return 0


@contextlib.contextmanager
def no_gpu(architecture: int, count: int) -> Iterator[None]:
    """As if ``count`` GPUs were there."""
    from mizzen.kernels.triton import launch

    # These two first: other modules take them by name.
    launch._has_pdl = lambda device: architecture >= 90  # type: ignore[assignment]
    launch.num_multiprocessors = lambda device: MULTIPROCESSORS[architecture]  # type: ignore[assignment]
    from mizzen.config import resolve
    from mizzen.distributed import group
    from mizzen.kernels import dispatch
    from mizzen.model_runner import kernel_sampler, parallel_sampler, runner, sampler
    from mizzen.models import loader

    def sample(logits: Tensor, inputs: Any) -> Any:
        return sampler.Sampled(torch.zeros(len(logits), dtype=torch.int64, device=META))

    graphs = ("CUDAGraph", "Stream", "current_stream", "stream", "graph_pool_handle", "synchronize", "empty_cache")
    with (
        mock.patch.multiple("torch.cuda", **{name: mock.MagicMock() for name in graphs}),
        mock.patch.dict(dispatch._TABLES, {"meta": dispatch._TABLES["cuda"]}),
        mock.patch.object(resolve, "cuda_device_count", return_value=count),
        mock.patch.object(loader, "_fill_random"),
        mock.patch.object(group, "_gather"),
        mock.patch.object(kernel_sampler, "sample", sample),
        mock.patch.object(runner, "sampler_for", return_value=sample),
        mock.patch.object(parallel_sampler.ParallelSampler, "sample", lambda _, *given: sample(*given)),
        OnMeta(),
    ):
        yield


def run_start(start: Start, folder: Path) -> None:
    """Builds the rank of a model of which ``folder`` has config.json, but of two layers: the first differs from all
    others. Then runs a step of each number of rows that kernels are compiled anew for."""
    with no_gpu(start.architecture, start.ranks):
        from mizzen.config.resolve import resolve
        from mizzen.config.settings import load_settings
        from mizzen.distributed.group import SingleGroup, TorchGroup
        from mizzen.engine import build
        from mizzen.engine.largest_steps import largest_steps
        from mizzen.ipc.messages import ModelInfo
        from mizzen.models.config import parse_architecture

        class Rank(TorchGroup):
            """One of several, without the others."""

            def __init__(self) -> None:
                self._rank, self._size, self._sums = start.rank, start.ranks, None

            def reserve_sums(self, rows: int, columns: int, dtype: torch.dtype) -> None: ...

            def all_reduce(self, tensor: Tensor) -> Tensor:
                return tensor

            def min_int(self, value: int) -> int:
                return value

        model = parse_architecture(folder)
        settings = {
            "model": str(folder),
            "load_format": "dummy",
            "dtype": model.dtype,
            "device": "cuda",
            "attention_backend": "triton",
            "tensor_parallel_size": start.ranks,
        }
        config = resolve(load_settings(settings, env_file=None).settings).engine
        path, positions = str(folder), model.context_length
        info = ModelInfo(path, path, start.model, model.name, model.vocab_size, positions, (), {})
        platform: Any = MetaPlatform()
        group = SingleGroup() if start.ranks == 1 else Rank()
        with mock.patch.object(build, "parse_architecture", return_value=replace(model, num_layers=2)):
            rank = build.build_rank(config, info, platform, group, lambda *_: None)
        tokens, rows = config.scheduler.max_batch_tokens, 1
        while rows <= config.scheduler.max_running_requests:
            prefill, _ = largest_steps(
                max_batch_tokens=tokens, max_running_requests=rows, max_model_len=rank.info.max_model_len
            )
            rank.runner.enqueue(prefill)
            rows *= 2


def model_folder(model: str, parent: Path) -> Path:
    """A folder of config.json: made of the table's shapes in ``parent``, or the folder that the model's name is."""
    if Path(model).is_dir():
        return Path(model)
    folder = parent / model.replace("/", "--")
    folder.mkdir(exist_ok=True)
    config = {key: value for key, value in MODELS[model].items() if key != "ranks"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
