"""Where a stop string ends a text does not depend on how the text was cut into deltas.

The match that is complete first wins (of those that end together, the longest), as if characters came one by one.
Held back is the longest end of the text that may begin a stop string, and nothing else.
"""


class StopStrings:
    """Looks for stop strings in one choice's text."""

    __slots__ = ("_first", "_held", "_include", "_stops")

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        self._stops = stops
        self._first = frozenset(stop[0] for stop in stops)
        self._include = include_in_output
        self._held = ""

    def feed(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that was found, if any: the text then ends there.

        ``active`` False: no stop string may end within ``text`` (the choice is below min_tokens), but one that ends
        later may begin in it.
        """
        if not self._held and self._first.isdisjoint(text):
            return text, None  # most text
        held = len(self._held)
        window = self._held + text
        if active and (found := self._find(window, held)) is not None:
            start, end, stop = found
            self._held = ""
            return window[: end if self._include else start], stop
        cut = self._hold_from(window)
        self._held = window[cut:]
        return window[:cut], None

    def flush(self) -> str:
        """What was held back: the text is over, and it began no stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str, held: int) -> tuple[int, int, str] | None:
        """The match that ends first, after the ``held`` characters that were searched before."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, held - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end, stop)
        return best

    def _hold_from(self, window: str) -> int:
        """Where the longest end of ``window`` that is a proper beginning of a stop string starts.

        Each candidate that fails is text that is given out, so the cost over a stream is linear in its length.
        """
        cut = len(window)
        for stop in self._stops:
            first = stop[0]
            start = window.find(first, max(0, len(window) - len(stop) + 1), cut)
            while start >= 0:
                if stop.startswith(window[start:]):
                    cut = start
                    break
                start = window.find(first, start + 1, cut)
        return cut
