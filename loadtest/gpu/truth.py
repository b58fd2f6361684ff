"""How far our logits are from the truth, and whether that explains each token that depends on how a step is run.

    python -m loadtest.gpu.truth MODEL_FOLDER[:LAYERS] ... [--tp N] [--device cpu] [--json FILE]

The truth is transformers in float32 on the same random weights, teacher-forced. Our error, and that of transformers in
bfloat16, is ||logits - truth|| / ||truth||: the ratio may be at most 1.2. It is measured on whole prompts (prefill), on
prompts in chunks, and token by token (decode).

Then the engine answers the same greedy requests in several ways: with graphs and without, with overlap and without, in
other chunks, split over N GPUs. Where an answer first differs from that of plain eager steps, the truth must hold both
tokens for nearly equally good: the worse of them may lie below the best one by no more than the largest error of any
logit that was measured before. Exit status 1 if a ratio or a token breaks its rule.
"""

import argparse
import gc
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.offline import ALL_KERNELS, environment
from mizzen import LLM, SamplingParams
from mizzen.attention.base import Batch, KVTensors
from mizzen.attention.registry import make_attention
from mizzen.distributed.group import SingleGroup
from mizzen.models.config import parse_architecture
from mizzen.models.decoder import Decoder
from mizzen.models.loader import load_model

PAGE = 16
TOKENS, PROMPTS, DECODED = 384, 4, 96
MAX_RATIO = 1.2
REQUESTS, ANSWER = 24, 64
VOCABULARY = 10_000
PLAIN: dict[str, Any] = {"cuda_graph_rows": 0}
GRAPHS: dict[str, Any] = {"cuda_graph_rows": REQUESTS}
WAYS: dict[str, dict[str, Any]] = {
    "the same again": PLAIN,
    "no overlap": {**PLAIN, "overlap_depth": 0},
    "graphs": GRAPHS,
    "graphs, no overlap": {**GRAPHS, "overlap_depth": 0},
    "chunks of 64": {**PLAIN, "max_batch_tokens": 64},
    "graphs, chunks of 256": {**GRAPHS, "max_batch_tokens": 256},
    "graphs, batches not mixed": {**GRAPHS, "mixed_batches": False},
    "torch kernels": {**PLAIN, "kernels_off": ALL_KERNELS},
}


class Errors:
    """Of logits [.., vocab], both float32: relative, and of a single logit."""

    def __init__(self, logits: Tensor, truth: Tensor) -> None:
        off = logits - truth
        self.relative = float(off.norm() / truth.norm())
        self.largest = float(off.abs().max())


def with_layers(folder: Path, layers: int | None) -> Path:
    """The folder, or a copy whose config.json has so many layers."""
    if layers is None:
        return folder
    copy = Path(tempfile.mkdtemp()) / folder.name
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def transformers_model(folder: Path, model: Decoder, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model on our weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()
    parameters = dict(theirs.named_parameters())
    for part in model.weights():
        if part.name in parameters:  # a tied head is there once
            parameters[part.name].data.copy_(part.target)
    return theirs


def their_logits(theirs: Any, prompts: Tensor) -> Tensor:
    return torch.stack([theirs(prompt[None]).logits[0].float() for prompt in prompts])  # [prompts, tokens, vocab]


def our_logits(model: Decoder, prompts: Tensor, chunks: Sequence[int]) -> Tensor:
    """Of one prompt after the other, in steps of so many tokens, through pages in random order."""
    device, pages = prompts.device, -(-TOKENS // PAGE)
    kv = KVTensors.allocate(model.num_layers, pages, PAGE, model.num_kv_heads, model.head_dim, model.dtype, device)
    attention = make_attention("auto", kv, num_heads=model.num_heads, device=device)
    table = torch.randperm(pages, device=device).to(torch.int32)[None]
    out = []
    for prompt in prompts:
        start = 0
        for count in chunks:
            positions = torch.arange(start, start + count, device=device)
            start += count
            batch = Batch(
                token_ids=prompt[positions],
                positions=positions,
                kv_slots=table[0, positions // PAGE].long() * PAGE + positions % PAGE,
                page_table=table,
                row_slots=torch.zeros(1, dtype=torch.int32, device=device),
                seq_lens=torch.tensor([start], dtype=torch.int32, device=device),
                query_start=torch.tensor([0, count], dtype=torch.int32, device=device),
                sample_tokens=positions,
                num_decode_rows=int(count == 1),
                seq_lens_host=[start],
                query_start_host=[0, count],
            )
            attention.plan(batch)
            out.append(model.logits(model(batch, attention)).float())
    return torch.cat(out).view(len(prompts), TOKENS, -1)


def answers(folder: Path, device: torch.device, settings: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The greedy requests' prompts and what the engine answers."""
    vocabulary = min(VOCABULARY, parse_architecture(folder).vocab_size)
    source = random.Random(0)
    prompts = [
        [source.randrange(vocabulary) for _ in range(source.randint(10, TOKENS + TOKENS))] for _ in range(REQUESTS)
    ]
    shape: dict[str, Any] = {
        "max_model_len": 2 * TOKENS + ANSWER,
        "max_running_requests": REQUESTS,
        "max_batch_tokens": 2048,
        "kv_cache_bytes": 2**32 if device.type == "cuda" else 2**27,
    }
    with LLM(folder, load_format="dummy", device=device.type, dtype="bfloat16", **{**shape, **settings}) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True), use_tqdm=False
        )
    return prompts, [output.choices[0].token_ids for output in outputs]


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def gap(theirs: Any, known: list[int], tokens: tuple[int, int], device: torch.device) -> float:
    """How far the truth puts the worse of two tokens below the best of all."""
    logits = theirs(torch.tensor([known], device=device), logits_to_keep=1).logits[0, -1].float()
    return float(logits.max() - logits[list(tokens)].min())


def compare_ways(
    folder: Path, theirs: Any, ways: dict[str, dict[str, Any]], device: torch.device, error: float
) -> dict[str, Any]:
    """For each way: how many answers differ from plain eager ones, how many beyond ``error`` in a logit."""
    prompts, plain = answers(folder, device, PLAIN)
    result = {}
    for name, settings in ways.items():
        start = time.perf_counter()
        _, other = answers(folder, device, settings)
        gc.collect()  # the engine's memory, before the next one is built
        gaps = []
        for prompt, one, two in zip(prompts, plain, other, strict=True):
            place = first_difference(one, two)
            if place is not None:
                gaps.append(gap(theirs, prompt + one[:place], (one[place], two[place]), device))
        beyond = sum(value > error for value in gaps)
        result[name] = {
            "answers": len(plain),
            "differ": len(gaps),
            "beyond": beyond,
            "largest_gap": max(gaps, default=0),
        }
        print(
            f"  {name}: {len(gaps)} of {len(plain)} answers differ, {beyond} by more than {error:.4f}"
            f" (largest {max(gaps, default=0):.4f}); {time.perf_counter() - start:.1f} s",
            flush=True,
        )
    return result


def measure(folder: Path, ways: dict[str, dict[str, Any]], device: torch.device) -> dict[str, Any]:
    """Everything for one model; "holds" says whether all rules do."""
    arch = parse_architecture(folder)
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
    vocabulary = min(VOCABULARY, arch.vocab_size)
    prompts = torch.randint(0, vocabulary, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
    exact = transformers_model(folder, model, torch.float32, device)
    truth = their_logits(exact, prompts)
    bf16 = Errors(their_logits(transformers_model(folder, model, torch.bfloat16, device), prompts), truth)
    print(f"{folder.name}, {arch.num_layers} layers: transformers in bfloat16 {bf16.relative:.5f}", flush=True)
    logits: dict[str, Any] = {}
    for name, count, chunks in (
        ("whole", PROMPTS, [TOKENS]),
        ("chunks of 100", PROMPTS, [100, 100, 100, TOKENS - 300]),
        ("decode", 1, [TOKENS - DECODED, *[1] * DECODED]),
    ):
        part = slice(TOKENS - DECODED, None) if name == "decode" else slice(None)
        ours = Errors(our_logits(model, prompts[:count], chunks)[:, part], truth[:count, part])
        ratio = ours.relative / bf16.relative
        logits[name] = {"error": ours.relative, "largest": ours.largest, "ratio": ratio}
        print(f"  {name}: {ours.relative:.5f}, ratio {ratio:.3f}, largest {ours.largest:.4f}", flush=True)
    del model, truth
    error = max(part["largest"] for part in logits.values())
    tokens = compare_ways(folder, exact, ways, device, error)
    holds = all(part["ratio"] <= MAX_RATIO for part in logits.values()) and not any(
        way["beyond"] for way in tokens.values()
    )
    return {
        "model": folder.name,
        "layers": arch.num_layers,
        "transformers_bf16": bf16.relative,
        "logits": logits,
        "tokens": tokens,
        "holds": holds,
    }


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL_FOLDER[:LAYERS]")
    parser.add_argument("--tp", type=int, action="append", default=[], help="also split over so many GPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    ways = WAYS | {f"TP {size}": {**GRAPHS, "tensor_parallel_size": size} for size in args.tp}
    results = []
    for given in args.models:
        start = time.perf_counter()
        name, _, layers = given.partition(":")
        folder = with_layers(Path(name), int(layers) if layers else None)
        results.append(measure(folder, ways, torch.device(args.device)))
        print(f"  {'holds' if results[-1]['holds'] else 'BROKEN'}; {time.perf_counter() - start:.0f} s", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"environment": environment(), "models": results}, indent=1) + "\n")
    return 0 if all(result["holds"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
