"""One rank of test_tensor_parallel: RANK SIZE MODEL SCRATCH DTYPE TIMEOUT_S. Writes SCRATCH/logits-SIZE-RANK.pt."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mizzen.distributed.group import make_group
from mizzen.models.config import parse_architecture
from mizzen.models.decoder import Decoder
from mizzen.models.loader import load_model
from page_harness import Harness


def main(rank: int, size: int, folder: Path, scratch: Path, dtype: str, timeout_s: float) -> None:
    device = torch.device("cpu")
    group = make_group(rank, size, scratch / f"store-{size}", device=device, timeout_s=timeout_s)
    assert (group.rank, group.size) == (rank, size)
    assert group.min_int(10 - rank) == 11 - size
    model = load_model(
        parse_architecture(folder),
        folder,
        load_format="auto",
        dtype=dtype,
        device=device,
        group=group,
        progress=lambda fraction, detail: None,
    )
    assert isinstance(model, Decoder)
    harness = Harness(model, num_sequences=2, max_tokens=64)
    logits = [harness.step([(0, list(range(3, 33)))], every=True), harness.step([(1, list(range(40, 60)))], every=True)]
    logits += [harness.step([(0, [7 + step]), (1, [9])]) for step in range(3)]
    torch.save(torch.cat(logits), scratch / f"logits-{size}-{rank}.pt")
    group.barrier()
    group.close()


if __name__ == "__main__":
    rank, size, folder, scratch, dtype, timeout_s = sys.argv[1:]
    main(int(rank), int(size), Path(folder), Path(scratch), dtype, float(timeout_s))
