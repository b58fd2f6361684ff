"""Triton's cache where kernels came with the image: those are read from this module's folder, which is never written.

All others are compiled when they are needed, into TRITON_CACHE_DIR, as ever. TRITON_CACHE_MANAGER names the class.
compile_triton.py copies this file to where it puts the kernels, as a package's __init__.py.
"""

import json
from functools import cached_property
from pathlib import Path

from triton.runtime.cache import CacheManager, FileCacheManager

SHIPPED = Path(__file__).parent


class ShippedFirst(CacheManager):  # type: ignore[misc]  # Triton ships no types
    """Of one key, which stands for Triton's version, the kernel's source, its specialization and the architecture."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._shipped = SHIPPED / key
        self._arguments = key, override, dump

    @cached_property
    def _own(self) -> FileCacheManager:  # it makes its folder at once: only if it must, for none may be writable
        return FileCacheManager(*self._arguments)

    def get_file(self, filename: str) -> str | None:
        path = self._shipped / filename
        return str(path) if path.exists() else self._own.get_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """A kernel's files by name. The index has the paths that they had when it was written; these may have moved."""
        index = self._shipped / f"__grp__{filename}"
        if not index.exists():
            own: dict[str, str] | None = self._own.get_group(filename)
            return own
        return {name: str(self._shipped / name) for name in json.loads(index.read_text())["child_paths"]}

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        return str(self._own.put(data, filename, binary))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return str(self._own.put_group(filename, group))
