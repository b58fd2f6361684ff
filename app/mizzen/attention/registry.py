"""Attention backends by name, imported only when chosen."""

import importlib

import torch

from mizzen.attention.base import AttentionBackend, KVTensors
from mizzen.errors import ConfigError

BACKENDS = {"sdpa": "mizzen.attention.sdpa:SdpaBackend", "triton": "mizzen.attention.triton:TritonBackend"}


def make_attention(
    name: str,
    kv: KVTensors,
    *,
    num_heads: int,
    device: torch.device,
    max_rows: int = 256,
    max_tokens: int = 8192,
) -> AttentionBackend:
    """``name``: a key of BACKENDS, or "auto", which chooses by device; ``num_heads``: this rank's query heads;
    ``max_rows``, ``max_tokens``: the most of a batch. Raises ConfigError for a name that does not exist."""
    chosen = {"cpu": "sdpa", "cuda": "triton"}[device.type] if name == "auto" else name
    if chosen not in BACKENDS:
        raise ConfigError(
            f"attention backend '{name}' does not exist; allowed are auto, {', '.join(sorted(BACKENDS))}",
            setting="MIZZEN_ATTENTION_BACKEND",
        )
    module, _, attribute = BACKENDS[chosen].partition(":")
    backend = getattr(importlib.import_module(module), attribute)
    made: AttentionBackend = backend(kv, num_heads=num_heads, max_rows=max_rows, max_tokens=max_tokens, device=device)
    return made
