"""The torch twins of kernels that replace several others, by hand-made examples: CI runs no GPU kernel."""

import pytest
import torch

from mizzen.kernels import reference
from mizzen.kernels.dispatch import kernels_for


def test_prepare_decode_reads_the_last_token_and_finds_its_place_in_the_cache() -> None:
    token_table = torch.arange(100, 140, dtype=torch.int32).view(4, 10)
    page_table = torch.tensor([[9, 9, 9], [5, 8, 9], [9, 9, 9], [7, 9, 9]], dtype=torch.int32)
    token_ids, positions, kv_slots = torch.full((3, 2), -1, dtype=torch.int64)
    slots, seq_lens = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([1, 6], dtype=torch.int32)
    reference.prepare_decode(slots, seq_lens, token_table, page_table, 4, token_ids, positions, kv_slots)
    assert token_ids.tolist() == [130, 115]
    assert positions.tolist() == [0, 5]
    assert kv_slots.tolist() == [28, 33]


def test_qk_norm_rope_write_kv_rotates_by_position_and_fills_the_named_slots() -> None:
    heads, kv_heads, head_dim = 2, 1, 4
    qkv = torch.randn(2, (heads + 2 * kv_heads) * head_dim)
    q, k, v = qkv.clone().view(2, 4, head_dim).split((heads, kv_heads, kv_heads), 1)
    rotary = torch.tensor([[1.0, 1, 0, 0], [0.0, 0, 1, 1]])  # position 1 turns by a right angle
    k_cache, v_cache = (torch.full((3, 2, kv_heads, head_dim), -7.0) for _ in range(2))
    rotated = reference.qk_norm_rope_write_kv(
        qkv, torch.tensor([1, 0]), rotary, k_cache, v_cache, torch.tensor([4, 1]), heads, None, None, 1e-6
    )

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., 2:], x[..., :2]), -1)

    torch.testing.assert_close(rotated, torch.stack((turned(q[0]), q[1])))
    expected_k, expected_v = torch.full((6, 1, 4), -7.0), torch.full((6, 1, 4), -7.0)
    expected_k[4], expected_k[1] = turned(k[0]), k[1]
    expected_v[4], expected_v[1] = v[0], v[1]
    torch.testing.assert_close(k_cache.flatten(0, 1), expected_k)
    torch.testing.assert_close(v_cache.flatten(0, 1), expected_v)


def test_an_unknown_kernel_cannot_be_switched_off() -> None:
    with pytest.raises(AttributeError):
        kernels_for("cpu", frozenset({"no_such_kernel"}))


def test_gated_linear_uses_the_activation_that_is_left_on() -> None:
    x, weight = torch.randn(3, 8), torch.randn(12, 8)
    expected = reference.silu_mul(torch.nn.functional.linear(x, weight))
    for off in (frozenset[str](), frozenset({"silu_mul"}), frozenset({"gated_linear"})):
        assert torch.equal(kernels_for("cpu", off).gated_linear(x, weight), expected)
