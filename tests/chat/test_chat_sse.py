import pytest

from mizzen.chat.sse import events

STREAM = (
    b": hi\n\ndata: one\r\n\r\nevent: x\ndata:two\ndata: lines\rid: 3\r\r"
    b"data:  \xe2\x80\xa8 \xc3\xa9\n\n\n\ndata: cut off"
)


def test_events_end_at_empty_lines_only() -> None:
    assert list(events([STREAM])) == ["one", "two\nlines", " \u2028 é"]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_it_does_not_matter_where_the_network_cuts(size: int) -> None:
    chunks = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert list(events(chunks)) == list(events([STREAM]))


def test_an_event_is_given_out_as_soon_as_its_empty_line_is_there() -> None:
    def chunks():  # type: ignore[no-untyped-def]
        yield b"data: now\r\n\r"
        pytest.fail("it waited for more")

    assert next(events(chunks())) == "now"
