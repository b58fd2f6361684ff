from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from mizzen.kernels import key_compare
from mizzen.kernels.key_compare import MatchKeys, load_match_keys, match_length_reference

lists = strategies.lists(strategies.integers(0, 1), max_size=150)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> MatchKeys:
    match_keys = load_match_keys(tmp_path_factory.mktemp("kernels"))
    if match_keys is match_length_reference:
        pytest.skip("no C++ compiler here")
    return match_keys


def _count(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@settings(deadline=None)
@given(start=lists, a=lists, b=lists)
def test_both_compares_count_equal_leading_tokens(
    compiled: MatchKeys, start: list[int], a: list[int], b: list[int]
) -> None:
    left, right = start + a, start + b
    arrays = np.array(left, np.int32), np.array(right, np.int32)
    assert match_length_reference(*arrays) == compiled(*arrays) == _count(left, right)


def test_slices_are_compared_from_their_own_start(compiled: MatchKeys) -> None:
    tokens = np.arange(1000, dtype=np.int32)
    for match_keys in (compiled, match_length_reference):
        assert match_keys(tokens[300:500], tokens[300:]) == 200
        assert match_keys(tokens[300:500], tokens) == 0


def test_keys_of_another_type_are_refused(compiled: MatchKeys) -> None:
    with pytest.raises(ValueError, match="int32"):
        compiled(np.zeros(3, np.int64), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="contiguous"):
        compiled(np.zeros(6, np.int32)[::2], np.zeros(3, np.int32))


def test_the_library_is_compiled_once(compiled: MatchKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_match_keys(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(key_compare.subprocess, "run", fail)
    assert load_match_keys(tmp_path) is not match_length_reference


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "false"])
def test_without_a_working_compiler_the_twin_serves(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert load_match_keys(tmp_path) is match_length_reference


def test_an_image_that_has_it_compiled_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = key_compare._compiler()
    monkeypatch.setattr(key_compare, "PREBUILT", tmp_path / "prebuilt")
    key_compare._compile(compiler, key_compare.PREBUILT / key_compare._library_name())
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert load_match_keys(tmp_path / "cache") is not match_length_reference
    assert not (tmp_path / "cache").exists()
