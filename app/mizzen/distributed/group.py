"""Ranks that run one model together. A group is passed to whoever needs it: there is no current group."""

import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mizzen.errors import EngineDead


class ProcessGroup(Protocol):
    """Collectives must be called by all ranks in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums ``tensor`` over the ranks, in place, and returns it."""

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenates the ranks' tensors, all of one shape, along ``dim``, in rank order."""

    def min_int(self, value: int) -> int:
        """The smallest of the ranks' values: what all of them can afford."""

    def barrier(self) -> None: ...

    def close(self) -> None: ...


class SingleGroup:
    """One rank: nothing to exchange, and torch.distributed is not initialized."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def min_int(self, value: int) -> int:
        return value

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class TorchGroup:
    """torch.distributed over gloo (CPU) or nccl (CUDA). The ranks meet at ``store_path``, a file that must be new:
    a restarted group needs another name. A rank that does not come, or stops answering, fails after ``timeout_s``."""

    def __init__(
        self, rank: int, size: int, store_path: Path, *, device: torch.device, timeout_s: float = 600.0
    ) -> None:
        self._rank, self._size, self._device = rank, size, device
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "gloo" and sys.platform == "linux":
            # gloo takes the interface of the host's name, which a container may not be able to resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with _peers_needed():
            dist.init_process_group(
                backend,
                init_method=f"file://{store_path.absolute()}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if backend == "nccl" else None,
            )

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with _peers_needed():
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self._size)]
        with _peers_needed():
            dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim)

    def min_int(self, value: int) -> int:
        cell = torch.tensor([value], dtype=torch.int64, device=self._device)
        with _peers_needed():
            dist.all_reduce(cell, dist.ReduceOp.MIN)
        return int(cell.item())

    def barrier(self) -> None:
        self.min_int(0)

    def close(self) -> None:
        dist.destroy_process_group()


@contextlib.contextmanager
def _peers_needed() -> Iterator[None]:
    """A rank that dies fails the others' collectives: one line is enough, for the reason is the dead rank's to tell."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise EngineDead(f"the ranks lost each other: {reason}") from error


def make_group(
    rank: int, size: int, store_path: Path, *, device: torch.device, timeout_s: float = 600.0
) -> ProcessGroup:
    """``store_path``: a file name that no group has used before; it is not touched if ``size`` is 1."""
    if size == 1:
        return SingleGroup()
    return TorchGroup(rank, size, store_path, device=device, timeout_s=timeout_s)
