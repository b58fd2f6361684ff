"""How many leading tokens two keys share: C++ through apache-tvm-ffi, and a numpy twin that needs no compiler.

The library is compiled at first use and cached under the hash of everything it is made of, so that a changed source or
an upgraded tvm-ffi never meets an old binary. Container images have it beside this file, compiled when they were built
(``python -m mizzen.kernels.key_compare``): they need no compiler and no cache that can be written. Importing this is
free; ``load_match_keys`` imports tvm_ffi (and torch).
"""

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

Int32 = npt.NDArray[np.int32]
MatchKeys = Callable[[Int32, Int32], int]

SOURCE = Path(__file__).with_suffix(".cc")
PREBUILT = SOURCE.parent / "prebuilt"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 120.0

log = structlog.get_logger()


def match_length_reference(a: Int32, b: Int32) -> int:
    """The number of equal leading elements of two one-dimensional, contiguous, writable int32 arrays of any lengths.

    (Writable, because numpy does not hand out read-only arrays through DLPack, which carries them to C++.)
    """
    count = min(len(a), len(b))
    different = a[:count] != b[:count]
    if not count:
        return 0
    first = int(different.argmax())
    return first if different[first] else count


def load_match_keys(cache_dir: Path) -> MatchKeys:
    """``match_length(a, b)`` in C++, compiled into ``cache_dir`` if it is not there; the twin if that is impossible."""
    try:
        prebuilt = PREBUILT / _library_name()
        if prebuilt.exists():
            return _load(prebuilt)
        compiler = _compiler()
        if not compiler:
            log.info("key_compare_in_python", reason="no C++ compiler (c++, g++ or $CXX) was found")
            return match_length_reference
        return _load(_compiled(compiler, cache_dir))
    except (OSError, subprocess.SubprocessError, ImportError, RuntimeError, AttributeError) as error:
        # A read-only cache, a broken compiler or an unloadable library must not keep the engine from serving.
        log.warning("key_compare_in_python", reason=_reason(error))
        return match_length_reference


def _load(library: Path) -> MatchKeys:
    import tvm_ffi

    match_length: MatchKeys = tvm_ffi.load_module(str(library)).match_length
    assert match_length(np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)) == 2
    return match_length


def _compiler() -> list[str]:
    """The command, empty if there is none."""
    return shlex.split(os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "")


def _library_name(*compiler: str) -> str:
    import tvm_ffi

    recipe = repr((tvm_ffi.__version__, compiler, FLAGS, os.uname().machine)).encode()
    return f"key_compare-{hashlib.sha256(SOURCE.read_bytes() + recipe).hexdigest()[:16]}.so"


def _compiled(compiler: list[str], cache_dir: Path) -> Path:
    """The library's path. Compiles to a name of its own and renames, so that two processes may do so at once."""
    library = cache_dir / _library_name(*compiler)
    if not library.exists():
        _compile(compiler, library)
    return library


def _compile(compiler: list[str], library: Path) -> None:
    from tvm_ffi import libinfo

    library.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{path}" for path in (libinfo.find_include_path(), libinfo.find_dlpack_include_path())]
    ffi = Path(libinfo.find_libtvm_ffi())
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        command = [*compiler, *FLAGS, *includes, str(SOURCE), "-o", str(output), f"-L{ffi.parent}", "-ltvm_ffi"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        output.replace(library)


def _reason(error: Exception) -> str:
    stderr = getattr(error, "stderr", None)
    return f"{error}: {stderr.strip().splitlines()[-1]}" if stderr and stderr.strip() else str(error)


if __name__ == "__main__":
    _compile(_compiler(), PREBUILT / _library_name())
