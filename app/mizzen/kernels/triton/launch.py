"""How kernels are launched: with programmatic dependent launch (PDL) where the GPU has it.

A kernel launched so may start before the one ahead of it in the stream has ended. Each of ours therefore keeps one
order: what no kernel writes (weights) may be read at once; ``gdc_wait`` comes before anything else is read or written;
only then are the next kernel's programs let in. So a kernel that has passed its wait knows all earlier ones finished.
(Attention also reads its plan at once, which was written before the kernel ahead of it began; decode_attention.py says
why it waits last beside prefill.)
"""

from functools import cache
from typing import Any

import torch
import triton

compiled: list[str] = []  # kernels that this process had to compile, as they were in no cache


def _note(*, src: Any, cache_hit: bool, **_: Any) -> None:
    if not cache_hit:
        compiled.append(src.name)


triton.knobs.compilation.listener = _note


@cache
def _has_pdl(device: torch.device) -> bool:
    # The interpreter (TRITON_INTERPRET=1: kernels on CPU tensors, for tests) knows neither the option nor the asm.
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 6  # Triton's interpreter: few, but enough to cut work among them
    return torch.cuda.get_device_properties(device).multi_processor_count


def pdl_options(device: torch.device, pdl: bool) -> dict[str, Any]:
    """Keyword arguments for the launch of a kernel that has a ``PDL`` constexpr: it lets the next kernel in early, and,
    with ``pdl``, starts early itself. Behind cuBLAS that costs 0.2 to 0.5 us a kernel, as cuBLAS lets nobody in early
    (docs/performance.md, "Fused kernels"): it is for kernels that follow one of ours."""
    if not _has_pdl(device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": pdl}


def warps_for(elements: int, per_thread: int) -> int:
    """Warps that give each thread about ``per_thread`` of a program's elements: a power of two from 1 to 16."""
    return int(min(max(triton.next_power_of_2(elements) // (32 * per_thread), 1), 16))
