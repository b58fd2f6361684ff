"""``make bench-host``: what the host costs a step, a token and a tree operation. Prints a table, writes JSON.

(a) a step at 256 running requests without device work (bench_engine_host), and its scheduler alone (bench_scheduler);
(b) the whole chain of processes with a null model, over HTTP (bench_chain); (c) the radix tree (bench_radix).
"""

import argparse
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from loadtest import bench_chain, bench_engine_host, bench_radix, bench_scheduler


def environment() -> dict[str, Any]:
    """Where and of what the figures were taken."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False)
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "commit": commit.stdout.strip() + ("+" if dirty.stdout.strip() else ""),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def table(results: dict[str, Any]) -> str:
    lines = ["| part | what | figure |", "|---|---|---|"]
    names = {"decode": "256 decode rows", "mixed": "255 decode rows and 8k-token prompts in chunks"}
    for mode, row in results["step"].items():
        lines.append(f"| a | host ms a step, {names[mode]} | p50 {row['p50_ms']:.3f}, p99 {row['p99_ms']:.3f} |")
    for mode, row in results["scheduler"].items():
        lines.append(f"| a | of it schedule and update, {mode.replace('_', ' ')} | p50 {row['p50_ms']:.3f} ms |")
    many, alone = results["chain"]["many"], results["chain"]["alone"]
    client = f"{many['client_cpu_s']:.1f} s CPU of {many['wall_s']:.1f} s"
    lines += [
        f"| b | streamed tokens a second, {many['streams']} streams | {many['tokens_a_second']:,.0f} in"
        f" {many['events_a_second']:,.0f} events (client: {client}) |",
        f"| b | gap between a stream's reads, ms | p50 {many['gap_p50_ms']:.1f}, p99 {many['gap_p99_ms']:.1f} |",
        f"| b | first token of a lone request, ms | {results['chain']['first_token_ms']:.1f} |",
        f"| b | gap of a lone stream, ms | p50 {alone['gap_p50_ms']:.2f}, p99 {alone['gap_p99_ms']:.2f} |",
    ]
    for case, operations in results["radix"].items():
        figures = ", ".join(f"{name} {row['p50_us']:.0f}" for name, row in operations.items())
        lines.append(f"| c | radix tree of 100k nodes, keys compared in {case}: us p50 | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="models/smollm2-135m-instruct", help="for its tokenizer")
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args()
    results = {
        "environment": environment(),
        "step": bench_engine_host.run(),
        "scheduler": bench_scheduler.run(),
        "chain": bench_chain.run(args.model),
        "radix": bench_radix.run(),
    }
    print(table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
