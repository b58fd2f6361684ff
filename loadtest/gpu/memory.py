"""Does the engine stay within its memory when everything is as large as it may be?

    python -m loadtest.gpu.memory MODEL [--fractions 0.9 0.95] [--set NAME=VALUE ...] [--device cpu] [--json FILE]

Random weights. At each MIZZEN_MEMORY_FRACTION: the longest prompt that the engine admits, in chunks, while as many rows
as may run decode; then as many prompts at once as rows may run. Every request asks for all that the sampler can do. A
thread looks at the device's free memory meanwhile. Exit status 1 if memory ran out, or if the device was ever fuller
than the fraction by over 1% of its size.
"""

import argparse
import gc
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from loadtest.offline import environment, parse_setting
from mizzen import LLM, SamplingParams
from mizzen.platform.base import Platform
from mizzen.platform.cpu import CpuPlatform

POLL_S = 0.002
TOLERANCE = 0.01  # of the device
ANSWER = 32
PROMPT = 250  # tokens, of the second round
GIB = 2**30


def everything(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={7: 1.0},
        min_tokens=ANSWER,
        logprobs=20,
        seed=seed,
        max_tokens=ANSWER,
        ignore_eos=True,
    )


class Watch(threading.Thread):
    """The least memory that was free."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(daemon=True)
        self._platform = platform
        self._done = threading.Event()
        self.least_free = platform.free_memory_bytes()

    def run(self) -> None:
        while not self._done.wait(POLL_S):
            self.least_free = min(self.least_free, self._platform.free_memory_bytes())

    def stop(self) -> None:
        self._done.set()
        self.join()


def fill(llm: LLM, rows: int) -> list[float]:
    """Seconds of the two rounds."""
    source = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [source.randrange(3, 250) for _ in range(length)]

    seconds = []
    longest = prompt(llm.max_model_len - ANSWER)
    short = min(PROMPT, llm.max_model_len - ANSWER)
    for prompts in ([*(prompt(16) for _ in range(rows - 1)), longest], [prompt(short) for _ in range(rows)]):
        start = time.perf_counter()
        outputs = llm.generate(prompts, [everything(k) for k in range(len(prompts))], use_tqdm=False)
        assert all(len(output.choices[0].token_ids) == ANSWER for output in outputs)
        seconds.append(round(time.perf_counter() - start, 2))
    return seconds


def measure(model: str, fraction: float, rows: int, settings: dict[str, Any], platform: Platform) -> dict[str, Any]:
    cuda = platform.device.type == "cuda"
    total = torch.cuda.mem_get_info()[1] if cuda else platform.free_memory_bytes()
    result: dict[str, Any] = {"memory_fraction": fraction, "rows": rows, "total_gib": total / GIB}
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    watch = Watch(platform)
    watch.start()
    start = time.perf_counter()
    try:
        settings = {"load_format": "dummy", "max_running_requests": rows, **settings}
        with LLM(model, device=platform.device.type, memory_fraction=fraction, **settings) as llm:
            result["start_s"] = round(time.perf_counter() - start, 2)
            result["least_free_at_start_gib"] = watch.least_free / GIB
            result["free_when_ready_gib"] = platform.free_memory_bytes() / GIB
            result["max_model_len"] = llm.max_model_len
            result["pages"] = llm._loop.load().kv_pages_total
            result["seconds"] = fill(llm, rows)
        result["out_of_memory"] = None
    except torch.OutOfMemoryError as error:
        result["out_of_memory"] = str(error).splitlines()[0]
    watch.stop()
    result["least_free_gib"] = watch.least_free / GIB
    result["beyond_fraction_gib"] = ((total - watch.least_free) - fraction * total) / GIB
    if cuda:
        result["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        result["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    beyond = cuda and result["beyond_fraction_gib"] > TOLERANCE * total / GIB
    result["holds"] = result["out_of_memory"] is None and not beyond
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    platform: Platform
    if args.device == "cuda":
        from mizzen.platform.cuda import CudaPlatform

        platform = CudaPlatform(0)
    else:
        platform = CpuPlatform(threads=1)
    settings = dict(map(parse_setting, args.set))
    runs = []
    for fraction in args.fractions:
        runs.append(measure(args.model, fraction, args.rows, settings, platform))
        print(json.dumps(runs[-1]), flush=True)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    result = {"environment": environment(), "model": Path(args.model).name, "settings": settings, "runs": runs}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(run["holds"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
