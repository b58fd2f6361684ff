"""One rank of test_group: RANK SIZE STORE. Checks every collective, and ends with exit code 0 if all hold."""

import sys
from pathlib import Path

import torch

from mizzen.distributed.group import make_group

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

    group.barrier()
    group.close()
    again = make_group(RANK, SIZE, Path(f"{sys.argv[3]}-again"), device=torch.device("cpu"), timeout_s=60)
    assert again.min_int(RANK) == 0, "a closed group leaves room for another"
    again.close()


main()
