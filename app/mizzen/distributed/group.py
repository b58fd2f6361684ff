"""Ranks that run one model together. A group is passed to whoever needs it: there is no current group."""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from mizzen.config.config import AllReduce
from mizzen.errors import EXIT_FAILED, EngineDead

if TYPE_CHECKING:
    from mizzen.distributed.symmetric import SymmetricSums

log = structlog.get_logger()

# Multicast objects are the GPU driver's and outlive a process that dies badly: off unless asked for.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

# The name from torch 2.13 on, which warns of the old one.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroup(Protocol):
    """Collectives must be called by all ranks in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def reserve_sums(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Before anything else on the device: the largest tensor that ``sum_buffer`` will be asked for."""

    def sum_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        """A place [rows, columns] whose ``all_reduce`` is the fastest; None: any other will do. It is the same memory
        each time, so the sum must have been used before the next one is written."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over the ranks, in place or not: ``tensor`` has no other use after."""

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenates the ranks' tensors, all of one shape, along ``dim``, in rank order."""

    def min_int(self, value: int) -> int:
        """The smallest of the ranks' values: what all of them can afford."""

    def barrier(self) -> None: ...

    def close(self) -> None:
        """After all work is done, and the peers have ended or close too."""

    def abandon(self, exit_code: int = EXIT_FAILED) -> None:
        """Instead of ``close``, where a peer may be gone: waits for nothing, now or when the process ends, which on
        CUDA it then does with ``exit_code``."""


class SingleGroup:
    """One rank: nothing to exchange, and torch.distributed is not initialized."""

    rank = 0
    size = 1

    def reserve_sums(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        pass

    def sum_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        return None

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

    def abandon(self, exit_code: int = EXIT_FAILED) -> None:
        pass


class TorchGroup:
    """torch.distributed over gloo (CPU tensors) and nccl (CUDA tensors). The ranks meet at ``store_path``, a file that
    must be new: a restarted group needs another name. A rank that does not come, or stops answering, fails after
    ``timeout_s``; what the host waits for goes through gloo, which fails as soon as a peer is gone.

    NCCL's calls, and the sums', are enqueued on the current stream, eagerly or into a CUDA graph. Graphs must be gone
    before ``close``: NCCL waits for them."""

    def __init__(
        self,
        rank: int,
        size: int,
        store_path: Path,
        *,
        device: torch.device,
        timeout_s: float,
        all_reduce: AllReduce,
        nvlink_multicast: bool,
    ) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._symmetric = device.type == "cuda" and all_reduce == "auto"
        self._sums: SymmetricSums | None = None
        self._exit_code: int | None = None
        if sys.platform == "linux":
            # gloo takes the interface of the host's name, which a container may not be able to resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if not nvlink_multicast:
            os.environ.update(NO_MULTICAST)
        cuda = device.type == "cuda"
        with _peers_needed():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=f"file://{store_path.absolute()}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if cuda else None,  # connects at once, not in the first step
            )
        atexit.register(self._leave)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def reserve_sums(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """A collective. Where the GPUs cannot map each other's memory, sums stay with NCCL."""
        if not self._symmetric:
            return
        from mizzen.distributed.symmetric import DTYPES, SymmetricSums  # its operators need a torch with CUDA

        if dtype not in DTYPES:
            return
        num_bytes = rows * columns * dtype.itemsize
        peers = set(range(self._size)) - {self._rank}  # rank r is on GPU r
        reached = all(torch.cuda.can_device_access_peer(self._rank, peer) for peer in peers)
        sums = None
        if self.min_int(int(reached)):  # the ranks make them together or not at all
            try:
                sums = SymmetricSums(num_bytes, self._device)
            except RuntimeError as error:
                log.warning("no symmetric memory: sums go through NCCL", reason=str(error).partition("\n")[0])
        self._sums = sums if self.min_int(int(sums is not None)) else None
        if self._rank == 0:
            log.info("sums over the ranks", through="symmetric memory" if self._sums else "NCCL", bytes=num_bytes)

    def sum_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        return self._sums.view(rows, columns, dtype) if self._sums is not None else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if self._sums is not None and self._sums.holds(tensor):
            return self._sums.all_reduce(tensor)
        with _peers_needed():
            dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        dim %= tensor.dim()
        tensor = tensor.contiguous()
        parts = tensor.new_empty((self._size * tensor.shape[0], *tensor.shape[1:]))
        with _peers_needed():
            _gather(parts, tensor)
        return parts.view(self._size, *tensor.shape).movedim(0, dim).flatten(dim, dim + 1)

    def min_int(self, value: int) -> int:
        cell = torch.tensor([value], dtype=torch.int64)
        with _peers_needed():
            dist.all_reduce(cell, dist.ReduceOp.MIN)
        return int(cell.item())

    def barrier(self) -> None:
        self.min_int(0)

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._sums = None
        if self._device.type == "cuda" and dist.group.WORLD is not None:
            # NCCL's orderly end waits for the peers, and they are gone, or about to be.
            dist.group.WORLD._get_backend(self._device).abort()
        dist.destroy_process_group()

    def abandon(self, exit_code: int = EXIT_FAILED) -> None:
        if self._device.type == "cuda":
            self._exit_code = exit_code
        else:
            self.close()

    def _leave(self) -> None:
        """A kernel that waits for a lost peer waits for ever, and Python's own exit for the kernel; NCCL's end waits
        for CUDA graphs."""
        if self._exit_code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._exit_code)


@contextlib.contextmanager
def _peers_needed() -> Iterator[None]:
    """A rank that dies fails the others' collectives: one line is enough, for the reason is the dead rank's to tell."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise EngineDead(f"the ranks lost each other: {reason}") from error


def make_group(
    rank: int,
    size: int,
    store_path: Path,
    *,
    device: torch.device,
    timeout_s: float = 600.0,
    all_reduce: AllReduce = "auto",
    nvlink_multicast: bool = False,
) -> ProcessGroup:
    """``store_path``: a file name that no group has used before; it is not touched if ``size`` is 1. ``all_reduce``:
    how CUDA tensors in a ``sum_buffer`` are summed; "auto" is symmetric memory where the GPUs reach each other's."""
    if size == 1:
        return SingleGroup()
    return TorchGroup(
        rank,
        size,
        store_path,
        device=device,
        timeout_s=timeout_s,
        all_reduce=all_reduce,
        nvlink_multicast=nvlink_multicast,
    )
