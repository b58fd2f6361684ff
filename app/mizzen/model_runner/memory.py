"""How many KV pages fit: settled once, after the weights are loaded, and the same on every rank."""

from mizzen.config.config import CacheConfig
from mizzen.errors import ConfigError

MAX_UNEVEN_BYTES = 2 * 2**30  # between ranks: beyond, another process sits on one of the GPUs


def check_even(smallest_free_bytes: int, largest_free_bytes: int) -> None:
    """The rank with the least memory decides for all: what the others cannot use should not be much."""
    if largest_free_bytes - smallest_free_bytes > MAX_UNEVEN_BYTES:
        raise ConfigError(
            f"the ranks' GPUs have from {smallest_free_bytes} to {largest_free_bytes} bytes free, uneven by over"
            f" {MAX_UNEVEN_BYTES}: end what else uses them, or choose others with CUDA_VISIBLE_DEVICES",
            setting="MIZZEN_TENSOR_PARALLEL_SIZE",
        )


def kv_page_bytes(*, num_layers: int, page_size: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of one page's K and V over all layers of a rank."""
    return 2 * num_layers * page_size * kv_heads * head_dim * itemsize


def num_kv_pages(cache: CacheConfig, *, page_bytes: int, budget_bytes: int, free_bytes: int) -> int:
    """Pages that fit this rank; raises ConfigError if not even two (one more is the dummy page) do.

    ``budget_bytes``: what may be taken by default; ``free_bytes``: what a setting of the size may take.
    """
    setting, now = "MIZZEN_MEMORY_FRACTION", str(cache.memory_fraction)
    if cache.kv_cache_bytes is not None:
        setting, now = "MIZZEN_KV_CACHE_BYTES", str(cache.kv_cache_bytes)
        budget_bytes = cache.kv_cache_bytes
        if budget_bytes > free_bytes:
            raise ConfigError(f"{setting} is {now}, but only {free_bytes} bytes are free", setting=setting)
    pages = budget_bytes // page_bytes - 1
    if pages < 1:
        raise ConfigError(
            f"the KV cache fits no page of {page_bytes} bytes: raise {setting} (now {now};"
            f" {free_bytes} bytes are free)",
            setting=setting,
        )
    return pages


def fit_model_len(wanted: int | None, *, context_length: int, num_pages: int, page_size: int) -> int:
    """The longest sequence served: what was asked for, or the model's context, or what the pool holds."""
    capacity = num_pages * page_size
    if wanted is None:
        return min(context_length, capacity)
    if wanted > context_length:
        raise ConfigError(
            f"MIZZEN_MAX_MODEL_LEN is {wanted}, but the model's context is {context_length}",
            setting="MIZZEN_MAX_MODEL_LEN",
        )
    if wanted > capacity:
        raise ConfigError(
            f"MIZZEN_MAX_MODEL_LEN is {wanted}, but the KV cache holds {capacity} tokens: lower it, or raise"
            " MIZZEN_MEMORY_FRACTION or MIZZEN_KV_CACHE_BYTES",
            setting="MIZZEN_MAX_MODEL_LEN",
        )
    return wanted
