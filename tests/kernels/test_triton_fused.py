"""Triton's norms, activation, rotation and step inputs against their torch twins, on fresh random data.

Outputs are poisoned where the caller owns them. Half-precision results may rarely differ from the twin's by a rounding;
the interpreter truncates where a GPU rounds to bf16, so there only the size of the difference is checked.
"""

import pytest
import torch
from torch import Tensor

from mizzen.kernels import reference

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_same_but_for_rounding(out: Tensor, expected: Tensor) -> None:
    assert out.shape == expected.shape
    assert out.dtype == expected.dtype
    eps = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, expected, rtol=4 * eps, atol=4 * eps)
    if out.dtype == torch.float16 or (out.dtype == torch.bfloat16 and out.is_cuda):
        assert (out != expected).sum() <= 0.01 * out.numel()


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (7, 5120), (3, 257), (130, 576), (0, 64)])
def test_norms_equal_their_twins(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    from mizzen.kernels.triton import norms

    x, residual = (random(rows, size, dtype=dtype, device=device) for _ in range(2))
    weight = random(size, dtype=dtype, device=device)
    assert_same_but_for_rounding(norms.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    mine = residual.clone()
    out = norms.add_rms_norm(x, mine, weight, 1e-6)
    assert_same_but_for_rounding(out, reference.add_rms_norm(x, residual, weight, 1e-6))
    assert_same_but_for_rounding(mine, residual)


def test_rms_norm_takes_rows_of_a_wider_tensor(device: torch.device) -> None:
    from mizzen.kernels.triton import norms

    x = random(5, 3, 96, dtype=torch.bfloat16, device=device)
    weight = random(32, dtype=torch.bfloat16, device=device)
    part = x[:, :, 32:64]
    assert_same_but_for_rounding(norms.rms_norm(part, weight, 1e-5), reference.rms_norm(part, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 3072), (9, 1536), (3, 77), (2, 17408), (0, 8)])
def test_silu_mul_equals_its_twin(device: torch.device, dtype: torch.dtype, rows: int, size: int) -> None:
    from mizzen.kernels.triton import activation

    gate_up = random(rows, 2 * size, dtype=dtype, device=device) * 4
    assert_same_but_for_rounding(activation.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 16, 8, 128), (5, 40, 8, 128), (4, 9, 3, 64), (3, 5, 1, 80), (2, 7, 1, 128), (0, 4, 2, 64)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm_rope_write_kv_equals_its_twin(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, norm: bool
) -> None:
    from mizzen.kernels.triton import rope

    pages, page_size, max_positions = 6, 4, 50
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    before = qkv.clone()
    positions = torch.randint(max_positions, (tokens,), device=device)
    angles = torch.rand(max_positions, head_dim // 2, device=device) * 6
    rotary = torch.cat((angles.cos(), angles.sin()), -1)
    kv_slots = torch.randperm(pages * page_size, device=device)[:tokens]
    q_weight, k_weight = (random(head_dim, dtype=dtype, device=device) if norm else None for _ in range(2))
    shape = (pages, page_size, kv_heads, head_dim)
    k_cache, v_cache, k_expected, v_expected = (torch.full(shape, -7.0, dtype=dtype, device=device) for _ in range(4))
    rest = (kv_slots, heads, q_weight, k_weight, 1e-6)
    q = rope.qk_norm_rope_write_kv(qkv, positions, rotary, k_cache, v_cache, *rest)
    assert torch.equal(qkv, before)
    expected = reference.qk_norm_rope_write_kv(qkv, positions, rotary, k_expected, v_expected, *rest)
    assert q.is_contiguous()
    if tokens:
        assert_same_but_for_rounding(q, expected)
        assert_same_but_for_rounding(k_cache.flatten(0, 1)[kv_slots], k_expected.flatten(0, 1)[kv_slots])
    others = torch.ones(pages * page_size, dtype=torch.bool, device=device)
    others[kv_slots] = False
    assert (k_cache.flatten(0, 1)[others] == -7).all()
    assert torch.equal(v_cache, v_expected)


@pytest.mark.parametrize("rows", [1, 31, 33, 256])
def test_prepare_decode_equals_its_twin(device: torch.device, rows: int) -> None:
    from mizzen.kernels.triton import prepare

    num_slots, page_size, max_len = 300, 16, 90
    token_table = torch.randint(150_000, (num_slots, max_len + 1), dtype=torch.int32, device=device)
    page_table = torch.randint(1 << 30, (num_slots, -(-max_len // page_size)), dtype=torch.int32, device=device)
    slots = torch.randperm(num_slots, device=device)[:rows]
    seq_lens = torch.randint(1, max_len + 1, (rows,), dtype=torch.int32, device=device)
    results = [torch.full((3, rows), -1, dtype=torch.int64, device=device) for _ in range(2)]
    prepare.prepare_decode(slots, seq_lens, token_table, page_table, page_size, *results[0])
    reference.prepare_decode(slots, seq_lens, token_table, page_table, page_size, *results[1])
    assert torch.equal(*results)
    assert (results[0][2] > 1 << 31).any() or rows < 31  # slots beyond 32 bits were among them


@pytest.mark.parametrize("off", [frozenset(), frozenset({"rms_norm", "linear"})])
def test_each_kernel_can_be_switched_off(off: frozenset[str]) -> None:
    from mizzen.kernels.dispatch import kernels_for

    table = kernels_for("cuda", off)
    for name in ("rms_norm", "add_rms_norm", "silu_mul", "qk_norm_rope_write_kv", "linear"):
        assert (getattr(table, name) is getattr(reference.KERNELS, name)) == (name in off)
