"""The plain torch kernels against their definitions, in every dtype that a model may have."""

import pytest
import torch

from mizzen.kernels.dispatch import kernels_for
from mizzen.kernels.reference import qk_norm_rope, write_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
kernels = kernels_for("cpu")


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_place_and_norms_the_sum(dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, 64, dtype=dtype), randn(5, 64, dtype=dtype, seed=1), randn(64, dtype=dtype, seed=2)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    out = kernels.add_rms_norm(x, residual, weight, 1e-3)
    assert torch.equal(residual.double(), total)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_qk_norm_rope_rotates_pairs_of_halves_and_leaves_values(dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, dim = 3, 2, 8
    qkv = randn(5, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = torch.rand(5, dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    weights = [randn(dim, dtype=dtype, seed=seed) if normed else None for seed in (2, 3)]
    before = qkv.double()
    qk_norm_rope(qkv, torch.cat((angles.cos(), angles.sin()), -1), heads, kv_heads, *weights, 1e-3)
    assert torch.equal(qkv[:, heads + kv_heads :].double(), before[:, heads + kv_heads :])
    for head in range(heads + kv_heads):
        x = before[:, head]
        weight = weights[0 if head < heads else 1]
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(5, dim // 2).double(), angles.double())
        expected = torch.cat((turned.real, turned.imag), -1)
        torch.testing.assert_close(qkv[:, head].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_touches_its_slots_only(dtype: torch.dtype) -> None:
    k_cache, v_cache = torch.zeros(4, 2, 2, 8, dtype=dtype), torch.zeros(4, 2, 2, 8, dtype=dtype)
    k, v, slots = randn(3, 2, 8, dtype=dtype), randn(3, 2, 8, dtype=dtype, seed=1), torch.tensor([7, 0, 4])
    write_kv(k, v, k_cache, v_cache, slots)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        flat = cache.view(8, 2, 8)
        assert torch.equal(flat[slots], rows)
        assert not flat[[1, 2, 3, 5, 6]].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_takes_the_gates_first(dtype: torch.dtype) -> None:
    gate_up = randn(5, 12, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    out = kernels.silu_mul(gate_up)
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=TOLERANCE[dtype], rtol=0)
