"""How far our logits are from the truth: transformers in float32, on the same random weights, teacher-forced.

    python -m loadtest.gpu.truth MODEL_FOLDER [--layers 4] [--json FILE]

Our error, and that of transformers in bfloat16, as ||logits - truth|| / ||truth||; the ratio should be at most 1.2.
Ours is measured on whole prompts (prefill), on prompts in chunks, and token by token (decode kernel).
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadtest.offline import environment
from mizzen.attention.base import Batch, KVTensors
from mizzen.attention.registry import make_attention
from mizzen.distributed.group import SingleGroup
from mizzen.models.config import parse_architecture
from mizzen.models.decoder import Decoder
from mizzen.models.loader import load_model

DEVICE = torch.device("cuda")
PAGE = 64
TOKENS, PROMPTS = 384, 4


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


def reference(folder: Path, model: Decoder, dtype: torch.dtype, prompts: Tensor) -> Tensor:
    """transformers' logits [prompts, tokens, vocab] in float32, on our weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).to(DEVICE).eval()
    parameters = dict(theirs.named_parameters())
    for part in model.weights():
        if part.name in parameters:
            parameters[part.name].data.copy_(part.target)
    with torch.no_grad():
        return torch.stack([theirs(prompt[None]).logits[0].float() for prompt in prompts])


def ours(model: Decoder, prompts: Tensor, chunk: int) -> Tensor:
    """Logits of one prompt after the other, in steps of ``chunk`` tokens through pages."""
    pages = -(-TOKENS // PAGE)
    kv = KVTensors.allocate(model.num_layers, pages, PAGE, model.num_kv_heads, model.head_dim, model.dtype, DEVICE)
    attention = make_attention("auto", kv, num_heads=model.num_heads, device=DEVICE)
    table = torch.randperm(pages, device=DEVICE).to(torch.int32)[None]
    out = []
    for prompt in prompts:
        for start in range(0, TOKENS, chunk):
            positions = torch.arange(start, min(start + chunk, TOKENS), device=DEVICE)
            count = len(positions)
            batch = Batch(
                token_ids=prompt[positions],
                positions=positions,
                kv_slots=table[0, positions // PAGE].long() * PAGE + positions % PAGE,
                page_table=table,
                row_slots=torch.zeros(1, dtype=torch.int32, device=DEVICE),
                seq_lens=torch.tensor([start + count], dtype=torch.int32, device=DEVICE),
                query_start=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
                sample_tokens=positions,
                num_decode_rows=int(count == 1),
                seq_lens_host=[start + count],
                query_start_host=[0, count],
            )
            attention.plan(batch)
            out.append(model.logits(model(batch, attention)).float())
    return torch.cat(out).view(len(prompts), TOKENS, -1)


def error(logits: Tensor, truth: Tensor) -> float:
    return float((logits - truth).norm() / truth.norm())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = with_layers(args.model, args.layers)
    arch = parse_architecture(folder)
    model = load_model(
        arch,
        folder,
        load_format="dummy",
        dtype="bfloat16",
        device=DEVICE,
        group=SingleGroup(),
        progress=lambda *_: None,
    )
    assert isinstance(model, Decoder)
    prompts = torch.randint(0, 10_000, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    truth = reference(folder, model, torch.float32, prompts)
    theirs = error(reference(folder, model, torch.bfloat16, prompts), truth)
    result: dict[str, Any] = {"model": args.model.name, "layers": arch.num_layers, "transformers_bf16": theirs}
    print(f"{args.model.name}, {arch.num_layers} layers: transformers bf16 {theirs:.5f}")
    for name, chunk in (("whole", TOKENS), ("chunks of 100", 100), ("decode", 1)):
        value = error(ours(model, prompts, chunk), truth)
        result[name] = {"error": value, "ratio": value / theirs}
        print(f"  ours, {name}: {value:.5f}, ratio {value / theirs:.3f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
