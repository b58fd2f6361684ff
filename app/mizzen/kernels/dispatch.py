"""One table of kernels a device type, chosen once when a model is built. Shapes: see reference.py."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch.nn.functional as F
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
    linear: Callable[[Tensor, Tensor], Tensor]
    gated_linear: Callable[[Tensor, Tensor], Tensor]


def kernels_for(device_type: str, off: frozenset[str] = frozenset()) -> Kernels:
    """``device_type``: torch.device(...).type; ``off``: names of kernels to replace by their torch twins (ablation)."""
    table = _load(_TABLES[device_type])
    if not off:
        return table
    twins = _load(_TABLES["cpu"])
    table = replace(table, **{name: getattr(twins, name) for name in off})
    if off & {"silu_mul", "gated_linear"}:  # the latter does what the former does: each is turned off by itself
        silu_mul = table.silu_mul
        table = replace(table, gated_linear=lambda x, weight: silu_mul(F.linear(x, weight)))
    return table


def _load(path: str) -> Kernels:
    module, _, name = path.partition(":")
    table = getattr(importlib.import_module(module), name)
    assert isinstance(table, Kernels)
    return table
