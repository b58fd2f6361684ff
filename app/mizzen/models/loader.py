"""Fills a model with weights: each rank reads its own slices, tensor by tensor, and never holds a whole checkpoint."""

import hashlib
from collections.abc import Collection
from pathlib import Path

import torch

from mizzen.distributed.group import ProcessGroup
from mizzen.errors import ConfigError
from mizzen.kernels.dispatch import kernels_for
from mizzen.layers.base import LayerContext, WeightSlice
from mizzen.models.config import ModelArchitecture, Progress
from mizzen.models.decoder import Decoder
from mizzen.models.null import NullModel
from mizzen.models.sources import WeightSource, open_weights

Model = Decoder | NullModel


def resolve_dtype(name: str, arch: ModelArchitecture, device: torch.device) -> torch.dtype:
    """ "auto" is float32 on the CPU, whose matrix kernels it suits best, and the checkpoint's dtype elsewhere."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else arch.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_model(
    arch: ModelArchitecture,
    weights: Path | str,
    *,
    load_format: str,
    dtype: str,
    device: torch.device,
    group: ProcessGroup,
    progress: Progress,
    kernels_off: Collection[str] = (),
) -> Model:
    """``weights``: ModelInfo.weights; ``load_format`` and ``dtype`` as in ModelConfigSource. Returns the model on
    ``device``, without gradients. Raises ConfigError naming the file or tensor that is missing, unexpected or wrong."""
    if load_format == "null":
        return NullModel(arch, group.size, device)
    kernels = kernels_for(device.type, frozenset(kernels_off))
    progress(0.0, "allocating weights")
    model = Decoder(arch, LayerContext(group, kernels, resolve_dtype(dtype, arch, device), device))
    if load_format == "dummy":
        _fill_random(list(model.weights()), progress)
    else:
        with open_weights(Path(weights), arch, load_format) as source:
            _fill(list(model.weights()), source, arch, progress)
    return model.eval()


def _fill(slices: list[WeightSlice], source: WeightSource, arch: ModelArchitecture, progress: Progress) -> None:
    present, used = source.names(), {part.name for part in slices}
    if missing := [part.name for part in slices if part.name not in present]:
        raise _refuse(f"{source.path} lacks {_some(missing)}")
    if unexpected := sorted(name for name in present - used if not _ignorable(name, arch)):
        raise _refuse(f"{source.path} has tensors that {arch.name} does not: {_some(unexpected)}")
    total = sum(part.target.nbytes for part in slices)
    done = 0
    for part in slices:
        shape = source.shape(part.name)
        if shape != part.shape:
            raise _refuse(f"{source.path}: {part.name} has shape {list(shape)} instead of {list(part.shape)}")
        progress(done / total, part.name)
        part.target.copy_(source.read(part.name, part.dim, part.start, part.stop))
        done += part.target.nbytes
    progress(1.0, "weights loaded")


def _ignorable(name: str, arch: ModelArchitecture) -> bool:
    """What checkpoints hold besides weights, or twice."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and arch.tie_word_embeddings)


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _refuse(message: str) -> ConfigError:
    return ConfigError(message, setting="MIZZEN_MODEL")


def _fill_random(slices: list[WeightSlice], progress: Progress) -> None:
    """The same model on any number of ranks: a whole tensor is drawn, seeded by its name, and a slice of it kept."""
    for index, part in enumerate(slices):
        progress(index / len(slices), part.name)
        if part.name.endswith("norm.weight"):
            part.target.fill_(1.0)
            continue
        # 1 / sqrt(inputs) keeps activations near 1, so that no dtype overflows.
        std = 0.1 if len(part.shape) == 1 else part.shape[-1] ** -0.5
        generator = torch.Generator(part.target.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(part.name.encode()).digest()[:7], "big"))
        drawn = torch.randn(part.shape, generator=generator, dtype=part.target.dtype, device=part.target.device)
        part.target.copy_(drawn.narrow(part.dim, part.start, part.stop - part.start).mul_(std))
    progress(1.0, "random weights made")
