"""Attention backends by name, imported only when chosen.

A name stands for what runs prefill rows and what runs decode rows; a pair of names takes the former of the first and
the latter of the second. Where both are the same thing, one object takes whole batches.
"""

import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch

from mizzen.attention.base import AttentionBackend, KVTensors
from mizzen.attention.pair import PairBackend
from mizzen.errors import ConfigError

SETTING = "MIZZEN_ATTENTION_BACKEND"
BACKENDS = {  # name: what makes it for prefill rows, for decode rows
    "flash_attn": ("mizzen.attention.flash_attn:make_flash_attn",) * 2,
    "flashinfer": ("mizzen.attention.flashinfer:make_prefill", "mizzen.attention.flashinfer:make_decode"),
    "sdpa": ("mizzen.attention.sdpa:SdpaBackend",) * 2,
    "triton": ("mizzen.attention.triton:TritonBackend",) * 2,
}
PACKAGES = {"flashinfer": "flashinfer", "triton": "triton"}  # that a backend cannot do without


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def choose(
    name: str,
    device_type: str,
    capability: tuple[int, int] | None,
    installed: Callable[[str], bool] = is_installed,
) -> tuple[str, str]:
    """The backends of prefill and of decode rows. ``name``: a backend, two with a comma between, or "auto";
    ``capability``: the GPU's, such as (9, 0). Raises ConfigError for a name that does not exist or is not installed."""
    if name == "auto":
        name = _default(device_type, capability, installed)
    prefill, _, decode = name.partition(",")
    pair = prefill, decode or prefill
    for backend in pair:
        if backend not in BACKENDS:
            raise ConfigError(
                f"attention backend '{backend}' does not exist; allowed are auto, {', '.join(sorted(BACKENDS))}, "
                "or two backends, prefill's and decode's, with a comma between",
                setting=SETTING,
            )
        package = PACKAGES.get(backend)
        if package is not None and not installed(package):
            raise ConfigError(
                f"attention backend '{backend}' needs the Python package '{package}', which is not installed",
                setting=SETTING,
            )
    return pair


def chosen_for(name: str, device: torch.device) -> tuple[str, str]:
    """``choose`` for a device of this machine."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return choose(name, device.type, capability)


def _default(device_type: str, capability: tuple[int, int] | None, installed: Callable[[str], bool]) -> str:
    """Our kernels let mixed steps run in CUDA graphs, and win on sm90 (docs/performance.md). They use nothing of sm100,
    where TensorRT-LLM's kernels, by way of FlashInfer, do."""
    if device_type == "cpu":
        return "sdpa"
    is_sm100 = capability is not None and capability[0] == 10
    return "flashinfer" if is_sm100 and installed("flashinfer") else "triton"


def make_attention(
    name: str,
    kv: KVTensors,
    *,
    num_heads: int,
    device: torch.device,
    max_rows: int = 256,
    max_tokens: int = 8192,
) -> AttentionBackend:
    """``name``: as ``choose`` takes it; ``num_heads``: this rank's query heads; ``max_rows``, ``max_tokens``: the most
    of a batch. Raises ConfigError for a backend that does not exist, is not installed, or cannot run here."""
    prefill, decode = chosen_for(name, device)

    def make(path: str) -> AttentionBackend:
        module, _, attribute = path.partition(":")
        factory = getattr(importlib.import_module(module), attribute)
        made: AttentionBackend = factory(
            kv, num_heads=num_heads, max_rows=max_rows, max_tokens=max_tokens, device=device
        )
        return made

    for_prefill, for_decode = BACKENDS[prefill][0], BACKENDS[decode][1]
    if for_prefill == for_decode:
        return make(for_prefill)
    return PairBackend(make(for_prefill), make(for_decode))
