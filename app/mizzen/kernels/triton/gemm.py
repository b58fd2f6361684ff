"""Products with few rows, where a step's GEMMs are latency and not bytes.

Every kernel lets the next one in early (PDL), which cuBLAS's do not. A small output is cut along K, so that all
multiprocessors work; the next kernel, which must read it anyway, sums the parts.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mizzen.kernels.triton.activation import silu_mul
from mizzen.kernels.triton.launch import num_multiprocessors, pdl_options


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """A program computes block_t rows of x by block_n outputs; ``outputs_first``: outputs take the place of the tensor
    cores' 64 rows, as they must where x has fewer."""

    block_t: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1
    outputs_first: bool = True


MAX_WEIGHT = 8 << 20  # elements: with larger weights, bytes count more than latency, and cuBLAS is as fast


@cache
def config_for(rows: int, outputs: int, size: int, multiprocessors: int, *, gated: bool = False) -> GemmConfig | None:
    """One wave of programs, as full as K can make it; None if there is none, or if cuBLAS is better. ``outputs``: of
    the result. Measured on an H200: docs/performance.md, "GEMMs"."""
    block_n, block_k = 32 if gated else 64, 128
    if outputs % block_n or size % block_k or outputs * size * (2 if gated else 1) > MAX_WEIGHT:
        return None
    block_t = min(max(triton.next_power_of_2(rows), 16), 64)
    if outputs // block_n * triton.cdiv(rows, block_t) > multiprocessors:
        block_t = 128
    tiles = triton.cdiv(rows, block_t)
    programs = outputs // block_n * tiles
    if programs > multiprocessors or rows > 256 or (rows > 128 and rows < 0.9 * block_t * tiles):
        return None
    splits = 1
    if not gated:
        fitting = range(1, min(multiprocessors // programs, size // (2 * block_k), 8) + 1)
        splits = max((count for count in fitting if size % (block_k * count) == 0), default=1)
    return GemmConfig(block_t, block_n, block_k, splits=splits)


@triton.jit(do_not_specialize=["num_rows"])  # else a step of a new size might have to wait for the compiler
def _gemm_kernel(
    x,
    w,
    out,
    num_rows,
    num_outputs,
    size,
    part_size,
    x_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Of a gated product, a tile holds the gates of its outputs, then their ups.
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.arange(0, TILE_N)
    line = tl.program_id(0) * BLOCK_N + line % BLOCK_N + line // BLOCK_N * num_outputs
    part = tl.program_id(2)
    k = part * part_size + tl.arange(0, BLOCK_K)
    in_rows = row < num_rows
    w_tile = w + line[:, None] * size + k[None, :]
    x_tile = x + row[:, None] * x_stride + k[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((TILE_N, BLOCK_T) if OUTPUTS_FIRST else (BLOCK_T, TILE_N), tl.float32)
    for start in tl.range(0, part_size, BLOCK_K, num_stages=STAGES):
        weights = tl.load(w_tile + start)
        values = tl.load(x_tile + start, mask=in_rows[:, None], other=0.0)
        acc = tl.dot(weights, tl.trans(values), acc) if OUTPUTS_FIRST else tl.dot(values, tl.trans(weights), acc)
    if GATED:
        dtype = w.dtype.element_ty
        if OUTPUTS_FIRST:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N, BLOCK_T)), (1, 2, 0)))
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_T, 2, BLOCK_N)), (0, 2, 1)))
        gate = gate.to(dtype).to(tl.float32)
        acc = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    result = acc.to(out.dtype.element_ty)
    place = out + part.to(tl.int64) * num_rows * num_outputs
    if OUTPUTS_FIRST:
        tl.store(place + row[None, :] * num_outputs + column[:, None], result, mask=in_rows[None, :])
    else:
        tl.store(place + row[:, None] * num_outputs + column[None, :], result, mask=in_rows[:, None])


def product(x: Tensor, weight: Tensor, config: GemmConfig, *, gated: bool = False, pdl: bool = False) -> Tensor:
    """x [T, K], its last dimension contiguous; weight [N, K], contiguous. Returns the parts of x @ weight.T, whose sum
    over the first dimension is meant: float32 [splits, T, N], or, if K is not split, [1, T, N] in x's dtype. ``gated``:
    weight holds N / 2 gates, then as many ups; returns silu(gate) * up [1, T, N / 2], rounded as silu_mul rounds."""
    rows, size = x.shape
    outputs = len(weight) // 2 if gated else len(weight)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert outputs % config.block_n == 0
    assert size % (config.block_k * config.splits) == 0
    assert not (gated and config.splits > 1)
    dtype = torch.float32 if config.splits > 1 else x.dtype
    out = torch.empty((config.splits, rows, outputs), dtype=dtype, device=x.device)
    _gemm_kernel[(outputs // config.block_n, triton.cdiv(rows, config.block_t), config.splits)](
        x,
        weight,
        out,
        rows,
        outputs,
        size,
        size // config.splits,
        x.stride(0),
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GATED=gated,
        OUTPUTS_FIRST=config.outputs_first,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        **pdl_options(x.device, pdl),
    )
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K], weight [N, K]. Returns x @ weight.T [T, N], or parts of it [S, T, N]: these come from a kernel of ours,
    so whoever sums them may be launched while it runs."""
    config = _config_of(x, *weight.shape)
    return F.linear(x, weight) if config is None else product(x, weight, config, pdl=True)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K]; weight [2 * I, K], gates first -> silu(gate) * up [T, I]"""
    config = _config_of(x, len(weight) // 2, weight.shape[1], gated=True)
    return silu_mul(F.linear(x, weight)) if config is None else product(x, weight, config, gated=True, pdl=True)[0]


def _config_of(x: Tensor, outputs: int, size: int, gated: bool = False) -> GemmConfig | None:
    if not len(x) or x.dtype == torch.float32:  # float32 is multiplied in full precision, which is cuBLAS's to do
        return None
    return config_for(len(x), outputs, size, num_multiprocessors(x.device), gated=gated)
