"""Our GEMM for few rows against cuBLAS: its configurations for each projection, and whole decode layers by either.

    python -m loadtest.gpu.bench_gemm shapes --json build/gemm-shapes.json [--model qwen3-0.6b] [--rows 16,32,64]
    python -m loadtest.gpu.bench_gemm chain --json build/gemm-chain.json [--model qwen3-0.6b] [--rows 8,32,64]

``shapes``: microseconds a call behind calls of its kind, weights from memory. Ours leaves parts to sum, as the engine's
next kernel does; of gate-up it does silu_mul too, and cuBLAS does not. So what counts is ``chain``: microseconds a
layer of a captured step, with attention and without.
"""

import argparse
import itertools
import json
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from loadtest.gpu import bench_fused
from loadtest.gpu.bench_fused import HEAD_DIM, MODELS, capture, replay_us
from loadtest.offline import environment
from mizzen.kernels.triton import activation, norms, rope
from mizzen.kernels.triton.decode_attention import DecodeConfig, PagedDecode
from mizzen.kernels.triton.gemm import GemmConfig, config_for, gated_linear, linear, product
from mizzen.kernels.triton.launch import num_multiprocessors

DEVICE = torch.device("cuda")
PAGE_SIZE = 64
COLD_BYTES = 300 << 20  # of weights that take turns, at most a model's layers of them
SHARED_BYTES = 220 << 10  # of a multiprocessor, for tiles in flight
MAX_POSITIONS = 4096
# From, to: about what the offline benchmark's rows have reached when so many run.
LENGTHS = {
    8: (500, 1900),
    32: (500, 1800),
    64: (400, 1600),
    128: (300, 1400),
    192: (250, 1300),
    256: (200, 1180),
}


class Projection(NamedTuple):
    outputs: int  # of the result
    size: int
    gated: bool = False  # the weight has twice as many outputs

    def weight(self) -> Tensor:
        outputs = self.outputs * (1 + self.gated)
        return bench_fused.random(outputs, self.size, scale=self.size**-0.5)

    def config(self, rows: int) -> GemmConfig | None:
        return config_for(rows, self.outputs, self.size, num_multiprocessors(DEVICE), gated=self.gated)


def projections(model: str) -> dict[str, Projection]:
    hidden, heads, kv_heads, intermediate, _ = MODELS[model]
    return {
        "qkv": Projection((heads + 2 * kv_heads) * HEAD_DIM, hidden),
        "out": Projection(hidden, heads * HEAD_DIM),
        "gate_up": Projection(intermediate, hidden, gated=True),
        "down": Projection(hidden, intermediate),
    }


def candidates(rows: int, projection: Projection) -> Iterator[GemmConfig]:
    """Half a wave of programs to two, if two fit a multiprocessor."""
    outputs, size, gated = projection
    multiprocessors = num_multiprocessors(DEVICE)
    row_blocks = (64, 128) if rows > 64 else (max(16, triton.next_power_of_2(rows)),)
    for block_t, block_n, block_k, warps, stages, splits, first in itertools.product(
        row_blocks, (32, 64, 128), (64, 128), (4, 8), (3, 4), (1, 2, 3, 4, 6, 8), (True, False)
    ):
        lines = block_n * (1 + gated)
        programs = outputs // block_n * triton.cdiv(rows, block_t) * splits
        shared = (block_t + lines) * block_k * 2 * stages
        if outputs % block_n or size % (block_k * splits) or (gated and splits > 1):
            continue
        if (lines if first else block_t) < 64:  # the tensor cores' least
            continue
        if size // (block_k * splits) < (4 if stages == 4 else 2):  # blocks in flight
            continue
        if block_t * lines < 128 * 128 if warps == 8 else block_t * lines > 128 * 128:
            continue
        if not 0.45 <= programs / multiprocessors <= 2.2:
            continue
        if shared * triton.cdiv(programs, multiprocessors) <= SHARED_BYTES:
            yield GemmConfig(block_t, block_n, block_k, warps, stages, splits, first)


def bench_shapes(model: str, rows_list: Sequence[int], best: int = 6) -> Iterator[dict[str, Any]]:
    cases = list(itertools.product(projections(model).items(), rows_list))
    compile_all([(rows, projection) for (_, projection), rows in cases])
    for (name, projection), rows in cases:
        layers = MODELS[model][-1]
        weight = projection.weight()
        weights = [weight, *(projection.weight() for _ in range(min(layers, COLD_BYTES // weight.nbytes + 1) - 1))]
        x = bench_fused.random(rows, projection.size)
        expected = x.double() @ weight.double().T
        if projection.gated:
            gate, up = expected.chunk(2, -1)
            expected = F.silu(gate) * up
        cublas_us = time_us(partial(F.linear, x), weights)
        times: list[tuple[float, GemmConfig]] = []
        chosen = projection.config(rows)
        for config in {*candidates(rows, projection), *([chosen] if chosen else [])}:
            try:
                out = product(x, weight, config, gated=projection.gated, pdl=True).sum(0)
            except OutOfResources as error:
                print(f"left out: {config}: {error}")
                continue
            difference = float((out.double() - expected).norm() / expected.norm())
            assert difference < 1e-2, f"{name}, {rows} rows, {config}: {difference}"
            us = time_us(partial(product, x, config=config, gated=projection.gated, pdl=True), weights)
            times.append((us, config))
        times.sort(key=lambda one: one[0])
        yield {
            "projection": name,
            "rows": rows,
            "cublas_us": cublas_us,
            "chosen_us": next((us for us, config in times if config == chosen), None),  # None: it is cuBLAS's
            "best": [{"us": us, **asdict(config)} for us, config in times[:best]],
        }


def time_us(call: Callable[[Tensor], object], weights: list[Tensor]) -> float:
    def body() -> None:
        for weight in weights:
            call(weight)

    return round(replay_us(capture(body), replays=5) / len(weights), 2)


def compile_all(cases: list[tuple[int, Projection]]) -> None:
    """Compiles in parallel what would otherwise be compiled one by one."""
    kernels = {
        (projection.gated, config.splits > 1, replace(config, splits=1)): (rows, projection, config)
        for rows, projection in cases
        for config in candidates(rows, projection)
    }

    def build(job: tuple[int, Projection, GemmConfig]) -> None:
        rows, projection, config = job
        x = bench_fused.random(rows, projection.size)
        with suppress(OutOfResources):  # told when it is timed
            product(x, projection.weight(), config, gated=projection.gated, pdl=True)

    print(f"compiling {len(kernels)} kernels", flush=True)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(build, kernels.values()))


class Layers:
    """A model's layers: random weights, and caches of ``num_pages`` pages each."""

    def __init__(self, model: str, num_pages: int) -> None:
        self.hidden, self.heads, self.kv_heads, _, self.count = MODELS[model]
        self.weights = {
            name: [projection.weight() for _ in range(self.count)] for name, projection in projections(model).items()
        }
        self.norm, self.head_norm = bench_fused.random(self.hidden), bench_fused.random(HEAD_DIM)
        self.rotary = torch.randn(MAX_POSITIONS, HEAD_DIM, device=DEVICE)
        shape = (num_pages, PAGE_SIZE, self.kv_heads, HEAD_DIM)
        self.caches = [(bench_fused.random(*shape), bench_fused.random(*shape)) for _ in range(self.count)]


class DecodeRows:
    """Rows of one token each on their way through the layers; their pages, from ``first_page`` on, lie scattered.
    ``own``: the projections that go to our GEMM where config_for has a configuration."""

    def __init__(
        self,
        layers: Layers,
        lengths: Sequence[int],
        config: DecodeConfig | None = None,
        first_page: int = 0,
        own: Collection[str] = (),
    ) -> None:
        self.layers, self.own, rows = layers, own, len(lengths)
        widths = [pages_for(length) for length in lengths]
        self.table = torch.zeros(rows, max(widths), dtype=torch.int32, device=DEVICE)
        pages = torch.randperm(sum(widths), device=DEVICE, dtype=torch.int32) + first_page
        for row, own_pages in zip(self.table, pages.split(widths), strict=True):
            row[: len(own_pages)] = own_pages
        self.slots = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        self.query_start = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, device=DEVICE, dtype=torch.int32)
        self.positions = (self.lengths - 1).long()
        page = self.table.gather(1, (self.positions // PAGE_SIZE)[:, None])[:, 0]
        self.kv_slots = page.long() * PAGE_SIZE + self.positions % PAGE_SIZE
        self.decode = PagedDecode(
            num_heads=layers.heads,
            kv_heads=layers.kv_heads,
            head_dim=HEAD_DIM,
            page_size=PAGE_SIZE,
            max_rows=rows,
            device=DEVICE,
            config=config,
        )
        self.first_x, self.residual = (bench_fused.random(rows, layers.hidden) for _ in range(2))
        self.x = self.first_x

    def run(self, attention: bool = True) -> None:
        self.plan()
        for layer in range(self.layers.count):
            self.before(layer)
            if attention:
                self.attend(layer)
            else:
                self.attended = self.q
            self.after(layer)

    def plan(self) -> None:
        self.decode.plan(self.table, self.slots, self.lengths, self.query_start)

    def before(self, layer: int) -> None:
        x = norms.add_rms_norm(self.x if layer else self.first_x, self.residual, self.layers.norm, 1e-6)
        self.q = rope.qk_norm_rope_write_kv(
            self._linear("qkv", layer, x),
            self.positions,
            self.layers.rotary,
            *self.layers.caches[layer],
            self.kv_slots,
            self.layers.heads,
            self.layers.head_norm,
            self.layers.head_norm,
            1e-6,
        )

    def attend(self, layer: int) -> None:
        self.attended = torch.empty_like(self.q)
        self.decode.forward(self.q, *self.layers.caches[layer], self.attended)

    def after(self, layer: int) -> None:
        x = self._linear("out", layer, self.attended.view(len(self.attended), -1))
        x = norms.add_rms_norm(x, self.residual, self.layers.norm, 1e-6)
        weight = self.layers.weights["gate_up"][layer]
        x = gated_linear(x, weight) if "gate_up" in self.own else activation.silu_mul(F.linear(x, weight))
        self.x = self._linear("down", layer, x)

    def _linear(self, name: str, layer: int, x: Tensor) -> Tensor:
        weight = self.layers.weights[name][layer]
        return linear(x, weight) if name in self.own else F.linear(x, weight)


def pages_for(length: int) -> int:
    return -(-length // PAGE_SIZE)


def lengths_of(rows: int) -> list[int]:
    draw = random.Random(rows)
    return [draw.randint(*LENGTHS[rows]) for _ in range(rows)]


def bench_chain(model: str, rows_list: Sequence[int]) -> Iterator[dict[str, Any]]:
    names = projections(model)
    for rows in rows_list:
        lengths = lengths_of(rows)
        layers = Layers(model, sum(map(pages_for, lengths)))
        variants: dict[str, set[str]] = {"cuBLAS": set(), "own": set(names)}
        for name, projection in names.items():
            if projection.config(rows):
                variants[f"own, {name} by cuBLAS"] = set(names) - {name}
        variants["own again"] = set(names)
        for (variant, own), attention in itertools.product(variants.items(), (True, False)):
            batch = DecodeRows(layers, lengths, own=own)
            us = replay_us(capture(lambda b=batch, a=attention: b.run(a)), replays=7) / layers.count
            yield {"rows": rows, "variant": variant, "attention": attention, "us": round(us, 2)}
        del layers, batch  # the next rows' caches need the room


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["shapes", "chain"])
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-0.6b")
    parser.add_argument(
        "--rows", default="", help=f"comma separated; of a chain: any of {', '.join(map(str, LENGTHS))}"
    )
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    usual = "16,32,64,128,192,256" if args.what == "shapes" else ",".join(map(str, LENGTHS))
    rows_list = [int(rows) for rows in (args.rows or usual).split(",")]
    bench = bench_shapes if args.what == "shapes" else bench_chain
    report: dict[str, Any] = {"environment": environment(), "model": args.model, "results": []}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    for result in bench(args.model, rows_list):
        report["results"].append(result)
        shown = {**result, "best": result["best"][:1]} if "best" in result else result
        print(", ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
