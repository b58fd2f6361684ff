"""Deltas add up to the text of the whole, whatever the tokens are."""

import json
from pathlib import Path

import pytest
import tokenizer_samples as samples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mizzen.tokenizer.hf import HFTokenizer
from mizzen.tokenizer.incremental import WindowDetokenizer, incremental_detokenizer

TEXTS = [*samples.CORPUS, " leading", "  two leading", "trailing ", "", " ", "👩‍👩‍👧‍👦" * 3, "a\n\n\tb", "▁", "<0x41>"]


def _loaded(tokenizer: Tokenizer) -> tuple[HFTokenizer, Tokenizer]:
    """Hypothesis runs a test many times on one fixture, so these are made once, at import."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    reference = Tokenizer.from_str(tokenizer.to_str())
    return HFTokenizer(tokenizer, decoder, special_tokens={}, chat_templates={}), reference


BYTE_LEVEL, BYTE_LEVEL_REFERENCE = _loaded(samples.byte_level())
BYTE_FALLBACK = {strip: _loaded(samples.byte_fallback(strip)) for strip in (0, 1, 2)}
OTHERS = {"word": _loaded(samples.word_level()), "piece": _loaded(samples.word_piece())}


def stream(tokenizer: HFTokenizer, token_ids: list[int], skip_special_tokens: bool) -> list[str]:
    detokenizer = incremental_detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


def runs_of_bytes_are_text(token_ids: list[int], skip: bool) -> bool:
    """Where they are not, `tokenizers` turns the whole run into one U+FFFD a byte, its whole characters too."""
    run = bytearray()
    for token in [*token_ids, -1]:
        if 3 <= token < 259:
            run.append(token - 3)
        elif not (skip and token in (0, 1, 2)):  # skipped tokens do not end a run
            try:
                run.decode()
            except UnicodeDecodeError:
                return False
            run.clear()
    return True


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, 510), max_size=40), skip=st.booleans())
def test_byte_level_deltas_add_up_to_the_reference_decode(token_ids: list[int], skip: bool) -> None:
    expected = BYTE_LEVEL_REFERENCE.decode(token_ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_LEVEL, token_ids, skip)) == expected == BYTE_LEVEL.decode(token_ids, skip)


byte_fallback_ids = st.lists(
    st.one_of(
        st.integers(0, 320),
        st.just([BYTE_FALLBACK[0][1].token_to_id("▁")]),
        st.sampled_from(["é", "漢", "👩", "ह"]).map(lambda text: [3 + byte for byte in text.encode()]),
    ),
    max_size=30,
).map(lambda items: [token for item in items for token in (item if isinstance(item, list) else [item])])


@settings(max_examples=300, deadline=None)
@given(token_ids=byte_fallback_ids, skip=st.booleans(), strip=st.sampled_from([0, 1, 2]))
def test_byte_fallback_deltas_add_up_to_the_reference_decode(token_ids: list[int], skip: bool, strip: int) -> None:
    tokenizer, reference = BYTE_FALLBACK[strip]
    streamed = "".join(stream(tokenizer, token_ids, skip))
    assert streamed == tokenizer.decode(token_ids, skip)
    if runs_of_bytes_are_text(token_ids, skip):
        assert streamed == reference.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(st.integers(0, 9), max_size=20), skip=st.booleans(), kind=st.sampled_from(["word", "piece"]))
def test_deltas_of_other_decoders_add_up_too(token_ids: list[int], skip: bool, kind: str) -> None:
    tokenizer, reference = OTHERS[kind]
    assert tokenizer.vocabulary is None
    assert "".join(stream(tokenizer, token_ids, skip)) == reference.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:12]))
def test_no_delta_of_a_text_splits_a_character(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, *(tokenizer for tokenizer, _ in BYTE_FALLBACK.values())):
        deltas = stream(tokenizer, tokenizer.encode(text, add_special_tokens=False), True)
        assert not any("�" in delta for delta in deltas)
        assert deltas[-1] == ""


def test_half_a_character_at_the_end_is_one_replacement(byte_level: HFTokenizer) -> None:
    token_ids = byte_level.encode("ok👩")
    assert stream(byte_level, token_ids[:-1], True)[-1] == "�"
    assert "".join(stream(byte_level, token_ids[:-1], True)) == "ok�"


def test_whole_characters_are_not_lost_when_a_byte_run_is_cut(byte_fallback: HFTokenizer) -> None:
    token_ids = [3 + byte for byte in "ह👩".encode()][:-1]
    assert "".join(stream(byte_fallback, token_ids, True)) == "ह�"


def test_invalid_bytes_do_not_hold_a_stream_back(byte_level: HFTokenizer) -> None:
    """A decoder that waits for a valid character would wait for ever, at a growing cost."""
    continuation = byte_level.encode("ह", add_special_tokens=False)[-1]
    detokenizer = incremental_detokenizer(byte_level, True)
    assert [detokenizer.push(continuation) for _ in range(100)] == ["�"] * 100


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped(byte_fallback: HFTokenizer) -> None:
    token_ids = byte_fallback.encode("the the", add_special_tokens=False)
    assert stream(byte_fallback, token_ids, True) == ["the", " the", ""]
    assert stream(byte_fallback, [1, *token_ids], False) == ["<s>", " the", " the", ""]
    assert stream(byte_fallback, [1, *token_ids], True) == ["", "the", " the", ""]


def test_a_window_remembers_only_the_last_tokens() -> None:
    tokenizer, _ = OTHERS["word"]
    detokenizer = WindowDetokenizer(tokenizer, True)
    for _ in range(1000):
        detokenizer.push(2)
    assert len(detokenizer._read) + len(detokenizer._new) <= 2


def test_smollm2_deltas_add_up(smollm2: Path) -> None:
    tokenizer = HFTokenizer.from_folder(smollm2)
    reference = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))

    @settings(max_examples=300, deadline=None)
    @given(token_ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
    def check(token_ids: list[int], skip: bool) -> None:
        expected = reference.decode(token_ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, token_ids, skip)) == expected

    check()
