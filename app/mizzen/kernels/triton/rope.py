"""From the QKV projection to attention in one kernel: Q/K norms, rotation, K and V into their pages.

A program takes one token and a few neighbouring heads, whatever their kind: queries go to a tensor of their own, keys
and values straight to the caches. Roundings are the twin's (kernels/reference.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options

# Heads a program takes. Measured: docs/performance.md, "Fused kernels".
HEADS = 16


@triton.jit
def _kernel(
    qkv,
    positions,
    table,
    q_weight,
    k_weight,
    q_out,
    k_cache,
    v_cache,
    kv_slots,
    row_stride,
    part_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype = q_out.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, HALF_BLOCK)
    in_head = half < HALF
    is_q = heads < NUM_HEADS
    is_v = heads >= NUM_HEADS + NUM_KV_HEADS
    is_kv = heads < NUM_HEADS + 2 * NUM_KV_HEADS
    if NORM:
        q_weight_1 = tl.load(q_weight + half, mask=in_head, other=0.0).to(tl.float32)
        q_weight_2 = tl.load(q_weight + HALF + half, mask=in_head, other=0.0).to(tl.float32)
        k_weight_1 = tl.load(k_weight + half, mask=in_head, other=0.0).to(tl.float32)
        k_weight_2 = tl.load(k_weight + HALF + half, mask=in_head, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.load(positions + token)
    slot = tl.load(kv_slots + token)
    offsets = heads[:, None] * HEAD_DIM + half[None, :]  # [HEADS, HALF]
    inside = is_kv[:, None] & in_head[None, :]
    x1 = tl.load(qkv + token * row_stride + offsets, mask=inside, other=0.0)
    x2 = tl.load(qkv + token * row_stride + HALF + offsets, mask=inside, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            x1 += tl.load(qkv + part * part_stride + token * row_stride + offsets, mask=inside, other=0.0)
            x2 += tl.load(qkv + part * part_stride + token * row_stride + HALF + offsets, mask=inside, other=0.0)
        x1, x2 = x1.to(dtype), x2.to(dtype)
    cos = tl.load(table + position * HEAD_DIM + half, mask=in_head, other=0.0)[None, :]
    sin = tl.load(table + position * HEAD_DIM + HALF + half, mask=in_head, other=0.0)[None, :]
    y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(y1 * y1, 1) + tl.sum(y2 * y2, 1)) / HEAD_DIM + eps)[:, None]
        y1 = (y1 * scale).to(dtype).to(tl.float32) * tl.where(is_q[:, None], q_weight_1[None, :], k_weight_1[None, :])
        y2 = (y2 * scale).to(dtype).to(tl.float32) * tl.where(is_q[:, None], q_weight_2[None, :], k_weight_2[None, :])
        y1, y2 = y1.to(dtype).to(tl.float32), y2.to(dtype).to(tl.float32)
    z1 = tl.where(is_v[:, None], x1, (y1 * cos - y2 * sin).to(dtype))
    z2 = tl.where(is_v[:, None], x2, (y2 * cos + y1 * sin).to(dtype))

    to_q = is_q[:, None] & in_head[None, :]
    q_row = q_out + token * (NUM_HEADS * HEAD_DIM)
    tl.store(q_row + offsets, z1, mask=to_q)
    tl.store(q_row + HALF + offsets, z2, mask=to_q)
    to_k = (heads >= NUM_HEADS)[:, None] & ~is_v[:, None] & in_head[None, :]
    k_row = k_cache + (slot * NUM_KV_HEADS - NUM_HEADS) * HEAD_DIM
    tl.store(k_row + offsets, z1, mask=to_k)
    tl.store(k_row + HALF + offsets, z2, mask=to_k)
    to_v = is_v[:, None] & inside
    v_row = v_cache + (slot * NUM_KV_HEADS - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    tl.store(v_row + offsets, z1, mask=to_v)
    tl.store(v_row + HALF + offsets, z2, mask=to_v)


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
    *,
    pdl: bool | None = None,
    heads: int = HEADS,
    num_warps: int | None = None,
) -> Tensor:
    """qkv [T, (num_heads + 2 * kv_heads) * D], or parts of it [S, T, ...], not changed; positions and kv_slots [T]
    int64; rotary [positions, D] float32; caches [pages, page_size, kv_heads, D], contiguous; weights [D] or None: no
    norms. Returns the queries [T, num_heads, D], contiguous; keys and values are in the caches at kv_slots."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    pdl = qkv.dim() == 3 if pdl is None else pdl  # parts come from a kernel of ours
    qkv = qkv if qkv.dim() == 3 else qkv[None]
    assert qkv.stride(2) == 1
    assert qkv.shape[2] == (num_heads + 2 * num_kv_heads) * head_dim
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert rotary.is_contiguous()
    parts, tokens, _ = qkv.shape
    q = torch.empty((tokens, num_heads, head_dim), dtype=k_cache.dtype, device=qkv.device)
    if tokens:
        half_block = triton.next_power_of_2(head_dim // 2)
        _kernel[(triton.cdiv(num_heads + 2 * num_kv_heads, heads), tokens)](
            qkv,
            positions,
            rotary,
            q_weight,
            k_weight,
            q,
            k_cache,
            v_cache,
            kv_slots,
            qkv.stride(1),
            qkv.stride(0),
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=half_block,
            HEADS=heads,
            PARTS=parts,
            NORM=q_weight is not None,
            num_warps=num_warps or max(1, heads * half_block // 256),
            **pdl_options(qkv.device, pdl),
        )
    return q
