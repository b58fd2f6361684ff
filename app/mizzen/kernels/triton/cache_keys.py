"""Triton's cache keys of our kernels, made independent of which kernel is launched first.

A key holds the constants that a kernel's functions read, but Triton 3.6 leaves out those of a function whose own key
was not asked for before (DependenciesFinder._update_hash). So all keys are asked for in one order, before any launch:
else a cache that was filled by another process might be found to lack kernels that it has.
"""

import importlib
import pkgutil

from triton.runtime.jit import JITFunction

import mizzen.kernels.triton


def fix_cache_keys() -> None:
    for module in pkgutil.iter_modules(mizzen.kernels.triton.__path__, "mizzen.kernels.triton."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                _ = value.cache_key  # computed once
