"""One rank of test_tensor_parallel: RANK SIZE MODEL SCRATCH DTYPE TIMEOUT_S. Writes SCRATCH/rank-SIZE-RANK.pt: logits
of some steps, then what a runner samples for every kind of row, and the bytes that plain rows' ranks gather."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from mizzen.attention.base import KVTensors
from mizzen.attention.registry import make_attention
from mizzen.distributed.group import ProcessGroup, make_group
from mizzen.model_runner.runner import EagerExecutor, ModelRunner
from mizzen.models.config import parse_architecture
from mizzen.models.decoder import Decoder
from mizzen.models.loader import load_model
from mizzen.platform.cpu import CpuPlatform
from mizzen.scheduler.output import SampledTokens
from model_runner.every_kind import KINDS_OF_259, PAGE, PLAIN, Requests, make_state
from page_harness import Harness

STEPS = 8


class RecordingGroup:
    """A group that counts what this rank gives to gathers."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.gathered: list[int] = []  # bytes of each call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.gathered.append(tensor.nbytes)
        return self._group.all_gather(tensor, dim)


def run_steps(model: Decoder, kinds: tuple[str, ...]) -> list[SampledTokens]:
    """A step of prompts and decode steps of a request a kind, through the runner."""
    platform = CpuPlatform(1)
    shape = (16 * len(kinds), PAGE, model.num_kv_heads, model.head_dim, model.dtype, platform.device)
    attention = make_attention(
        "sdpa", KVTensors.allocate(model.num_layers, *shape), num_heads=model.num_heads, device=platform.device
    )
    state, requests = make_state(platform, len(kinds)), Requests(kinds, KINDS_OF_259)
    runner = ModelRunner(state, EagerExecutor(model, attention, state), platform.make_stream())
    handles = [runner.enqueue(requests.next_step()) for _ in range(STEPS)]
    results = [handle.result(30) for handle in handles]
    runner.close()
    return results


def lists(step: SampledTokens) -> dict[str, Any]:
    return {name: value.tolist() for name, value in msgspec.structs.asdict(step).items() if value is not None}


def main(rank: int, size: int, folder: Path, scratch: Path, dtype: str, timeout_s: float) -> None:
    device = torch.device("cpu")
    made = make_group(rank, size, scratch / f"store-{size}", device=device, timeout_s=timeout_s)
    group = RecordingGroup(made)
    assert (group.rank, group.size) == (rank, size)
    assert group.min_int(10 - rank) == 11 - size
    model = load_model(
        parse_architecture(folder),
        folder,
        load_format="auto",
        dtype=dtype,
        device=device,
        group=group,  # type: ignore[arg-type]  # it has what a group has
        progress=lambda fraction, detail: None,
    )
    assert isinstance(model, Decoder)
    harness = Harness(model, num_sequences=2, max_tokens=64)
    logits = [harness.step([(0, list(range(3, 33)))], every=True), harness.step([(1, list(range(40, 60)))], every=True)]
    logits += [harness.step([(0, [7 + step]), (1, [9])]) for step in range(3)]
    steps = [lists(step) for step in run_steps(model, tuple(KINDS_OF_259))]
    group.gathered.clear()
    run_steps(model, PLAIN)
    result = {"logits": torch.cat(logits), "steps": steps, "gathered": group.gathered}
    torch.save(result, scratch / f"rank-{size}-{rank}.pt")
    group.barrier()
    group.close()


if __name__ == "__main__":
    rank, size, folder, scratch, dtype, timeout_s = sys.argv[1:]
    main(int(rank), int(size), Path(folder), Path(scratch), dtype, float(timeout_s))
