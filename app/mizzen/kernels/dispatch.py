"""One table of kernels a device type, chosen once when a model is built. Shapes: see reference.py."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

_TABLES = {
    "cpu": "mizzen.kernels.reference:KERNELS",
    "cuda": "mizzen.kernels.triton.table:KERNELS",
}


@dataclass(frozen=True, slots=True)
class Kernels:
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    qk_norm_rope_write_kv: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor | None, Tensor | None, float], Tensor
    ]
    silu_mul: Callable[[Tensor], Tensor]


def kernels_for(device_type: str, off: frozenset[str] = frozenset()) -> Kernels:
    """``device_type``: torch.device(...).type; ``off``: names of kernels to replace by their torch twins (ablation)."""
    table = _load(_TABLES[device_type])
    if not off:
        return table
    twins = _load(_TABLES["cpu"])
    return replace(table, **{name: getattr(twins, name) for name in off})


def _load(path: str) -> Kernels:
    module, _, name = path.partition(":")
    table = getattr(importlib.import_module(module), name)
    assert isinstance(table, Kernels)
    return table
