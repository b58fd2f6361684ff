"""silu(gate) * up from the merged projection: one pass. The rounding after silu is that of the twin."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.launch import pdl_options, warps_for

# Columns a program covers. Measured: docs/performance.md, "Fused kernels".
BLOCK = 1024
PER_THREAD = 8


@triton.jit
def _silu_mul_kernel(gate_up, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + columns, mask=inside).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + columns, (activated * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor, *, pdl: bool = False, block: int = BLOCK, num_warps: int | None = None) -> Tensor:
    """gate_up [T, 2 * I], gates first, rows contiguous -> silu(gate) * up [T, I]"""
    assert gate_up.stride(1) == 1
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(block, triton.next_power_of_2(size))
        _silu_mul_kernel[(triton.cdiv(size, block), rows)](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=num_warps or warps_for(block, PER_THREAD),
            **pdl_options(gate_up.device, pdl),
        )
    return out
