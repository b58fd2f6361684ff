"""Triton kernels run on a GPU, or, with TRITON_INTERPRET=1, on CPU tensors."""

import os
from typing import Any

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


@pytest.fixture
def interpreter_loops(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter cannot take loop bounds from tensors with numpy >= 2.4: int() wants 0 dimensions."""
    if device.type == "cpu":
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patch_with_index(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
