"""Triton kernels run on a GPU, or, with TRITON_INTERPRET=1, on CPU tensors."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        torch.set_num_threads(1)
        return torch.device("cpu")
    pytest.skip("needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)")
