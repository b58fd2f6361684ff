"""Groups of ranks: every collective over gloo, and where a layer leaves its product for the sum."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mizzen.distributed.group import SingleGroup
from mizzen.kernels.dispatch import kernels_for
from mizzen.layers.base import LayerContext
from mizzen.layers.linear import RowLinear

RANK_SCRIPT = Path(__file__).parent / "group_rank.py"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_sum_gather_and_agree(size: int, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_SCRIPT), str(rank), str(size), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()


class BufferGroup(SingleGroup):
    """Rank 0 or 1 of two whose peer's terms are all zero; it has a buffer of six rows."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buffer = torch.full((6 * 8,), torch.nan)
        self.summed: list[Tensor] = []

    def sum_buffer(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
        assert (columns, dtype) == (8, torch.float32)
        return self.buffer[: rows * columns].view(rows, columns) if rows <= 6 else None

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.summed.append(tensor)
        return tensor


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_split_layer_writes_its_term_into_the_group_s_buffer(rank: int, bias: bool) -> None:
    group = BufferGroup(rank)
    cpu = torch.device("cpu")
    layer = RowLinear("o", 16, 8, bias=bias, context=LayerContext(group, kernels_for("cpu"), torch.float32, cpu))
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    for rows in (1, 6, 7):  # seven rows do not fit
        x = torch.randn(rows, 8, generator=generator)
        expected = x @ layer.weight.T
        if layer.bias is not None and rank == 0:  # the other rank's term must not have it too
            expected = expected + layer.bias
        torch.testing.assert_close(layer(x), expected)
        in_buffer = group.summed[-1].data_ptr() == group.buffer.data_ptr()
        assert in_buffer == (rows <= 6)
