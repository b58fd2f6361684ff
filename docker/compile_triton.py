"""Compiles Mizzen's Triton kernels without a GPU: all that starts with default settings would, and their launchers.

    python docker/compile_triton.py --output SITE_PACKAGES/mizzen_triton [--architectures "9.0a"] [--models NAMES]

A start is run of each rank of each model (no_gpu.py), and the kernels that it launches are noted instead of compiled:
so no list of them has to be kept. Then all are compiled, in parallel. The environment's MIZZEN_* count.

At run time TRITON_CACHE_MANAGER=mizzen_triton:ShippedFirst (triton_cache.py) reads the result. --check runs the starts
again, over that cache and with that class, and fails if anything would have to be compiled.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from no_gpu import MODELS, Start, make_libcuda, model_folder, prepare_process, run_start, use_driver


def starts(models: Sequence[str], architectures: Sequence[int]) -> list[Start]:
    """A model is named as in the table, or by its folder; behind a colon its numbers of ranks."""
    made = []
    for entry in models:
        model, _, counts = entry.partition(":")
        known = MODELS.get(model, {}).get("ranks", [1])
        for ranks in map(int, counts.split(",")) if counts else known:
            made += [Start(target, model, ranks, rank) for target in architectures for rank in range(ranks)]
    return made


# ---- in the processes of the pool ----


def make_driver_module() -> None:
    """The C module that every process loads."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()


def note(start: Start) -> set[str]:
    """The kernels that it launches, as Triton describes them for ``preload``."""
    from triton import knobs

    use_driver(start.architecture)
    noted: set[str] = set()

    def hook(*, compile: dict[str, Any], **_: Any) -> bool:
        noted.add(compile["specialization_data"])
        return True  # do not compile, do not launch

    knobs.runtime.jit_cache_hook = hook
    with tempfile.TemporaryDirectory() as folder:
        run_start(start, model_folder(start.model, Path(folder)))
    knobs.runtime.jit_cache_hook = None
    return noted


def compile_kernel(architecture: int, specialization: str) -> str:
    """Compiles it into the cache, and its launcher. Returns its key."""
    import mizzen.kernels.triton.table  # noqa: F401  # fixes the keys, as in a start

    use_driver(architecture)
    module, _, name = json.loads(specialization)["name"].rpartition(".")
    kernel = getattr(importlib.import_module(module), name).preload(specialization)
    kernel._init_handles()  # makes the launcher
    return str(kernel.hash)


def look_up(start: Start, cache: Path) -> dict[str, bool]:
    """The kernels that it launches, and the C modules that it would build: whether each is in the cache."""
    from triton import knobs

    import mizzen.kernels.triton.launch  # noqa: F401  # it listens too: who comes last is heard

    use_driver(start.architecture)
    sys.path.insert(0, str(cache.parent))
    os.environ["TRITON_CACHE_MANAGER"] = f"{cache.name}:ShippedFirst"
    found: dict[str, bool] = {}

    def listener(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        found[f"{src.fn.__name__} {metadata['hash']}"] = cache_hit

    def build(name: str, source: str, *_: Any) -> str:
        found[name] = False
        return source

    knobs.compilation.listener = listener
    knobs.build.impl = build
    with tempfile.TemporaryDirectory() as folder:
        run_start(start, model_folder(start.model, Path(folder)))
    return found


# ---- the tool ----


def compile_all(pool: ProcessPoolExecutor, wanted: list[Start], output: Path) -> None:
    begun_s = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("triton_cache.py"), output / "__init__.py")
    pool.submit(make_driver_module).result()
    kernels: set[tuple[int, str]] = set()
    for start, noted in zip(wanted, pool.map(note, wanted), strict=True):
        kernels |= {(start.architecture, specialization) for specialization in noted}
    print(f"{len(kernels)} kernels of {len(wanted)} ranks noted in {time.monotonic() - begun_s:.0f} s")
    keys = set(pool.map(compile_kernel, *zip(*sorted(kernels), strict=True)))
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{len(keys)} kernels, {size / 2**20:.1f} MiB, {time.monotonic() - begun_s:.0f} s")


def check(pool: ProcessPoolExecutor, wanted: list[Start], cache: Path) -> bool:
    results = list(pool.map(look_up, wanted, [cache] * len(wanted)))
    lost = [
        f"{start}: {name}"
        for start, found in zip(wanted, results, strict=True)
        for name, hit in found.items()
        if not hit
    ]
    print(*lost, f"{sum(map(len, results))} looked up, {len(lost)} not found", sep="\n")
    return not lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a package's folder; its name is the package's")
    parser.add_argument("--architectures", default="9.0a", help="as nvcc names them, with blanks between")
    parser.add_argument("--models", default="", help="of triton_models.json, or folders; :RANKS,... may follow each")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--check", action="store_true", help="compile nothing; fail if a start would")
    arguments = parser.parse_args()
    output: Path = arguments.output.absolute()
    architectures = [int(re.sub(r"\D", "", name)) for name in arguments.architectures.split()]
    wanted = starts(arguments.models.split() or list(MODELS), architectures)
    with tempfile.TemporaryDirectory() as temporary:
        libcuda = Path(temporary)
        make_libcuda(libcuda)
        cache = libcuda / "cache" if arguments.check else output
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            arguments.processes,
            context,
            prepare_process,
            (cache, libcuda),
            # A process does not look up again what it has found before.
            max_tasks_per_child=1 if arguments.check else None,
        ) as pool:
            if arguments.check:
                return 0 if check(pool, wanted, output) else 1
            compile_all(pool, wanted, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
