"""One rank of the all-reduce benchmark (loadtest.gpu.tensor_parallel starts them): RANK SIZE FOLDER DEVICE

First the sums are checked, with ranks out of step on purpose and one buffer for calls of many sizes, in a CUDA graph
that is replayed; then each way is timed by size, also in graphs. Rank 0 writes FOLDER/all-reduce.json.
"""

import faulthandler
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mizzen.distributed.group import ProcessGroup, make_group

COLUMNS = 5120
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
CPU_ROWS = (1, 32)
ONE_SHOT_ROWS = 1024  # beyond, nobody would
CALLS, REPLAYS = 20, 15  # calls in a graph; replays, of which the median counts
CHECKS = (3, 256, 1, 64, 17, 1024, 2, 128)  # rows of the calls in the checked graph, one behind the other
CHECKED_REPLAYS, CPU_CHECKED_REPLAYS = 30, 2
DELAY_CYCLES = 40_000  # about 20 us


def product(rank: int, call: int, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """What rank's layer would compute: x [rows, 64] and w [64, COLUMNS], the same numbers wherever they are drawn."""
    generator = torch.Generator().manual_seed(1000 * rank + call)
    x, w = torch.randn(rows, 64, generator=generator), torch.randn(64, COLUMNS, generator=generator)
    return x.to(device, dtype), w.to(device, dtype)


def check(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Products summed over the ranks against the sum of all products computed here. Raises AssertionError."""
    every = [[product(rank, k, rows, dtype, device) for k, rows in enumerate(CHECKS)] for rank in range(group.size)]
    outs = [torch.empty(rows, COLUMNS, dtype=dtype, device=device) for rows in CHECKS]

    def calls() -> None:
        for k, (x, w) in enumerate(every[group.rank]):
            if device.type == "cuda":
                torch.cuda._sleep(DELAY_CYCLES * ((k + group.rank) % 3))
            buffer = group.sum_buffer(len(x), COLUMNS, dtype)
            outs[k].copy_(group.all_reduce(torch.mm(x, w) if buffer is None else torch.mm(x, w, out=buffer)))

    replay = captured(calls, device)
    replays = CHECKED_REPLAYS if device.type == "cuda" else CPU_CHECKED_REPLAYS
    for _ in range(replays):
        for out in outs:
            out.fill_(torch.nan)
        replay()
        for k, out in enumerate(outs):
            terms = [torch.mm(*every[rank][k]) for rank in range(group.size)]
            expected = sum(term.float() for term in terms)
            assert isinstance(expected, Tensor)
            largest = float(expected.abs().max())
            off = float((out.float() - expected).abs().max()) / largest
            assert off <= 2 * torch.finfo(dtype).eps, f"call {k} of {CHECKS[k]} rows is off by {off:.2e}"
            alike = group.all_gather(out[None], 0)
            assert all(torch.equal(other, out) for other in alike), f"call {k}: the ranks' bits differ"
    return {"dtype": str(dtype), "calls": len(CHECKS), "replays": replays}


def captured(calls: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """``calls`` as a graph's replay, after a warm-up; on the CPU, itself."""
    calls()
    if device.type == "cpu":
        return calls
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def microseconds(call: Callable[[], object], group: ProcessGroup, device: torch.device) -> float:
    """Of one call: the median of replays of a graph of CALLS."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    replay = captured(calls, device)
    aligned = torch.zeros(1, device=device)
    times = []
    for _ in range(REPLAYS):
        group.barrier()
        if device.type == "cpu":
            start_s = time.perf_counter()
            replay()
            times.append((time.perf_counter() - start_s) * 1e6)
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20 * DELAY_CYCLES)  # all ranks have launched before any of them runs on,
        dist.all_reduce(aligned)  # and all begin at once
        start.record()
        replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times) / CALLS


def measure(group: ProcessGroup, device: torch.device, num_bytes: int) -> list[dict[str, float]]:
    table = []
    sums: Any = None
    if device.type == "cuda":
        from mizzen.distributed.symmetric import SymmetricSums

        sums = SymmetricSums(num_bytes, device)
    for rows in CPU_ROWS if device.type == "cpu" else ROWS:
        plain = torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=device)
        place = group.sum_buffer(rows, COLUMNS, torch.bfloat16)
        ours = plain if place is None else place.zero_()
        ways: dict[str, Callable[[], object]] = {
            "nccl": lambda plain=plain: dist.all_reduce(plain),  # type: ignore[misc]  # mypy infers no default's type
            "ours": lambda ours=ours: group.all_reduce(ours),  # type: ignore[misc]
        }
        if sums is not None:
            view = sums.view(rows, COLUMNS, torch.bfloat16).zero_()
            if rows <= ONE_SHOT_ROWS:
                ways["one-shot"] = lambda view=view: sums.one_shot(view)  # type: ignore[misc]
            ways["two-shot"] = lambda view=view: sums.two_shot(view)  # type: ignore[misc]
        table.append({"rows": rows, **{name: microseconds(call, group, device) for name, call in ways.items()}})
    return table


@torch.inference_mode()
def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cpu") if sys.argv[4] == "cpu" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(60)
    group = make_group(rank, size, folder / "store", device=device, timeout_s=60)
    num_bytes = max(ROWS) * COLUMNS * 2
    group.reserve_sums(max(ROWS), COLUMNS, torch.bfloat16)
    checks = [check(group, dtype, device) for dtype in (torch.bfloat16, torch.float32)]
    symmetric = group.sum_buffer(1, COLUMNS, torch.bfloat16) is not None
    result = {"ranks": size, "symmetric": symmetric, "checked": checks, "columns": COLUMNS, "unit": "us"}
    result["table"] = measure(group, device, num_bytes)
    if rank == 0:
        (folder / "all-reduce.json").write_text(json.dumps(result))
    group.barrier()
    group.close()


if __name__ == "__main__":
    main()
