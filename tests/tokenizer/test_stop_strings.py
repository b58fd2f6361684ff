"""A stop string ends the text at the same place, however the text was cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.tokenizer.stop_strings import StopStrings


def run(stops: tuple[str, ...], deltas: list[str], include: bool = False) -> tuple[str, str | None]:
    finder = StopStrings(stops, include)
    text = ""
    for delta in deltas:
        new, found = finder.feed(delta)
        text += new
        if found is not None:
            return text, found
    return text + finder.flush(), None


def reference(stops: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """Character by character, with no memory but the text itself."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


letters = st.text("ab", max_size=4)


@settings(max_examples=1000, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    deltas=st.lists(letters, max_size=12),
    include=st.booleans(),
)
def test_any_cut_of_a_text_stops_at_the_same_place(stops: tuple[str, ...], deltas: list[str], include: bool) -> None:
    assert run(stops, deltas, include) == reference(stops, "".join(deltas), include)


@settings(max_examples=500, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    deltas=st.lists(letters, max_size=12),
)
def test_only_what_may_begin_a_stop_string_is_held_back(stops: tuple[str, ...], deltas: list[str]) -> None:
    finder = StopStrings(stops)
    seen = out = ""
    for delta in deltas:
        seen += delta
        new, found = finder.feed(delta)
        out += new
        if found is not None:
            return
        held = seen[len(out) :]
        assert seen == out + held
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(seen[-n:]) for stop in stops for n in range(len(held) + 1, len(seen) + 1))


def test_the_match_that_is_complete_first_wins() -> None:
    assert run(("cdef", "de"), ["abcdefg"]) == ("abc", "de")
    assert run(("de", "cde"), ["abcdefg"]) == ("ab", "cde")


def test_a_stop_string_is_kept_if_asked_and_what_follows_is_not() -> None:
    assert run(("END",), ["the E", "ND of it"], include=True) == ("the END", "END")
    assert run(("END",), ["the E", "ND of it"]) == ("the ", "END")


def test_a_beginning_that_comes_to_nothing_is_given_out_at_once() -> None:
    finder = StopStrings(("END",))
    assert finder.feed("x EN") == ("x ", None)
    assert finder.feed("Z") == ("ENZ", None)
    assert finder.flush() == ""


def test_below_min_tokens_a_match_does_not_count_but_may_begin() -> None:
    finder = StopStrings(("aab",))
    assert finder.feed("aab a", active=False) == ("aab ", None)
    assert finder.feed("ab!") == ("", "aab")


@pytest.mark.parametrize("length", [1, 1024])
def test_a_long_repetitive_stop_string_is_found(length: int) -> None:
    stop = "a" * length + "b"
    assert run((stop,), ["a"] * (2 * length) + ["b", "c"]) == ("a" * length, stop)
