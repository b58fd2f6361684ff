"""What all layers are built with, and how each says which part of the checkpoint it holds.

``weights(prefix)`` yields, for every checkpoint tensor that a layer reads, the part that this rank keeps and where it
goes. The loader needs no knowledge of layers, and layers none of file formats.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mizzen.distributed.group import ProcessGroup
from mizzen.kernels.dispatch import Kernels


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where layers live: passed to each of them when it is built."""

    group: ProcessGroup
    kernels: Kernels
    dtype: torch.dtype
    device: torch.device

    def parameter(self, *shape: int) -> nn.Parameter:
        """Uninitialized: the loader fills it."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """``target`` is filled with indices [start, stop) of dimension ``dim`` of the checkpoint's tensor ``name``."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    target: Tensor  # a view into a parameter
    dim: int
    start: int
    stop: int


class Loadable(Protocol):
    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        """``prefix``: the layer's name in the checkpoint, such as "model.layers.0.mlp."."""


def whole(name: str, target: Tensor) -> WeightSlice:
    """A tensor that every rank holds in full."""
    return WeightSlice(name, tuple(target.shape), target, 0, 0, target.shape[0])
