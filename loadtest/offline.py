"""The field's offline benchmark: 256 prompts of 100-1024 random token ids, 100-1024 tokens each to generate.

    python -m loadtest.offline --model MODEL --load-format dummy [--set max_batch_tokens=384 ...] [--json FILE]

Lengths are those of random.seed(0), as nano-vllm and mini-sglang draw them; each repetition has token ids of its own,
so that no prefix cache can help. A short warm-up of the same shape comes first. Any setting may be given by --set.
"""

import argparse
import json
import random
import statistics
import subprocess
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from loadtest.figures import percentiles
from mizzen import LLM, SamplingParams
from mizzen.kernels.dispatch import Kernels

NUM_REQUESTS = 256
MAX_INPUT, MAX_OUTPUT = 1024, 1024
VOCABULARY = 10_000
ALL_KERNELS = ",".join(field.name for field in fields(Kernels))  # for kernels_off


def workload(repetition: int, num_requests: int = NUM_REQUESTS) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths: 142,827 tokens in, 133,966 out. Repetition 0 has the published token ids."""
    source = random.Random(0)
    prompts = [
        [source.randint(0, VOCABULARY) for _ in range(source.randint(100, MAX_INPUT))] for _ in range(num_requests)
    ]
    outputs = [source.randint(100, MAX_OUTPUT) for _ in range(num_requests)]
    if repetition:
        fresh = random.Random(repetition)
        prompts = [[fresh.randint(0, VOCABULARY) for _ in prompt] for prompt in prompts]
    return prompts, outputs


def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)


def measure(llm: LLM, repetition: int, num_requests: int) -> dict[str, Any]:
    prompts, outputs = workload(repetition, num_requests)
    start_s = time.monotonic()
    answers = llm.generate(prompts, [sampling(count) for count in outputs], use_tqdm=False)
    seconds = time.monotonic() - start_s
    timings = [answer.choices[0].timings for answer in answers]
    assert [len(answer.choices[0].token_ids) for answer in answers] == outputs
    return {
        "seconds": seconds,
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(outputs),
        "output_tokens_per_s": sum(outputs) / seconds,
        # all requests arrive at the start
        "time_to_first_token_s": percentiles([one.first_token_s - start_s for one in timings]),
    }


def environment() -> dict[str, Any]:
    import torch

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": git("rev-parse", "--short", "HEAD"),
        "date": time.strftime("%Y-%m-%d"),
        "torch": str(torch.__version__),
        "gpu": gpu,
    }


def parse_setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the name may also be the environment variable's."""
    name, _, value = text.partition("=")
    return name.lower().removeprefix("mizzen_"), int(value) if value.lstrip("-").isdigit() else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = dict(map(parse_setting, args.set))
    begin = time.perf_counter()
    llm = LLM(args.model, load_format=args.load_format, tensor_parallel_size=args.tp, **settings)
    start_s = time.perf_counter() - begin
    prompts, _ = workload(999, min(64, args.requests))
    llm.generate(prompts, sampling(16), use_tqdm=False)  # warm-up
    runs = [measure(llm, repetition, args.requests) for repetition in range(args.repeat)]
    rates = [run["output_tokens_per_s"] for run in runs]
    result: dict[str, Any] = {
        "environment": environment(),
        "model": Path(args.model).name,
        "tensor_parallel_size": args.tp,
        "settings": {"load_format": args.load_format, **settings},
        "start_s": start_s,
        "runs": runs,
        "output_tokens_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
    }
    print("| model | TP | settings | output tok/s (median, min-max) |")
    rate = result["output_tokens_per_s"]
    shown = " ".join(args.set) or "defaults"
    spread = f"{rate['median']:,.0f} ({rate['min']:,.0f}-{rate['max']:,.0f})"
    print(f"| {result['model']} | {args.tp} | {shown} | {spread} |")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    llm.close()


if __name__ == "__main__":
    main()
