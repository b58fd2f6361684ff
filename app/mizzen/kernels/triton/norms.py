"""RMSNorm, alone or after adding to the residual: one program a row, one read, one write.

Roundings are those of the twins in kernels/reference.py, so that runs on CPU and GPU differ by the order of sums only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options, warps_for

# Elements a thread holds of a row. Measured: docs/performance.md, "Fused kernels".
PER_THREAD = 8
MAX_WARPS = 8


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    part_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < SIZE
    dtype = out.dtype.element_ty
    w = tl.load(weight + offsets, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + row * x_stride + offsets, mask=inside, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            value += tl.load(x + part * part_stride + row * x_stride + offsets, mask=inside, other=0.0)
        value = value.to(dtype)
    if ADD:
        before = tl.load(residual + row * SIZE + offsets, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(dtype)
        tl.store(residual + row * SIZE + offsets, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide.to(dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row * SIZE + offsets, normed.to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False, num_warps: int | None = None) -> Tensor:
    """x [..., H], its last dimension contiguous; weight [H] -> [..., H]"""
    rows = x.reshape(-1, x.shape[-1])
    return _launch(rows[None], None, weight, eps, pdl, num_warps).view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool | None = None, num_warps: int | None = None
) -> Tensor:
    """x [T, H], or parts of it [S, T, H], is added to residual [T, H], contiguous, in place; returns the norm of the
    sum [T, H]. ``pdl``: None: for parts, as they come from a kernel of ours."""
    assert residual.is_contiguous()
    parts = x if x.dim() == 3 else x[None]
    return _launch(parts, residual, weight, eps, parts is x if pdl is None else pdl, num_warps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pdl: bool, num_warps: int | None) -> Tensor:
    assert x.stride(-1) == 1
    parts, rows, size = x.shape
    out = torch.empty((rows, size), dtype=weight.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            x.stride(1),
            x.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            PARTS=parts,
            ADD=residual is not None,
            num_warps=num_warps or min(warps_for(block, PER_THREAD), MAX_WARPS),
            **pdl_options(x.device, pdl),
        )
    return out
