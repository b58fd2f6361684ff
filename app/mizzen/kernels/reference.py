"""Plain torch versions of every kernel: what the CPU runs, and what the tests of other versions compare with.

Norms and rotations compute in float32 whatever the dtype of their input, and round once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mizzen.kernels.dispatch import Kernels


def summed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a linear kernel returned: [T, N], or float32 parts [S, T, N] of a sum that the next kernel makes."""
    return x if x.dim() == 2 else x.sum(0).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]"""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], or parts [S, T, H], is added to residual [T, H] in place; returns the norm of the sum [T, H]."""
    residual.add_(summed(x, residual.dtype))
    return rms_norm(residual, weight, eps)


def qk_norm_rope(
    qkv: Tensor,
    cos_sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> None:
    """Rotates, in place, the queries and keys in qkv [T, heads + 2 * kv_heads, D] by the angles of their tokens:
    cos_sin [T, D] float32 holds the cosines of D / 2 angles, then their sines. With weights [D], each head is first
    normalized."""
    if q_weight is not None and k_weight is not None:
        for heads, weight in ((qkv[:, :num_heads], q_weight), (qkv[:, num_heads:][:, :num_kv_heads], k_weight)):
            heads.copy_(rms_norm(heads, weight, eps))
    rotated = qkv[:, : num_heads + num_kv_heads]
    wide = rotated.float()  # the same memory if it is float32 already
    cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)  # [T, 1, D / 2]
    first, second = wide.chunk(2, -1)  # [T, heads + kv_heads, D / 2]
    first_sin = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(first_sin)
    if wide is not rotated:
        rotated.copy_(wide)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_slots: Tensor) -> None:
    """Row t of k and v [T, kv_heads, D] goes to slot kv_slots[t] of the caches [pages, page_size, kv_heads, D]."""
    k_cache.flatten(0, 1).index_copy_(0, kv_slots, k)
    v_cache.flatten(0, 1).index_copy_(0, kv_slots, v)


def qk_norm_rope_write_kv(
    qkv: Tensor,
    positions: Tensor,
    rotary: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_slots: Tensor,
    num_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """All between the QKV projection and attention: qk_norm_rope, then write_kv.

    qkv [T, (num_heads + 2 * kv_heads) * D], or parts [S, T, ...], may be changed; rotary [max positions, D] float32 as
    cos_sin above; caches [pages, page_size, kv_heads, D]. Returns the queries [T, num_heads, D]."""
    kv_heads, head_dim = k_cache.shape[2:]
    qkv = summed(qkv, k_cache.dtype)
    heads = qkv.view(len(qkv), num_heads + 2 * kv_heads, head_dim)
    qk_norm_rope(heads, rotary[positions], num_heads, kv_heads, q_weight, k_weight, eps)
    k, v = heads[:, num_heads : num_heads + kv_heads], heads[:, num_heads + kv_heads :]
    write_kv(k, v, k_cache, v_cache, kv_slots)
    return heads[:, :num_heads]


def prepare_decode(
    slots: Tensor,
    seq_lens: Tensor,
    token_table: Tensor,
    page_table: Tensor,
    page_size: int,
    token_ids: Tensor,
    positions: Tensor,
    kv_slots: Tensor,
) -> None:
    """A decode step's inputs from the state by slot. slots and seq_lens [R], the step's token counted; token_table
    [slots, L] and page_table [slots, P] int32. Fills token_ids, positions and kv_slots [R] int64."""
    rows = slots.long()
    torch.sub(seq_lens.long(), 1, out=positions)
    token_ids.copy_(token_table[rows, positions])
    pages = page_table[rows, positions // page_size].long()
    kv_slots.copy_(pages * page_size + positions % page_size)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * I], gates first -> silu(gate) * up [T, I]"""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K]; weight [2 * I, K], gates first -> silu(gate) * up [T, I]"""
    return silu_mul(F.linear(x, weight))


KERNELS = Kernels(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    qk_norm_rope_write_kv=qk_norm_rope_write_kv,
    silu_mul=silu_mul,
    linear=F.linear,
    gated_linear=gated_linear,
)


def page_indices(
    page_table: Tensor, row_slots: Tensor, seq_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """indptr [R + 1], indices [all pages of the rows] and last_page_len [R] of rows with seq_lens [R] tokens, in the
    pages page_table[row_slots]: FlashInfer's form of page tables. All int32."""
    counts = (seq_lens + page_size - 1) // page_size
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, out=indptr[1:])
    columns = torch.arange(page_table.shape[1], device=counts.device)
    indices = page_table[row_slots.long()][columns < counts.unsqueeze(-1)]
    return indptr, indices, seq_lens - (counts - 1) * page_size
