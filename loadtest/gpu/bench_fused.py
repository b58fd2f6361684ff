"""Times the fused kernels and the sampler, each variant in a CUDA graph; and a decode step's chain, PDL on and off.

    python -m loadtest.gpu.bench_fused --json build/fused.json [--only norms,activation,rope,prepare,sampler,chain]

A cell is microseconds a call: the median of replays of a graph of many calls. Inputs that a GEMM would just have
written are left in the cache; larger ones rotate, so that they come from memory.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from mizzen.kernels import reference
from mizzen.kernels.triton import activation, norms, prepare, rope, sampling
from mizzen.kernels.triton.slots import SampledRows, SlotParams

BF16 = torch.bfloat16
DECODE = (1, 32, 128, 256)
PREFILL = 8192
VOCAB = 151_936
L2_BYTES = 120 << 20  # twice the cache
MODELS = {  # hidden, heads, kv heads, intermediate, layers timed
    "qwen3-0.6b": (1024, 16, 8, 3072, 28),
    "qwen3-14b": (5120, 40, 8, 17408, 10),
}
HEAD_DIM = 128
results: list[dict[str, Any]] = []


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def copies(*shape: int) -> list[Tensor]:
    """As many equal tensors as outgrow the cache; one if it is small enough to have just been written by a GEMM."""
    first = random(*shape)
    return [first, *(first.clone() for _ in range(L2_BYTES // first.nbytes if first.nbytes > 16 << 20 else 0))]


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        body()
    graph.instantiate()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int = 9) -> float:
    times = []
    for _ in range(replays + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    return statistics.median(times[2:])


def record(kernel: str, shape: str, variant: str, call: Callable[[int], object], num_bytes: int = 0) -> float:
    """``call(i)`` runs the variant on input set i."""
    calls = 20

    def body() -> None:
        for index in range(calls):
            call(index)

    microseconds = replay_us(capture(body)) / calls
    row = {"kernel": kernel, "shape": shape, "variant": variant, "us": round(microseconds, 2)}
    if num_bytes:
        row["tb_s"] = round(num_bytes / microseconds / 1e6, 2)
    results.append(row)
    return microseconds


def pick(items: list[Tensor], index: int) -> Tensor:
    return items[index % len(items)]


def bench_norms(size: int, tokens: int) -> None:
    xs, residual, weight = copies(tokens, size), random(tokens, size), random(size)
    residuals = [residual.clone() for _ in xs]
    shape, moved = f"{tokens}x{size}", 4 * residual.nbytes
    for warps, pdl in itertools.product((2, 4, 8) if size == 1024 else (4, 8, 16), (False, True)):
        record(
            "add_rms_norm",
            shape,
            f"warps {warps} pdl {pdl:d}",
            lambda i, w=warps, p=pdl: norms.add_rms_norm(
                pick(xs, i), pick(residuals, i), weight, 1e-6, pdl=p, num_warps=w
            ),
            moved,
        )
    record(
        "add_rms_norm",
        shape,
        "twin",
        lambda i: reference.add_rms_norm(pick(xs, i), pick(residuals, i), weight, 1e-6),
        moved,
    )
    flashinfer_norm = _flashinfer("fused_add_rmsnorm")
    if flashinfer_norm:
        record(
            "add_rms_norm",
            shape,
            "flashinfer",
            lambda i, f=flashinfer_norm: f(pick(xs, i), pick(residuals, i), weight, 1e-6),
            moved,
        )


def bench_activation(size: int, tokens: int) -> None:
    inputs = copies(tokens, 2 * size)
    shape, moved = f"{tokens}x{size}", inputs[0].nbytes * 3 // 2
    for block, pdl in itertools.product((512, 1024, 2048, 4096), (False, True)):
        record(
            "silu_mul",
            shape,
            f"block {block} pdl {pdl:d}",
            lambda i, b=block, p=pdl: activation.silu_mul(pick(inputs, i), pdl=p, block=b),
            moved,
        )
    record("silu_mul", shape, "twin", lambda i: reference.silu_mul(pick(inputs, i)), moved)
    flashinfer_silu = _flashinfer("silu_and_mul")
    if flashinfer_silu:
        record("silu_mul", shape, "flashinfer", lambda i, f=flashinfer_silu: f(pick(inputs, i)), moved)


def rope_inputs(tokens: int, kv_heads: int) -> tuple[Tensor, ...]:
    positions = torch.randint(2000, (tokens,), device="cuda")
    rotary = torch.rand(4096, HEAD_DIM, device="cuda")
    caches = torch.zeros(2, 1024, 16, kv_heads, HEAD_DIM, dtype=BF16, device="cuda")
    kv_slots = torch.randperm(1024 * 16, device="cuda")[:tokens]
    return positions, rotary, caches[0], caches[1], kv_slots


def bench_rope(model: str, tokens: int) -> None:
    _, heads, kv_heads, _, _ = MODELS[model]
    inputs = copies(tokens, (heads + 2 * kv_heads) * HEAD_DIM)
    rest = (*rope_inputs(tokens, kv_heads), heads, random(HEAD_DIM), random(HEAD_DIM), 1e-6)
    shape, moved = f"{tokens} {model}", 2 * inputs[0].nbytes
    for (group, warps), pdl in itertools.product(((4, 1), (4, 2), (8, 2), (8, 4), (16, 4)), (False, True)):
        record(
            "rope",
            shape,
            f"heads {group} warps {warps} pdl {pdl:d}",
            lambda i, g=group, w=warps, p=pdl: rope.qk_norm_rope_write_kv(
                pick(inputs, i), *rest, pdl=p, heads=g, num_warps=w
            ),
            moved,
        )
    record("rope", shape, "twin", lambda i: reference.qk_norm_rope_write_kv(pick(inputs, i), *rest), moved)


def bench_prepare(rows: int) -> None:
    slots, length = 300, 2048
    token_table = torch.randint(VOCAB, (slots, length), dtype=torch.int32, device="cuda")
    page_table = torch.randint(9999, (slots, length // 16), dtype=torch.int32, device="cuda")
    args = (
        torch.randperm(slots, device="cuda")[:rows],
        torch.randint(1, length, (rows,), dtype=torch.int32, device="cuda"),
        token_table,
        page_table,
        16,
        *torch.zeros(3, rows, dtype=torch.int64, device="cuda"),
    )
    for pdl in (False, True):
        record("prepare_decode", str(rows), f"pdl {pdl:d}", lambda i, p=pdl: prepare.prepare_decode(*args, pdl=p))
    record("prepare_decode", str(rows), "twin", lambda i: reference.prepare_decode(*args))


def sampling_case(rows: int, **changes: float) -> tuple[SampledRows, SlotParams]:
    floats = torch.tensor([0.6, 1.0, 0.0], device="cuda").repeat(rows, 2)
    ints = torch.zeros(rows, 3, dtype=torch.int64, device="cuda")
    ints[:, 1] = torch.randint(1 << 62, (rows,), device="cuda")
    floats[:, 0] = changes.get("temperature", 0.6)
    floats[:, 1], floats[:, 2] = changes.get("top_p", 1.0), changes.get("min_p", 0.0)
    ints[:, 0] = int(changes.get("top_k", 0))
    slots = torch.arange(rows, device="cuda")
    seq_lens = torch.full((rows,), 30, dtype=torch.int32, device="cuda")
    table = torch.zeros(rows, 64, dtype=torch.int32, device="cuda")
    out = torch.zeros(rows, dtype=torch.int32, device="cuda")
    return (
        SampledRows(slots, seq_lens, table, out),
        SlotParams(floats[:, 0], floats[:, 1], floats[:, 2], ints[:, 0], ints[:, 1], ints[:, 2]),
    )


def bench_sampler(rows: int) -> None:
    logits = copies(rows, VOCAB)
    moved = logits[0].nbytes
    case = sampling_case(rows)
    for (block, per_thread), pdl in itertools.product(
        ((1024, 32), (2048, 32), (2048, 16), (4096, 16), (4096, 32), (4096, 64), (8192, 32), (8192, 64)), (False, True)
    ):
        warps = block // per_thread // 32
        record(
            "sampler",
            str(rows),
            f"block {block} warps {warps} pdl {pdl:d}",
            lambda i, b=block, w=warps, p=pdl: sampling.sample_tokens(
                pick(logits, i), *case, pdl=p, block=b, num_warps=w
            ),
            moved,
        )
    for warps in (4, 8, 16):
        record(
            "sampler",
            str(rows),
            f"draw warps {warps}",
            lambda i, w=warps: sampling.sample_tokens(pick(logits, i), *case, draw_warps=w),
            moved,
        )
        other = sampling_case(rows, top_k=20, top_p=0.95)
        record(
            "sampler",
            str(rows),
            f"top_k warps {warps}",
            lambda i, w=warps, c=other: sampling.sample_tokens(pick(logits, i), *c, filtered=True, top_k_warps=w),
            moved,
        )
    for name, flags, changes in (
        ("greedy", {}, {"temperature": 0.0}),
        ("plain rows, all flags", {"filtered": True, "min_p": True}, {}),
        ("plain rows, filtered", {"filtered": True}, {}),
        ("min_p 0.05", {"min_p": True}, {"min_p": 0.05}),
        ("top_k 20, top_p 0.95", {"filtered": True}, {"top_k": 20, "top_p": 0.95}),
        ("top_k 64", {"filtered": True}, {"top_k": 64}),
        ("top_p 0.9", {"filtered": True}, {"top_p": 0.9}),
        ("top_k 1000, top_p 0.9", {"filtered": True}, {"top_k": 1000, "top_p": 0.9}),
    ):
        other = sampling_case(rows, **changes)
        record(
            "sampler",
            str(rows),
            name,
            lambda i, c=other, f=flags: sampling.sample_tokens(pick(logits, i), *c, **f),
            moved,
        )
    record("sampler", str(rows), "torch.argmax", lambda i: pick(logits, i).argmax(-1), moved)
    peaked = [8 * tensor for tensor in logits[:2]]
    for name, changes in (("top_p 0.9, peaked logits", {"top_p": 0.9}), ("top_k 20, peaked logits", {"top_k": 20})):
        other = sampling_case(rows, **changes)
        record(
            "sampler",
            str(rows),
            name,
            lambda i, c=other: sampling.sample_tokens(pick(peaked, i), *c, filtered=True),
            moved,
        )
    indices, tokens = case[0].slots, case[0].out
    record(
        "sampler",
        str(rows),
        "logprobs of all rows",
        lambda i: sampling.logprobs(pick(logits, i), indices, tokens),
        moved,
    )


def bench_chain(model: str, tokens: int) -> None:
    """All of a decode step but attention: how much PDL gains between kernels of ours and cuBLAS's."""
    hidden, heads, kv_heads, intermediate, layers = MODELS[model]
    shapes = (
        (hidden, (heads + 2 * kv_heads) * HEAD_DIM),
        (heads * HEAD_DIM, hidden),
        (hidden, 2 * intermediate),
        (intermediate, hidden),
    )
    weights = [[random(n, k, scale=k**-0.5) for k, n in shapes] for _ in range(layers)]
    norm_weight, head_weight = random(hidden), random(HEAD_DIM)
    rest = (*rope_inputs(tokens, kv_heads), heads, head_weight, head_weight, 1e-6)
    x0, residual = random(tokens, hidden), random(tokens, hidden)

    def twins() -> None:
        x = x0
        for qkv, out, gate_up, down in weights:
            q = reference.qk_norm_rope_write_kv(reference.add_rms_norm(x, residual, norm_weight, 1e-6) @ qkv.T, *rest)
            x = reference.add_rms_norm(q.reshape(tokens, -1) @ out.T, residual, norm_weight, 1e-6)
            x = reference.silu_mul(x @ gate_up.T) @ down.T

    def fused(pdl: bool) -> None:
        x = x0
        for qkv, out, gate_up, down in weights:
            x = norms.add_rms_norm(x, residual, norm_weight, 1e-6, pdl=pdl)
            q = rope.qk_norm_rope_write_kv(x @ qkv.T, *rest, pdl=pdl)
            x = norms.add_rms_norm(q.view(tokens, -1) @ out.T, residual, norm_weight, 1e-6, pdl=pdl)
            x = activation.silu_mul(x @ gate_up.T, pdl=pdl) @ down.T

    def gemms() -> None:
        q = random(tokens, heads * HEAD_DIM)
        up = random(tokens, intermediate)
        for qkv, out, gate_up, down in weights:
            _ = x0 @ qkv.T, q @ out.T, x0 @ gate_up.T, up @ down.T

    for name, body in (
        ("GEMMs alone", gemms),
        ("twins", twins),
        ("fused", lambda: fused(False)),
        ("fused, PDL", lambda: fused(True)),
        ("fused again", lambda: fused(False)),
        ("fused, PDL again", lambda: fused(True)),
    ):
        graph = capture(body)
        try:
            edges = _edges(graph)
        except Exception as error:  # noqa: BLE001  the bindings differ between versions: the times matter more
            edges = {repr(error): 1}
        microseconds = round(replay_us(graph) / layers, 2)
        shape = f"{tokens} {model}"
        results.append({"kernel": "chain", "shape": shape, "variant": name, "us": microseconds, "edges": edges})


def _edges(graph: torch.cuda.CUDAGraph) -> dict[str, int]:
    """Kernel-to-kernel edges of a graph by type: PDL that was kept shows as programmatic."""
    from cuda.bindings import runtime

    raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
    error, *_, count = runtime.cudaGraphGetEdges(raw, 0)
    assert error == runtime.cudaError_t.cudaSuccess, error
    error, _, _, data, _ = runtime.cudaGraphGetEdges(raw, count)
    kinds: dict[str, int] = {}
    for edge in data:
        kinds[str(edge.type)] = kinds.get(str(edge.type), 0) + 1
    return kinds


def _flashinfer(name: str) -> Callable[..., object] | None:
    try:
        import flashinfer
    except ImportError:
        return None
    function: Callable[..., object] = getattr(flashinfer, name)
    return function


def best(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a kernel and shape: our best variant, and the others' figures."""
    for (kernel, shape), group in itertools.groupby(rows, key=lambda row: (row["kernel"], row["shape"])):
        cells = list(group)
        ours = sorted((c for c in cells if "pdl" in c["variant"]), key=lambda c: c["us"])
        without = min((c["us"] for c in ours if "pdl 0" in c["variant"]), default=None)
        others = "  ".join(f"{c['variant']} {c['us']}" for c in cells if "pdl" not in c["variant"])
        edges = next((f"  edges {c['edges']}" for c in reversed(cells) if "edges" in c), "")
        top = "; ".join(f"{c['variant']} {c['us']}" for c in ours[:2])
        yield f"{kernel} {shape}: {top} (pdl 0: {without})  {others}{edges}"


SECTIONS: dict[str, tuple[Callable[..., None], Iterable[tuple[Any, ...]]]] = {
    "chain": (bench_chain, itertools.product(MODELS, DECODE)),
    "sampler": (bench_sampler, itertools.product(DECODE)),
    "prepare": (bench_prepare, [(256,)]),
    "rope": (bench_rope, itertools.product(MODELS, (*DECODE, PREFILL))),
    "norms": (bench_norms, itertools.product((1024, 5120), (*DECODE, PREFILL))),
    "activation": (bench_activation, itertools.product((3072, 17408), (*DECODE, PREFILL))),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    for name in args.only.split(","):
        start = time.monotonic()
        bench, cases = SECTIONS[name]
        for case in cases:
            try:
                bench(*case)
            except Exception as error:  # noqa: BLE001  one failure must not cost a GPU run all other figures
                print(f"{name} {case}: FAILED: {error!r}")
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        report = {
            "gpu": torch.cuda.get_device_name(),
            "commit": args.commit
            or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "results": results,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1))
    print("\n".join(best(results)))


if __name__ == "__main__":
    main()
