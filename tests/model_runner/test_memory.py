"""The KV pool's size: what fits, what is refused, and with which setting named."""

from pathlib import Path

import pytest

from mizzen.config.config import CacheConfig
from mizzen.errors import ConfigError
from mizzen.model_runner.memory import MAX_UNEVEN_BYTES, check_even, fit_model_len, kv_page_bytes, num_kv_pages
from mizzen.platform.cpu import cgroup_free_bytes


def cache(fraction: float = 0.9, kv_cache_bytes: int | None = None) -> CacheConfig:
    return CacheConfig(16, "radix", "on-demand", fraction, kv_cache_bytes)


def test_a_page_holds_keys_and_values_of_all_layers() -> None:
    assert kv_page_bytes(num_layers=30, page_size=16, kv_heads=3, head_dim=64, itemsize=4) == 2 * 30 * 16 * 3 * 64 * 4


def test_pages_fill_the_budget_but_for_the_dummy_page() -> None:
    assert num_kv_pages(cache(), page_bytes=100, budget_bytes=1_050, free_bytes=5_000) == 9


def test_a_size_that_was_asked_for_replaces_the_budget() -> None:
    assert num_kv_pages(cache(kv_cache_bytes=2_000), page_bytes=100, budget_bytes=1, free_bytes=5_000) == 19


def test_a_size_over_what_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MIZZEN_KV_CACHE_BYTES is 6000, but only 5000 bytes are free"):
        num_kv_pages(cache(kv_cache_bytes=6_000), page_bytes=100, budget_bytes=1, free_bytes=5_000)


@pytest.mark.parametrize(
    ("config", "setting"), [(cache(0.001), "MIZZEN_MEMORY_FRACTION"), (cache(0.9, 150), "MIZZEN_KV_CACHE_BYTES")]
)
def test_no_room_for_a_page_names_the_setting_to_raise(config: CacheConfig, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"fits no page.*raise {setting}") as caught:
        num_kv_pages(config, page_bytes=100, budget_bytes=150, free_bytes=5_000)
    assert caught.value.setting == setting


def test_the_longest_sequence_is_the_context_or_what_the_pool_holds() -> None:
    assert fit_model_len(None, context_length=4096, num_pages=10, page_size=16) == 160
    assert fit_model_len(None, context_length=100, num_pages=10, page_size=16) == 100
    assert fit_model_len(120, context_length=4096, num_pages=10, page_size=16) == 120


@pytest.mark.parametrize(("wanted", "number"), [(161, "160"), (5000, "4096")])
def test_a_length_that_cannot_be_served_is_refused_with_both_numbers(wanted: int, number: str) -> None:
    with pytest.raises(ConfigError, match=f"{wanted}.*{number}"):
        fit_model_len(wanted, context_length=4096, num_pages=10, page_size=16)


def test_uneven_ranks_are_refused_with_the_numbers() -> None:
    check_even(10 * 2**30, 10 * 2**30 + MAX_UNEVEN_BYTES)
    with pytest.raises(ConfigError, match=f"from {10 * 2**30} to {13 * 2**30} bytes"):
        check_even(10 * 2**30, 13 * 2**30)


def test_a_container_s_memory_limit_counts(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) > 2**60, "no cgroup, no limit"
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert cgroup_free_bytes(tmp_path) > 2**60
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_free_bytes(tmp_path) == 995
