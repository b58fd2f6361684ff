"""Rows' pages end to end, against plain torch."""

import pytest
import torch

from mizzen.kernels import reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("lengths", "page_size"),
    [
        ([1], 16),
        ([1, 16, 17, 300, 32, 1, 1], 16),
        ([64, 65, 1, 63], 64),
        ([5, 1000, 3], 1),  # more pages than a program copies at a time
    ],
)
def test_page_indices_equal_their_twin(lengths: list[int], page_size: int, device: torch.device) -> None:
    from mizzen.kernels.triton.page_indices import page_indices

    slots, width = len(lengths) + 2, -(-max(lengths) // page_size) + 1
    page_table = torch.randperm(slots * width).int().view(slots, width).to(device)
    row_slots = torch.randperm(slots).int()[: len(lengths)].to(device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    expected = reference.page_indices(page_table, row_slots, seq_lens, page_size)
    total = len(expected[1])
    indptr, indices, last_page_len = (
        torch.full((size,), -1, dtype=torch.int32, device=device)
        for size in (len(lengths) + 1, total + 5, len(lengths))
    )
    page_indices(page_table, row_slots, seq_lens, page_size, indptr, indices, last_page_len)
    for got, twin in zip((indptr, indices[:total], last_page_len), expected, strict=True):
        assert torch.equal(got, twin)
    assert (indices[total:] == -1).all()
