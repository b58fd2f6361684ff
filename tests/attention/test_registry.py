"""Which backend a name means, on which device, with what installed."""

import pytest
import torch

from mizzen.attention.base import GraphSupport, KVTensors
from mizzen.attention.flash_attn import find_version, make_flash_attn
from mizzen.attention.pair import PairBackend
from mizzen.attention.registry import BACKENDS, choose, make_attention
from mizzen.attention.sdpa import SdpaBackend
from mizzen.errors import ConfigError

CPU = torch.device("cpu")
FLASH_ATTN_4, FLASH_ATTN_3, FLASH_ATTN_2 = "flash_attn.cute", "flash_attn_interface", "flash_attn.flash_attn_interface"


def kv(page_size: int = 16) -> KVTensors:
    return KVTensors.allocate(1, 1, page_size, 1, 64, torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "device", "capability", "installed", "expected"),
    [
        ("auto", "cpu", None, set(), ("sdpa", "sdpa")),
        ("auto", "cuda", (8, 0), {"triton", "flashinfer"}, ("triton", "triton")),
        ("auto", "cuda", (8, 9), {"triton", "flashinfer"}, ("triton", "triton")),
        ("auto", "cuda", (9, 0), {"triton", "flashinfer"}, ("triton", "triton")),
        ("auto", "cuda", (10, 0), {"triton", "flashinfer"}, ("flashinfer", "flashinfer")),
        ("auto", "cuda", (10, 3), {"triton", "flashinfer"}, ("flashinfer", "flashinfer")),
        ("auto", "cuda", (10, 0), {"triton"}, ("triton", "triton")),
        ("auto", "cuda", (12, 0), {"triton", "flashinfer"}, ("triton", "triton")),
        ("sdpa", "cuda", (9, 0), set(), ("sdpa", "sdpa")),
        ("flashinfer", "cuda", (9, 0), {"flashinfer"}, ("flashinfer", "flashinfer")),
        ("flash_attn", "cuda", (9, 0), set(), ("flash_attn", "flash_attn")),
        ("flashinfer,triton", "cuda", (9, 0), {"triton", "flashinfer"}, ("flashinfer", "triton")),
        ("sdpa,triton", "cuda", (8, 0), {"triton"}, ("sdpa", "triton")),
    ],
)
def test_a_name_means_prefill_and_decode_by_device_and_what_is_installed(
    name: str, device: str, capability: tuple[int, int] | None, installed: set[str], expected: tuple[str, str]
) -> None:
    assert choose(name, device, capability, installed.__contains__) == expected


@pytest.mark.parametrize("name", ["flash", "sdpa,flash", "flash,sdpa", "auto,sdpa", "sdpa,auto"])
def test_an_unknown_backend_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="auto, " + ", ".join(sorted(BACKENDS))) as caught:
        make_attention(name, kv(), num_heads=1, device=CPU)
    assert caught.value.setting == "MIZZEN_ATTENTION_BACKEND"


@pytest.mark.parametrize(
    ("name", "missing"),
    [("flashinfer", "flashinfer"), ("triton", "triton"), ("sdpa,flashinfer", "flashinfer"), ("auto", "triton")],
)
def test_a_backend_that_is_not_installed_is_refused_by_its_package(name: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"package '{missing}'") as caught:
        choose(name, "cuda", (9, 0), lambda package: package != missing)
    assert caught.value.setting == "MIZZEN_ATTENTION_BACKEND"


def test_flash_attn_is_refused_where_there_is_no_gpu() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA GPU") as caught:
        make_flash_attn(kv(), num_heads=1, max_rows=1, max_tokens=1, device=CPU)
    assert caught.value.setting == "MIZZEN_ATTENTION_BACKEND"


@pytest.mark.parametrize(
    ("capability", "installed", "version"),
    [
        ((9, 0), {FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4}, 3),
        ((9, 0), {FLASH_ATTN_2, FLASH_ATTN_4}, 4),
        ((9, 0), {FLASH_ATTN_2}, 2),
        ((10, 0), {FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4}, 4),
        ((8, 0), {FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4}, 2),
        ((12, 0), {FLASH_ATTN_2, FLASH_ATTN_4}, 2),
    ],
)
def test_the_version_of_flash_attention_fits_the_gpu(
    capability: tuple[int, int], installed: set[str], version: int
) -> None:
    assert find_version(capability, installed.__contains__) == version


def test_without_flash_attention_it_is_said_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"compute capability 8\.9: install flash-attn, or choose") as caught:
        find_version((8, 9), {FLASH_ATTN_4}.__contains__)
    assert caught.value.setting == "MIZZEN_ATTENTION_BACKEND"
    with pytest.raises(ConfigError, match=r"install flash-attn-3.* or flash-attn-4 or flash-attn, or"):
        find_version((9, 0), lambda _: False)


def test_a_backend_named_twice_is_one_object() -> None:
    assert type(make_attention("sdpa,sdpa", kv(), num_heads=1, device=CPU)) is SdpaBackend


def test_a_pair_has_decode_graphs_as_far_as_its_decode_backend_has() -> None:
    class Fake(SdpaBackend):
        def __init__(self, support: GraphSupport) -> None:
            self.kv = shared
            self.graph_support = support

    shared = kv()
    for decode, pair in (
        (GraphSupport.ALL, GraphSupport.DECODE),
        (GraphSupport.DECODE, GraphSupport.DECODE),
        (GraphSupport.NONE, GraphSupport.NONE),
    ):
        for prefill in GraphSupport:
            assert PairBackend(Fake(prefill), Fake(decode)).graph_support == pair
