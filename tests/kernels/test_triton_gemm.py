"""Products with few rows against float64, and what follows them against the twins.

The interpreter multiplies bf16 matrices wrongly (it takes their bits for integers), so there fp16 stands for both.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from mizzen.kernels import reference

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _with_loops_of_device_bounds(interpreter_loops: None) -> None:
    pass


def random(*shape: int, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device, torch.bfloat16 if device.type == "cuda" else torch.float16)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 16, 40, 128, 200, 256])
@pytest.mark.parametrize(("outputs", "size"), [(64, 128), (128, 256), (64, 1024), (192, 768)])
def test_linear_is_the_product(device: torch.device, rows: int, outputs: int, size: int) -> None:
    from mizzen.kernels.triton.gemm import linear

    x, weight = random(rows, size, device=device), random(outputs, size, device=device, scale=size**-0.5)
    out = reference.summed(linear(x, weight), x.dtype)
    assert out.shape == (rows, outputs)
    assert error(out, x.double() @ weight.double().T) < 4e-3


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("outputs_first", [True, False])
def test_parts_sum_to_the_product(device: torch.device, splits: int, outputs_first: bool) -> None:
    """Rows of x may lie in a wider tensor, and rows that only fill a tile are not written."""
    from mizzen.kernels.triton.gemm import GemmConfig, product

    x, weight = random(70, 1024, device=device)[:, 256:768], random(128, 512, device=device, scale=512**-0.5)
    out = product(x, weight, GemmConfig(64, 64, 64, splits=splits, outputs_first=outputs_first))
    assert out.shape == (splits, 70, 128)
    assert out.dtype == (x.dtype if splits == 1 else torch.float32)
    assert error(out.sum(0), x.double() @ weight.double().T) < 4e-3


@pytest.mark.parametrize("rows", [1, 33, 130])
@pytest.mark.parametrize("outputs_first", [True, False])
def test_gated_products_equal_their_twin(device: torch.device, rows: int, outputs_first: bool) -> None:
    from mizzen.kernels.triton.gemm import GemmConfig, product

    x, weight = random(rows, 256, device=device), random(256, 256, device=device, scale=256**-0.5)
    out = product(x, weight, GemmConfig(64, 32, 64, outputs_first=outputs_first), gated=True)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    assert error(out[0], gate * gate.sigmoid() * up) < 6e-3


def test_the_norm_after_a_product_sums_its_parts(device: torch.device) -> None:
    from mizzen.kernels.triton.norms import add_rms_norm

    parts, residual = torch.randn(4, 9, 256).to(device), random(9, 256, device=device)
    weight, expected = random(256, device=device), residual.clone()
    twin = reference.add_rms_norm(parts, expected, weight, 1e-6)
    out = add_rms_norm(parts, residual, weight, 1e-6)
    assert out.dtype == twin.dtype == residual.dtype
    assert error(residual, expected.double()) < 2e-3
    assert error(out, twin.double()) < 2e-3


def test_the_rotation_after_a_product_sums_its_parts(device: torch.device) -> None:
    from mizzen.kernels.triton.rope import qk_norm_rope_write_kv

    def caches() -> tuple[Tensor, Tensor]:
        return tuple(random(2, 16, 2, 64, device=device).zero_() for _ in range(2))  # type: ignore[return-value]

    parts, rotary = torch.randn(2, 5, 8 * 64).to(device), torch.randn(100, 64).to(device)
    positions, kv_slots = (torch.tensor(values, device=device) for values in ([3, 9, 50, 0, 99], [31, 1, 8, 20, 3]))
    norms = random(64, device=device), random(64, device=device)
    rest: Any = (4, *norms, 1e-6)
    expected_caches, own_caches = caches(), caches()
    expected = reference.qk_norm_rope_write_kv(parts.clone(), positions, rotary, *expected_caches, kv_slots, *rest)
    out = qk_norm_rope_write_kv(parts, positions, rotary, *own_caches, kv_slots, *rest)
    assert out.dtype == own_caches[0].dtype
    for mine, twin in zip((out, *own_caches), (expected, *expected_caches), strict=True):
        assert error(mine, twin.double()) < 3e-3


def test_large_products_are_left_to_cublas(device: torch.device) -> None:
    from mizzen.kernels.triton.gemm import config_for

    assert config_for(64, 1024, 1024, 132) is not None
    assert config_for(257, 1024, 1024, 132) is None
    assert config_for(64, 5120, 17408, 132) is None
    assert config_for(64, 1000, 1024, 132) is None
    config = config_for(64, 1024, 3072, 132)
    assert config is not None
    assert 100 <= 1024 // config.block_n * config.splits <= 132
