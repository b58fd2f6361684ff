"""Server-sent events from bytes, by the standard's rules: an event ends at an empty line, and at nothing else.

https://html.spec.whatwg.org/multipage/server-sent-events.html. Lines end with CR, LF or CRLF only (str.splitlines
would also cut JSON at U+2028 or U+0085), wherever the network cut the bytes.
"""

import re
from collections.abc import Iterable, Iterator

_LINE_END = re.compile(rb"\r\n|\n|\r")


def events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of each event; other fields, comments and an event that the end of the stream cut off are dropped."""
    data: list[str] = []
    for line in _lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" ").decode("utf-8", "replace"))


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    after_cr = False  # a CR was the last byte: an LF that follows belongs to it
    for chunk in chunks:
        if after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            after_cr = False
        after_cr = after_cr or chunk.endswith(b"\r")
        *whole, rest = _LINE_END.split(rest + chunk)
        yield from whole
