"""One rank of test_group: RANK SIZE STORE. Checks every collective, and ends with exit code 0 if all hold."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from mizzen.distributed.group import ProcessGroup, TorchGroup, make_group

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])


def main() -> None:
    torch.set_num_threads(1)
    group = make_group(RANK, SIZE, Path(sys.argv[3]), device=torch.device("cpu"), timeout_s=60)
    assert (group.rank, group.size) == (RANK, SIZE)
    assert group.min_int(10 - RANK) == 11 - SIZE
    summed = group.all_reduce(torch.full((3, 5), float(RANK + 1)))
    assert torch.equal(summed, torch.full((3, 5), SIZE * (SIZE + 1) / 2))
    assert group.sum_buffer(2, 2, torch.float32) is None, "there is no symmetric memory on the CPU"

    whole = torch.arange(2 * 3 * 4 * SIZE).view(2, 3, 4 * SIZE)
    for dim in (0, 1, 2, -1):
        source = whole.movedim(2, dim)  # not contiguous, but for the last dimension
        part = source.chunk(SIZE, dim)[RANK]
        assert torch.equal(group.all_gather(part, dim), source), dim

    check_that_ranks_share_memory_together_or_not_at_all(group)
    group.barrier()
    group.close()
    again = make_group(RANK, SIZE, Path(f"{sys.argv[3]}-again"), device=torch.device("cpu"), timeout_s=60)
    assert again.min_int(RANK) == 0, "a closed group leaves room for another"
    again.close()


def check_that_ranks_share_memory_together_or_not_at_all(group: ProcessGroup) -> None:
    """GPU 0 reaches all others, these nobody: rank 0 must not wait for the others to map memory with it."""
    assert isinstance(group, TorchGroup)
    reach = mock.patch("torch.cuda.can_device_access_peer", lambda rank, peer: rank == 0)
    made = mock.Mock(return_value=SimpleNamespace(view=lambda *shape: "a buffer"))
    module = SimpleNamespace(SymmetricSums=made, DTYPES=(torch.float32,))
    symmetric = mock.patch.dict(sys.modules, {"mizzen.distributed.symmetric": module})
    with reach, symmetric, mock.patch.object(group, "_symmetric", True):
        group.reserve_sums(4, 4, torch.float32)
        assert not made.called
        assert group.sum_buffer(2, 2, torch.float32) is None
        with mock.patch("torch.cuda.can_device_access_peer", return_value=True):
            group.reserve_sums(4, 4, torch.float16)
            assert not made.called, "nothing would add them"
            group.reserve_sums(4, 4, torch.float32)
        made.assert_called_once_with(64, mock.ANY)
        assert group.sum_buffer(2, 2, torch.float32) == "a buffer"


main()
