"""Several GPUs: sums over the ranks, tokens against one rank, a rank's death, the offline benchmark, a replayed trace.

    python -m loadtest.gpu.tensor_parallel PART [--models DIR] [--tp N] [--json FILE]

    all-reduce  microseconds by size, and whether the sums are right
    tokens      greedy answers at TP N against TP 1: they may differ only where rounding explains it
    death       a rank is killed while it works: how soon the offline LLM says so, and ends
    offline     loadtest.offline of several models and sizes, and how well they scale
    replay      loadtest.gpu.traces at TP N: the Azure trace over HTTP, at several speeds
    all         all-reduce, tokens, death, offline of 14B and 32B: about 200 s on two H200s

Each part is a process with a limit of its own, so that one that fails or hangs does not lose the others' results.
Exit status 1 if a part failed or a rule is broken.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from loadtest.offline import environment, parse_setting

TOKENS_MODEL = "qwen3-0.6b"
OFFLINE_SETTINGS = ("page_size=64", "scheduling_policy=longest-output")
ONE_RANK = {"qwen3-14b": "loadtest/results/offline-14b-lof.json"}  # measured before, for the scaling
REQUESTS, LONGEST, ANSWER, VOCABULARY = 24, 768, 64, 10_000  # of tokens
DEATH_AFTER_S, DEATH_LIMIT_S = 2.0, 20.0


def run(command: list[str], limit_s: float) -> int | None:
    """A command in a process group of its own, its output ours; None if it ran past the limit and was killed."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, signal.SIGKILL)  # ranks that it left behind too
        process.wait()


def module(name: str, *words: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, words)]


def part_command(part: str, *words: object) -> list[str]:
    return module("loadtest.gpu.tensor_parallel", part, *words)


# ---- all-reduce ----


def all_reduce(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [
            subprocess.Popen(module("loadtest.gpu.all_reduce", rank, args.tp, folder, args.device))
            for rank in range(args.tp)
        ]
        try:
            codes = [rank.wait(args.limit_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        # The figures count even if a rank could not end in order.
        file = folder / "all-reduce.json"
        if not file.exists():
            return {"ok": False, "exit_codes": codes}
        return {"ok": not any(codes), "exit_codes": codes, **json.loads(file.read_text())}


# ---- tokens ----


def tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Each engine is a process of its own: no rank may find another model's memory on its GPU."""
    ways: dict[str, list[str]] = {"TP 1": ["--tp", "1"], f"TP {args.tp}": ["--tp", str(args.tp)]}
    if args.device == "cuda":
        ways[f"TP {args.tp}, NCCL alone"] = ["--tp", str(args.tp), "--set", "all_reduce=nccl"]
    answers: dict[str, Any] = {}
    codes: dict[str, int | None] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for number, (way, words) in enumerate(ways.items()):
            start, file = time.perf_counter(), Path(name) / f"{number}.json"
            command = part_command("answers", "--models", args.models, "--device", args.device, "--json", file, *words)
            codes[way] = run([*command, "--model", args.model], args.limit_s)
            seconds[way] = round(time.perf_counter() - start, 1)
            print(f"tokens, {way}: exit {codes[way]} after {seconds[way]} s", flush=True)
            if file.exists():  # the answers count even if the process could not end in order
                answers[way] = json.loads(file.read_text())
    if "TP 1" not in answers:
        return {"ok": False, "seconds": seconds, "exit_codes": codes}
    compared = weigh(args.models / args.model, args.device, answers)
    beyond = sum(way["beyond"] for way in compared["ways"].values())
    ok = not any(codes.values()) and None not in codes.values() and len(answers) == len(ways) and not beyond
    return {"ok": ok, "seconds": seconds, "exit_codes": codes, **compared}


def answers_of_one(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy answers of one engine. They are written before it closes, so that they count even if that fails."""
    from mizzen import LLM, SamplingParams
    from mizzen.models.config import parse_architecture

    folder = args.models / args.model
    faulthandler.dump_traceback_later(args.limit_s - 2)
    vocabulary = min(VOCABULARY, parse_architecture(folder).vocab_size)
    source = random.Random(0)
    prompts = [[source.randrange(vocabulary) for _ in range(source.randint(10, LONGEST))] for _ in range(REQUESTS)]
    settings: dict[str, Any] = {
        "max_model_len": LONGEST + ANSWER,
        "max_running_requests": REQUESTS,
        "max_batch_tokens": 512,  # few sizes of mixed steps to capture
        "kv_cache_bytes": 2**32 if args.device == "cuda" else 2**27,
        "dtype": "bfloat16",
        **dict(map(parse_setting, args.set)),
    }
    llm = LLM(folder, load_format="dummy", device=args.device, tensor_parallel_size=args.tp, **settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    answers = [output.choices[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
    result = {"ok": True, "prompts": prompts, "answers": answers}
    save(args.json, result)
    llm.close()
    return result


def weigh(folder: Path, device_name: str, answers: dict[str, Any]) -> dict[str, Any]:
    """Where an answer first differs from that of one rank, float32 must hold the two tokens for as good as equal: the
    worse lies below the best by no more than bfloat16's largest error in the difference of a place's top two logits,
    measured on other text."""
    import torch

    from loadtest.gpu import truth
    from mizzen.distributed.group import SingleGroup
    from mizzen.models.config import parse_architecture
    from mizzen.models.decoder import Decoder
    from mizzen.models.loader import load_model

    device, arch = torch.device(device_name), parse_architecture(folder)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        model = load_model(
            arch,
            folder,
            load_format="dummy",
            dtype="bfloat16",
            device=device,
            group=SingleGroup(),
            progress=lambda *_: None,
        )
        assert isinstance(model, Decoder)
        exact = truth.transformers_model(folder, model, torch.float32, device)
        vocabulary = min(truth.VOCABULARY, arch.vocab_size)
        drawn = torch.randint(0, vocabulary, (4, truth.TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
        ours, right = truth.our_logits(model, drawn, [truth.TOKENS]), truth.their_logits(exact, drawn)
        top, indices = ours.topk(2, -1)
        error = float((top.diff() - right.gather(-1, indices).diff()).abs().max())
        ways = {}
        prompts, plain = answers["TP 1"]["prompts"], answers["TP 1"]["answers"]
        for way, other in answers.items():
            if way == "TP 1":
                continue
            gaps, equal_tokens = [], 0
            for prompt, one, two in zip(prompts, plain, other["answers"], strict=True):
                place = truth.first_difference(one, two)
                equal_tokens += len(one) if place is None else place
                if place is not None:
                    gaps.append(truth.gap(exact, prompt + one[:place], (one[place], two[place]), device))
            ways[way] = {
                "answers": len(plain),
                "compared_tokens": equal_tokens + len(gaps),
                "differ": len(gaps),
                "beyond": sum(gap > error for gap in gaps),
                "gaps": sorted(gaps, reverse=True),
            }
    return {"error": error, "ways": ways}


# ---- death ----


def death(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "death.json"
        command = part_command("dying", "--models", args.models, "--model", args.model, "--tp", args.tp)
        code = run([*command, "--device", args.device, "--json", file], args.limit_s)
        ended_s = time.time()
        seen: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    killed_s = seen.pop("killed_s", ended_s)
    seen |= {"exit_code": code, "exit_after_s": round(ended_s - killed_s, 2)}
    return {"ok": code == 1 and "error" in seen and seen["exit_after_s"] < DEATH_LIMIT_S, **seen}


def dying(args: argparse.Namespace) -> None:
    """An LLM loses a rank while it generates, and this process ends by the error, as a user's would."""
    from mizzen import LLM, SamplingParams
    from mizzen.errors import EngineDead

    faulthandler.dump_traceback_later(args.limit_s - 2)
    llm = LLM(
        args.models / args.model,
        load_format="dummy",
        device=args.device,
        tensor_parallel_size=args.tp,
        cuda_graph_rows=8,
        max_batch_tokens=256,
        max_model_len=512,
        kv_cache_bytes=2**28,
        threads=1,
    )
    ranks = llm._ranks  # no public way leads to a rank's process
    assert ranks is not None
    killed_s = 0.0

    def kill() -> None:
        nonlocal killed_s
        killed_s = time.time()
        ranks._processes[-1].kill()

    threading.Timer(DEATH_AFTER_S, kill).start()
    try:
        while True:  # until the rank is gone
            llm.generate([[7] * 50] * 8, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    except EngineDead as error:
        seen = {"killed_s": killed_s, "error": str(error), "error_after_s": round(time.time() - killed_s, 2)}
        args.json.write_text(json.dumps(seen))
        raise


# ---- offline ----


def offline(args: argparse.Namespace) -> dict[str, Any]:
    """``--runs``: MODEL:TP, comma separated."""
    rows: list[dict[str, Any]] = []
    for name, _, size in (run_name.partition(":") for run_name in args.runs.split(",")):
        rows.append({"model": name, "tp": int(size), **offline_run(args, name, int(size))})
    alone = {row["model"]: row["tok_s"] for row in rows if row["tp"] == 1 and "tok_s" in row}
    for model, file in ONE_RANK.items():
        if model not in alone and Path(file).exists():
            alone[model] = json.loads(Path(file).read_text())["output_tokens_per_s"]["median"]
    for row in rows:
        if row["model"] in alone and "tok_s" in row:
            row["efficiency"] = round(row["tok_s"] / (row["tp"] * alone[row["model"]]), 3)
    return {"ok": all("tok_s" in row for row in rows), "rows": rows, "one_rank": alone}


def offline_run(args: argparse.Namespace, model: str, size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        file, start = Path(name) / "offline.json", time.perf_counter()
        words = ["--model", args.models / model, "--load-format", "dummy", "--tp", size, "--repeat", args.repeat]
        for setting in args.set or OFFLINE_SETTINGS:
            words += ["--set", setting]
        words += ["--requests", args.requests, "--json", file]
        code = run(module("loadtest.offline", *words), args.limit_s)
        seconds = round(time.perf_counter() - start, 1)
        if not file.exists():
            return {"exit_code": code, "seconds": seconds}
        detail = json.loads(file.read_text())
    return {"exit_code": code, "seconds": seconds, "tok_s": detail["output_tokens_per_s"]["median"], "detail": detail}


# ---- replay ----


def replay(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "replay"
        words: list[object] = [args.models / args.model, "--trace", args.trace, "--trace-format", "azure"]
        words += ["--requests", args.requests, "--speeds", args.speeds, "--total-s", args.limit_s, "--out", out]
        words += ["--set", f"tensor_parallel_size={args.tp}"]
        for setting in args.set:
            words += ["--set", setting]
        code = run(module("loadtest.gpu.traces", *words), args.limit_s)
        file = out.with_suffix(".json")
        detail = json.loads(file.read_text()) if file.exists() else None
    return {"ok": code == 0 and detail is not None, "exit_code": code, "detail": detail}


# ---- all ----


def all_parts(args: argparse.Namespace) -> dict[str, Any]:
    shared = ["--models", args.models, "--tp", args.tp, "--device", args.device]
    plan: dict[str, tuple[list[object], float]] = {
        "all-reduce": ([], 40),
        "tokens": (["--model", args.model, "--limit-s", 60], 150),
        "death": (["--model", args.model, "--limit-s", 45], 60),
    }
    for model in args.offline_models.split(","):
        words = ["--runs", f"{model}:{args.tp}", "--repeat", 1, "--requests", args.requests, "--limit-s", 110]
        plan[f"offline {model}"] = (words, 115)
    parts: dict[str, Any] = {}
    for part, (words, limit_s) in plan.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "part.json"
            code = run(part_command(part.split()[0], *shared, *words, "--json", file), limit_s)
            found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"ok": False}
        parts[part] = {**found, "part_exit_code": code, "part_seconds": round(time.perf_counter() - start, 1)}
        print(f"{part}: exit {code} after {parts[part]['part_seconds']} s", flush=True)
        if args.json:
            save(args.json, {"parts": parts})  # what is there so far: the whole may be cut short
    return {"ok": all(part["ok"] for part in parts.values()), "parts": parts}


def save(file: Path, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")


def show(part: str, result: dict[str, Any]) -> None:
    """A few lines for people; everything is in the JSON."""
    print(f"== {part}: {'ok' if result['ok'] else 'FAILED'}")
    if "table" in result:
        print(f"   sums right; symmetric memory: {result['symmetric']}; us of {result['columns']} columns, bfloat16")
        for row in result["table"]:
            print("   " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    for way, row in result.get("ways", {}).items():
        print(
            f"   {way}: {row['differ']} of {row['answers']} answers differ, {row['beyond']} beyond"
            f" {result['error']:.4f}; {row['compared_tokens']} tokens compared,"
            f" largest gap {max(row['gaps'], default=0):.4f}"
        )
    if "exit_after_s" in result:
        print(f"   error after {result.get('error_after_s')} s, process ended after {result['exit_after_s']} s")
    for row in result.get("rows", []):
        rate, start_s = row.get("tok_s"), row.get("detail", {}).get("start_s")
        print(f"   {row['model']} TP {row['tp']}: {rate} tok/s, efficiency {row.get('efficiency')}, start {start_s} s")
    for name, inner in result.get("parts", {}).items():
        show(name, inner)


PARTS = {
    "all-reduce": all_reduce,
    "tokens": tokens,
    "death": death,
    "offline": offline,
    "replay": replay,
    "all": all_parts,
    "answers": answers_of_one,
    "dying": dying,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--models", type=Path, default=Path(os.environ.get("MODELS", "models")))
    parser.add_argument("--model", default=TOKENS_MODEL, help="of tokens, death and replay")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", default="qwen3-14b:1,qwen3-14b:2", help="of offline: MODEL:TP, comma separated")
    parser.add_argument("--offline-models", default="qwen3-14b,qwen3-32b", help="of all")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--trace", type=Path, default=Path(".device/azure_conv_2000.csv"))
    parser.add_argument("--speeds", default="2,4,8")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--limit-s", type=float, default=240.0, help="of each process that a part starts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    result = PARTS[args.part](args)
    assert result is not None
    if args.json:
        save(args.json, result)
    if args.part != "answers":
        show(args.part, result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
