"""Where a decode step's time goes on the GPU: kernels by family, busy share, host gaps. Prints a table, writes JSON.

python -m loadtest.gpu.profile_steps MODEL_FOLDER [--set NAME=VALUE ...] [--rows 256] [--json FILE]
"""

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loadtest.offline import parse_setting, sampling, workload
from mizzen import LLM
from mizzen.engine.local_ranks import EPOCH
from mizzen.ipc.messages import GenerateRequest

FAMILIES = {
    "attention": ("decode_kernel", "prefill_kernel", "plan_kernel", "attn", "flash"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk"),
    "norm": ("norm",),
    "activation": ("silu",),
    "sampler": ("block_stats", "draw_kernel", "draw_top", "kept_sums"),
    "memory": ("memcpy", "memset"),
}


def family(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in FAMILIES.items() if any(word in lower for word in words)), "other")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=560)
    parser.add_argument("--offline", action="store_true", help="the offline benchmark's requests, whatever --rows says")
    parser.add_argument("--skip", type=int, default=40, help="steps before the profiled ones")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    llm = LLM(args.model, load_format="dummy", **dict(map(parse_setting, args.set)))
    if args.offline:
        prompts, lengths = workload(0)
    else:
        source = random.Random(0)
        prompts = [[source.randint(0, 10_000) for _ in range(args.prompt)] for _ in range(args.rows)]
        lengths = [args.skip + args.steps + 20] * args.rows
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        llm._inbox.send(
            GenerateRequest(
                request_id=f"profiled-{number}",
                index=0,
                api=0,
                epoch=EPOCH,
                token_ids=np.array(prompt, np.int32).tobytes(),
                sampling=sampling(length),
                arrival_s=0.0,
            )
        )
    while llm._loop.steps < args.skip:
        llm._turn()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    before = llm._loop.steps
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(args.steps):
            llm._turn()
        torch.cuda.synchronize()
    steps = llm._loop.steps - before
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    start = min(event.time_range.start for event in kernels)
    end = max(event.time_range.end for event in kernels)
    by_family: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in kernels:
        by_family[family(event.name)] += event.time_range.elapsed_us()
        by_name[event.name[:70]] += event.time_range.elapsed_us()
        launches[event.name[:70]] += 1
    wall = end - start
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "rows": args.rows,
        "step_us": wall / steps,
        "busy_share": sum(by_family.values()) / wall,
        "families_us_a_step": {name: time / steps for name, time in by_family.most_common()},
    }
    print(f"{result['model']} {args.rows} rows: {wall / steps:.0f} us a step, busy {result['busy_share']:.1%}")
    for name, time in by_family.most_common():
        print(f"  {name:12} {time / steps:9.1f} us a step")
    for name, time in by_name.most_common(16):
        print(f"    {time / steps:9.1f} us {launches[name] / steps:6.1f} x  {name}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
