"""One table of kernels a device type, chosen once when a model is built. Shapes: see reference.py."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

_TABLES = {
    "cpu": "mizzen.kernels.reference:KERNELS",
    "cuda": "mizzen.kernels.reference:KERNELS",
}


@dataclass(frozen=True, slots=True)
class Kernels:
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    qk_norm_rope: Callable[[Tensor, Tensor, int, int, Tensor | None, Tensor | None, float], None]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    silu_mul: Callable[[Tensor], Tensor]


def kernels_for(device_type: str) -> Kernels:
    """``device_type``: torch.device(...).type"""
    module, _, name = _TABLES[device_type].partition(":")
    table = getattr(importlib.import_module(module), name)
    assert isinstance(table, Kernels)
    return table
