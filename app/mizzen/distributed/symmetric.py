"""Sums through symmetric memory: each GPU has a buffer that all ranks map, and a kernel reads its peers' terms itself.

A layer writes its product straight into the buffer, and the sum is made there. One buffer serves all layers, because
both kernels begin and end with a barrier, block by block, over all ranks: nobody reads a term before its owner's
earlier kernels are done, and no kernel ends before the peers have read what its rank may overwrite next. So all use of
the buffer must be on one stream. NVLink multicast is not used.

The kernels are torch's (torch.ops.symm_mem): one-shot, where each rank reads all terms, and two-shot, where each rank
sums its part and writes it to all. Both add in rank order, so that all ranks get the same bits.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

# Two H200s: as fast as two-shot at 1 row of 5120 bf16, 13% slower at 32 rows (docs/performance.md).
ONE_SHOT_BYTES = 160 * 1024
DTYPES = (torch.bfloat16, torch.float32)  # what the kernels add


class SymmetricSums:
    """The default group's buffer of ``num_bytes``, the same on all ranks. Making it is a collective. Raises
    RuntimeError where the GPUs cannot map each other's memory."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._group_name = world.group_name
        self._buffer = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        self._address = self._buffer.untyped_storage().data_ptr()
        self._handle = symm_mem.rendezvous(self._buffer, self._group_name)  # it holds the peers' mappings

    def view(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        """[rows, columns] at the buffer's start; None if they do not fit."""
        num_bytes = rows * columns * dtype.itemsize
        if num_bytes > self._buffer.numel():
            return None
        return self._buffer[:num_bytes].view(dtype).view(rows, columns)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._address

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """``tensor`` is a ``view``; the sum is in it, or in a new tensor."""
        if tensor.nbytes <= ONE_SHOT_BYTES:
            return self.one_shot(tensor)
        return self.two_shot(tensor)

    def one_shot(self, tensor: Tensor) -> Tensor:
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", self._group_name)
        return summed

    def two_shot(self, tensor: Tensor) -> Tensor:
        summed: Tensor = torch.ops.symm_mem.two_shot_all_reduce_(tensor, "sum", self._group_name)
        return summed
