"""Times our paged attention on a GPU: one layer's call, replayed in a CUDA graph over many layers' caches.

Each graph walks as many separate caches as keep the keys and values out of the L2 cache. Lengths are drawn as in
docs/performance.md; every configuration is checked against float64 before it is timed.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import triton
from torch import Tensor

from mizzen.kernels.triton.decode_attention import DecodeConfig, PagedDecode
from mizzen.kernels.triton.prefill_attention import PagedPrefill, PrefillConfig

Call = Callable[[int], object]  # attends in one layer
Config = DecodeConfig | PrefillConfig
DEVICE = torch.device("cuda")
COLD_BYTES = 300 << 20  # what a graph's caches hold at least: 5 times the L2 cache of an H200


@dataclass(frozen=True)
class Case:
    """Rows as (new tokens, length)."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    @property
    def keys(self) -> int:
        return sum(length for _, length in self.rows)

    @property
    def kv_bytes(self) -> int:
        return self.keys * self.kv_heads * self.head_dim * 4

    @property
    def flops(self) -> int:
        seen = sum(n * length - n * (n - 1) // 2 for n, length in self.rows)
        return 4 * self.heads * self.head_dim * seen


def decode_case(batch: int, heads: int = 16, page_size: int = 64, length: int | None = None) -> Case:
    draw = random.Random(batch)
    rows = tuple((1, length or draw.randint(200, 1700)) for _ in range(batch))
    return Case(
        f"decode {batch} x {length or '200-1700'}, {heads}/8, page {page_size}", rows, heads, page_size=page_size
    )


def prefill_case(rows: int, new: int, cached: int, heads: int = 40, page_size: int = 64) -> Case:
    return Case(
        f"prefill {rows} x {new} after {cached}, {heads}/8, page {page_size}",
        ((new, new + cached),) * rows,
        heads,
        page_size=page_size,
    )


class Problem:
    """Tensors of a case: pages in random order, one query tensor, several layers of caches."""

    def __init__(self, case: Case, layers: int | None = None) -> None:
        torch.manual_seed(0)
        self.case = case
        if layers is None:
            layers = min(48, max(2, -(-COLD_BYTES // case.kv_bytes)))
        widths = [-(-length // case.page_size) for _, length in case.rows]
        shape = (sum(widths) + 1, case.page_size, case.kv_heads, case.head_dim)
        self.k = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)]
        self.v = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)]
        pages = torch.randperm(sum(widths), device=DEVICE, dtype=torch.int32)
        self.table = torch.zeros((len(widths), max(widths)), device=DEVICE, dtype=torch.int32)
        for row, (width, part) in enumerate(zip(widths, pages.split(widths), strict=True)):
            self.table[row, :width] = part
        self.slots = torch.arange(len(widths), device=DEVICE, dtype=torch.int32)
        starts = [0]
        for new, _ in case.rows:
            starts.append(starts[-1] + new)
        qkv = torch.randn(starts[-1], case.heads + 16, case.head_dim, device=DEVICE, dtype=torch.bfloat16)
        self.q = qkv[:, : case.heads]
        self.out = torch.full(self.q.shape, float("nan"), device=DEVICE, dtype=torch.bfloat16)
        self.seq_lens = torch.tensor([length for _, length in case.rows], device=DEVICE, dtype=torch.int32)
        self.query_start = torch.tensor(starts, device=DEVICE, dtype=torch.int32)
        self._starts = starts
        self._reference: dict[int, Tensor] = {}

    def error(self) -> float:
        """The relative error of the output for layer 0, over up to 8 rows."""
        case, worst = self.case, 0.0
        rows = range(len(case.rows)) if len(case.rows) <= 8 else random.Random(1).sample(range(len(case.rows)), 8)
        for row in rows:
            new, length = case.rows[row]
            tokens = slice(self._starts[row], self._starts[row] + new)
            if row not in self._reference:
                pages = self.table[row, : -(-length // case.page_size)].long()
                group = case.heads // case.kv_heads
                k, v = (c[0][pages].flatten(0, 1)[:length].double() for c in (self.k, self.v))
                q = self.q[tokens].double().view(new, case.kv_heads, group, -1)
                scores = torch.einsum("thgd,nhd->thgn", q, k) * case.head_dim**-0.5
                position = torch.arange(length - new, length, device=DEVICE)
                hidden = torch.arange(length, device=DEVICE) > position[:, None]
                scores.masked_fill_(hidden[:, None, None, :], float("-inf"))
                self._reference[row] = torch.einsum("thgn,nhd->thgd", scores.softmax(-1), v).flatten(1, 2)
            expected = self._reference[row]
            error = ((self.out[tokens].double() - expected).norm() / expected.norm()).item()
            worst = max(worst, error if error == error else float("inf"))
        return worst

    def time_us(self, call: Call) -> float:
        """Microseconds a layer, the median of graph replays; checks the output first."""
        self.out.fill_(float("nan"))
        call(0)
        call(0)
        torch.cuda.synchronize()
        error = self.error()
        if error > 1e-2:
            raise ValueError(f"wrong result: relative error {error:.3g}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(len(self.k)):
                call(layer)
        return time_graph_us(graph) / len(self.k)


def time_graph_us(graph: torch.cuda.CUDAGraph, repeats: int = 15) -> float:
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1000 for a, b in pairwise(events))


def decode_call(problem: Problem, config: DecodeConfig) -> Call:
    case = problem.case
    attention = PagedDecode(
        num_heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, page_size=case.page_size,
        max_rows=len(case.rows), device=DEVICE, config=config,
    )  # fmt: skip
    attention.plan(problem.table, problem.slots, problem.seq_lens, problem.query_start)
    return lambda layer: attention.forward(problem.q, problem.k[layer], problem.v[layer], problem.out)


def plan_us(problem: Problem) -> float:
    attention = PagedDecode(
        num_heads=problem.case.heads, kv_heads=8, head_dim=128, page_size=problem.case.page_size,
        max_rows=len(problem.case.rows), device=DEVICE,
    )  # fmt: skip
    attention.plan(problem.table, problem.slots, problem.seq_lens, problem.query_start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            attention.plan(problem.table, problem.slots, problem.seq_lens, problem.query_start)
    return time_graph_us(graph) / 20


def prefill_call(problem: Problem, config: PrefillConfig) -> Call:
    case = problem.case
    attention = PagedPrefill(
        num_heads=case.heads, kv_heads=case.kv_heads, head_dim=case.head_dim, page_size=case.page_size,
        max_tokens=len(problem.q), max_rows=len(case.rows), device=DEVICE, config=config,
    )  # fmt: skip
    attention.plan(len(problem.q), problem.table, problem.slots, problem.seq_lens, problem.query_start)
    return lambda layer: attention.forward(problem.q, problem.k[layer], problem.v[layer], problem.out)


def flashinfer_call(problem: Problem, backend: str) -> Call:
    import flashinfer

    case = problem.case
    widths = [-(-length // case.page_size) for _, length in case.rows]
    indptr = torch.tensor([0, *widths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    indices = torch.cat([problem.table[row, :width] for row, width in enumerate(widths)])
    last = (problem.seq_lens - 1) % case.page_size + 1
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), "NHD", backend=backend
    )
    wrapper.plan(
        problem.query_start, indptr.to(DEVICE), indices, last, case.heads, case.kv_heads, case.head_dim, case.page_size,
        causal=True, q_data_type=torch.bfloat16,
    )  # fmt: skip
    q = problem.q.contiguous()
    return lambda layer: wrapper.run(q, (problem.k[layer], problem.v[layer]), out=problem.out)


class Report:
    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def add(self, problem: Problem, label: str, call_of: Callable[[], Call], config: Config | None = None) -> float:
        case = problem.case
        row: dict[str, object] = {"case": case.name, "kernel": label}
        try:
            us = problem.time_us(call_of())
        except Exception as error:  # noqa: BLE001  a variant that does not compile or fit must not end the sweep
            us = float("inf")
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        row |= {
            "us": round(us, 2),
            "TB/s": round(case.kv_bytes / us / 1e6, 2),
            "TFLOP/s": round(case.flops / us / 1e6, 1),
        }
        if config is not None:
            row["config"] = asdict(config)
        self.rows.append(row)
        return us


def short(config: Config) -> str:
    values = asdict(config)
    return " ".join(f"{''.join(w[0] for w in name.split('_'))}{int(value or 0)}" for name, value in values.items())


def sweep(
    report: Report, problem: Problem, configs: list[Config], call_of: Callable[[Problem, Config], Call]
) -> list[Config]:
    """The configurations, fastest first."""

    def variant(config: Config) -> Callable[[], Call]:
        return lambda: call_of(problem, config)

    # Threads compile side by side, since compiling releases the interpreter's lock.
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda config: compile_once(variant(config)), configs))
    timed = [(report.add(problem, short(config), variant(config), config), config) for config in configs]
    timed.sort(key=lambda item: item[0])
    print(f"{problem.case.name}: " + "; ".join(f"{short(config)} {us:.1f}" for us, config in timed[:7]), flush=True)
    return [config for _, config in timed]


def compile_once(make: Callable[[], Call]) -> None:
    with suppress(Exception):  # what does not compile is reported by its timing
        make()(0)


def machine() -> dict[str, object]:
    a = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_()
    b = torch.empty_like(a)
    copy_ms = triton.testing.do_bench(lambda: b.copy_(a), return_mode="median")
    sum_ms = triton.testing.do_bench(lambda: a.view(torch.int64).max(), return_mode="median")
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy TB/s": round(2 * a.nbytes / copy_ms / 1e9, 2),
        "read TB/s": round(a.nbytes / sum_ms / 1e9, 2),
    }


def sweep_decode(report: Report) -> None:
    configs: list[Config] = [
        DecodeConfig(), DecodeConfig(pdl=False), DecodeConfig(tail_percent=5), DecodeConfig(tail_percent=12),
        DecodeConfig(tail_from=99), DecodeConfig(programs_per_sm=2), DecodeConfig(block_n=32, num_stages=4),
    ]  # fmt: skip
    for case in (
        *(decode_case(batch) for batch in (1, 4, 8, 16, 32, 64, 96, 128, 192, 256)), decode_case(1, 40, length=16384),
        *(decode_case(n, heads, page) for n in (32, 128, 256) for heads, page in ((40, 64), (64, 64), (16, 16))),
        decode_case(128, 40, 16), decode_case(128, 8), decode_case(128, 16, 32),
    ):  # fmt: skip
        sweep(report, Problem(case), configs, decode_call)
    for batch in (1, 256):
        print(f"plan, batch {batch}: {plan_us(Problem(decode_case(batch), layers=1)):.1f} us", flush=True)


def sweep_prefill(report: Report) -> None:
    configs: list[Config] = [
        PrefillConfig(), PrefillConfig(pdl=False), PrefillConfig(num_stages=2), PrefillConfig(block_m=128, num_warps=8),
    ]  # fmt: skip
    for case in (
        prefill_case(8, 1024, 0), prefill_case(8, 1024, 0, page_size=16), prefill_case(8, 1024, 0, 16),
        prefill_case(4, 512, 1536), prefill_case(1, 4096, 0), prefill_case(1, 300, 300),
        prefill_case(1, 300, 300, 16, 16), prefill_case(1, 128, 512), prefill_case(1, 64, 512, 16),
        prefill_case(1, 256, 16128),
    ):  # fmt: skip
        problem = Problem(case)
        sweep(report, problem, configs, prefill_call)
        for backend in ("fa2", "fa3"):
            us = report.add(problem, f"FlashInfer {backend}", partial(flashinfer_call, problem, backend))
            print(f"  FlashInfer {backend} {us:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--commit", default="", help="what is measured, for the JSON: GPU machines may have no git")
    args = parser.parse_args()
    report, facts = Report(), machine() | {"commit": args.commit}
    print(facts, flush=True)
    for name, run in (("decode", sweep_decode), ("prefill", sweep_prefill)):
        if args.only in (None, name):
            try:
                run(report)
            finally:
                args.json.write_text(json.dumps({"machine": facts, "rows": report.rows}, indent=1))
    for row in report.rows:
        if "error" in row:
            print(row["case"], row["kernel"], str(row["error"])[:120])


if __name__ == "__main__":
    main()
