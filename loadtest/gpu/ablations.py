"""What each idea is worth: the offline benchmark once a switch, against the baseline of the same run.

    python -m loadtest.gpu.ablations MODEL_FOLDER [--set NAME=VALUE ...] [--only NAME,NAME] [--limit-s 560] --json FILE

One engine after the other in this process, the most telling switches first; what does not fit into ``--limit-s`` is
reported as not run. ``--set`` holds for all of them. The baseline comes again at the end: what differs is noise.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from loadtest.offline import ALL_KERNELS, NUM_REQUESTS, environment, measure, parse_setting, sampling, workload
from mizzen import LLM

BASELINE = "baseline"
# Where the run itself sets the other policy (14B: longest-output), fcfs is the ablation.
SWITCHES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "overlap off": {"overlap_depth": 0},
    "graphs off": {"cuda_graph_rows": 0},
    "mixed graphs off": {"cuda_graph_mixed_tokens": 0},
    "fused kernels off": {"kernels_off": ALL_KERNELS},
    "own GEMMs off": {"kernels_off": "linear,gated_linear"},
    "add_rms_norm off": {"kernels_off": "add_rms_norm"},
    "qk_norm_rope_write_kv off": {"kernels_off": "qk_norm_rope_write_kv"},
    "silu_mul off": {"kernels_off": "silu_mul"},
    "rms_norm off": {"kernels_off": "rms_norm"},
    "prefix cache none": {"prefix_cache": "none"},
    "prefill-first": {"mixed_batches": "false"},
    "longest-output": {"scheduling_policy": "longest-output"},
    "fcfs": {"scheduling_policy": "fcfs"},
    "reserve all pages": {"kv_allocation": "reserve"},
    "baseline again": {},
}


def plan(common: dict[str, Any], only: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Settings by switch. A switch that changes nothing of ``common`` (fcfs, where nothing else is set) is left out."""
    wanted = {BASELINE, *only} if only else set(SWITCHES)
    if unknown := wanted - set(SWITCHES):
        raise SystemExit(f"no such switch: {', '.join(sorted(unknown))}. There are: {', '.join(SWITCHES)}")
    usual = {"scheduling_policy": "fcfs", **common}
    return {
        name: {**common, **changes}
        for name, changes in SWITCHES.items()
        if name in wanted
        and (name.startswith(BASELINE) or any(usual.get(key) != value for key, value in changes.items()))
    }


def run_all(
    runs: dict[str, dict[str, Any]],
    one: Callable[[dict[str, Any]], dict[str, Any]],
    limit_s: float,
    keep: Callable[[dict[str, dict[str, Any]]], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, dict[str, Any]]:
    """Each run's result, or {"not_run": why}. None is begun that would end after ``limit_s`` if it took as long as the
    longest so far. ``keep`` gets the results after each run."""
    begin_s, longest_s = clock(), 0.0
    results: dict[str, dict[str, Any]] = {}
    for name, settings in runs.items():
        start_s = clock()
        if start_s - begin_s + longest_s > limit_s:
            results[name] = {"not_run": "no time left"}
            continue
        try:
            results[name] = one(settings)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other switches count all the same
            results[name] = {"not_run": f"{type(error).__name__}: {error}".splitlines()[0]}
        longest_s = max(longest_s, clock() - start_s)
        print(row(name, results[name], results[BASELINE]), flush=True)
        keep(results)
    return results


def benchmark(model: str, load_format: str, num_requests: int, settings: dict[str, Any]) -> dict[str, Any]:
    """An engine's start, warm-up and one repetition; nothing of it is left on the GPU."""
    begin_s = time.monotonic()
    llm = LLM(model, load_format=load_format, **settings)
    try:
        start_s = time.monotonic() - begin_s
        llm.generate(workload(999, min(64, num_requests))[0], sampling(16), use_tqdm=False)
        result = measure(llm, 0, num_requests)
    finally:
        llm.close()
        del llm
        release()
    left = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    return {**result, "start_s": start_s, "gpu_bytes_left": left}


def release() -> None:
    gc.unfreeze()  # an engine's start freezes what it has built
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row(name: str, result: dict[str, Any], baseline: dict[str, Any]) -> str:
    if "not_run" in result:
        return f"| {name} | not run: {result['not_run']} | | | | |"
    cells = [f"{result['output_tokens_per_s']:,.0f}"]
    ratios = "output_tokens_per_s" in baseline
    cells.append(f"{result['output_tokens_per_s'] / baseline['output_tokens_per_s']:.3f}" if ratios else "")
    for kind in ("mean", "p90"):
        value = result["time_to_first_token_s"][kind]
        ratio = f" ({value / baseline['time_to_first_token_s'][kind]:.3f})" if ratios else ""
        cells.append(f"{value:.3f}{ratio}")
    return f"| {name} | {' | '.join(cells)} | {result['start_s']:.1f} |"


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| switch | output tok/s | ratio | TTFT mean, s (ratio) | TTFT P90, s (ratio) | start, s |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [row(name, result, results[BASELINE]) for name, result in results.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--only", default="", help="switches, comma separated; the baseline is always run")
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    common = dict(map(parse_setting, args.set))
    runs = plan(common, args.only.split(",") if args.only else ())
    args.json.parent.mkdir(parents=True, exist_ok=True)
    written = {"environment": environment(), "model": Path(args.model).name, "requests": args.requests}
    written |= {"load_format": args.load_format, "settings": common}

    def keep(results: dict[str, dict[str, Any]]) -> None:
        args.json.write_text(json.dumps({**written, "results": results}, indent=1) + "\n")

    def one(settings: dict[str, Any]) -> dict[str, Any]:
        return benchmark(args.model, args.load_format, args.requests, settings)

    results = run_all(runs, one, args.limit_s, keep)
    keep(results)
    left = max((result.get("gpu_bytes_left", 0) for result in results.values()), default=0)
    print(f"\n{written['model']}, {args.requests} requests, {' '.join(args.set) or 'defaults'};", end=" ")
    print(f"most GPU memory left by a closed engine: {left / 2**20:.0f} MiB")
    print(table(results))


if __name__ == "__main__":
    main()
