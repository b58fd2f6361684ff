"""An experiment: a decode step's GEMMs in Triton, so that PDL links every kernel of the chain, weights fetched ahead.

    python -m loadtest.gpu.bench_pdl_gemm --json build/pdl_gemm.json

cuBLAS's kernels neither let ours start early nor start early behind ours (bench_fused.py, "chain"). Here each GEMM asks
for its weights before it waits for its input, while the kernels ahead of it run. Qwen3-0.6B's shapes, no attention.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from loadtest.gpu.bench_fused import HEAD_DIM, MODELS, capture, random, replay_us, rope_inputs
from mizzen.kernels.triton import activation, norms, rope

Config = tuple[int, int, int, int]  # BN, BK, warps, stages


@triton.jit
def _gemm_kernel(
    x,
    w,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
):
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    if PREFETCH:
        for part in tl.static_range(K // 1024):
            lines = part * 1024 + tl.arange(0, 16) * 64  # 128 bytes each
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [w + columns[:, None] * K + lines[None, :]],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        w_tile = tl.load(w + columns[:, None] * K + (start + k)[None, :])
        x_tile = tl.load(x + rows[None, :] * K + (start + k)[:, None], mask=(rows < M)[None, :], other=0.0)
        acc = tl.dot(w_tile, x_tile, acc)
    tl.store(out + rows[None, :] * N + columns[:, None], acc.to(out.dtype.element_ty), mask=(rows < M)[None, :])


def gemm(x: Tensor, w: Tensor, config: Config, pdl: bool, prefetch: bool) -> Tensor:
    bn, bk, warps, stages = config
    tokens, n = len(x), w.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    bm = min(max(16, triton.next_power_of_2(tokens)), 128)
    options: dict[str, Any] = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    _gemm_kernel[(n // bn, triton.cdiv(tokens, bm))](
        x,
        w,
        out,
        tokens,
        N=n,
        K=w.shape[1],
        BM=bm,
        BN=bn,
        BK=bk,
        PREFETCH=prefetch,
        STAGES=stages,
        num_warps=warps,
        **options,
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    hidden, heads, kv_heads, intermediate, layers = MODELS["qwen3-0.6b"]
    shapes = {
        "qkv": (hidden, (heads + 2 * kv_heads) * HEAD_DIM),
        "out": (heads * HEAD_DIM, hidden),
        "gate_up": (hidden, 2 * intermediate),
        "down": (intermediate, hidden),
    }
    weights = {name: [random(n, k, scale=k**-0.5) for _ in range(layers)] for name, (k, n) in shapes.items()}
    norm_weight, head_weight = random(hidden), random(HEAD_DIM)
    results: list[dict[str, Any]] = []
    for tokens in (1, 32, 128):
        best: dict[str, Config] = {}
        for name, (k, n) in shapes.items():
            x = random(tokens, k)
            times: dict[Config, float] = {}
            tiles = ((16, 256), (16, 128), (32, 128)) if n == hidden else ((32, 128), (64, 128), (64, 64))
            for (bn, bk), stages in itertools.product(tiles, (3, 5)):
                if (bn + max(16, tokens)) * bk * 2 * stages > 220 << 10:
                    continue
                config = (bn, bk, 4, stages)
                out = gemm(x, weights[name][0], config, True, True)
                expected = x.double() @ weights[name][0].double().T
                error = (out.double() - expected).norm() / expected.norm()
                assert error < 1e-2, f"{name} {config}: {error}"
                graph = capture(lambda c=config, n=name, x=x: [gemm(x, w, c, True, True) for w in weights[n]])
                times[config] = replay_us(graph) / layers
            cublas = replay_us(capture(lambda n=name, x=x: [x @ w.T for w in weights[n]])) / layers
            best[name] = min(times, key=lambda config: times[config])
            plain = replay_us(
                capture(lambda n=name, x=x, c=best[name]: [gemm(x, w, c, False, False) for w in weights[n]])
            )
            row = {"kernel": name, "tokens": tokens, "cublas_us": round(cublas, 2), "config": best[name]}
            results.append({**row, "triton_pdl_us": round(times[best[name]], 2), "triton_us": round(plain / layers, 2)})
            print(results[-1], flush=True)

        rest = (*rope_inputs(tokens, kv_heads), heads, head_weight, head_weight, 1e-6)
        x0, residual = random(tokens, hidden), random(tokens, hidden)

        def step(own: bool, pdl: bool, prefetch: bool, tokens=tokens, rest=rest, x0=x0, residual=residual, best=best):
            def product(x: Tensor, kind: str, layer: int) -> Tensor:
                w = weights[kind][layer]
                return gemm(x, w, best[kind], pdl, prefetch) if own else x @ w.T

            x = x0
            for layer in range(layers):
                x = norms.add_rms_norm(x, residual, norm_weight, 1e-6, pdl=pdl)
                q = rope.qk_norm_rope_write_kv(product(x, "qkv", layer), *rest, pdl=pdl)
                x = product(q.view(tokens, -1), "out", layer)
                x = norms.add_rms_norm(x, residual, norm_weight, 1e-6, pdl=pdl)
                x = product(activation.silu_mul(product(x, "gate_up", layer), pdl=pdl), "down", layer)

        for own, pdl, prefetch in (
            (False, False, False),
            (False, True, False),
            (True, False, False),
            (True, True, False),
            (True, True, True),
            (False, False, False),
            (False, True, False),
        ):
            graph = capture(lambda o=own, p=pdl, f=prefetch: step(o, p, f))
            us = round(replay_us(graph) / layers, 2)
            results.append(
                {"kernel": "chain", "tokens": tokens, "own": own, "pdl": pdl, "prefetch": prefetch, "us": us}
            )
            print(results[-1], flush=True)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
