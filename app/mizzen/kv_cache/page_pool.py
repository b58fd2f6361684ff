"""The free pages. A page that is not here is owned by one request or cached by the radix tree."""

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class PagePool:
    """A stack of free page numbers: what was freed last is handed out first, on every rank alike."""

    def __init__(self, num_pages: int) -> None:
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    def take(self, count: int) -> Int32:
        """``count`` pages, [count]. The caller has checked that there are as many."""
        assert 0 <= count <= self.num_free
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count].copy()

    def put(self, pages: Int32) -> None:
        end = self.num_free + len(pages)
        assert end <= len(self._stack), "a page was freed twice"
        self._stack[self.num_free : end] = pages
        self.num_free = end

    def free_pages(self) -> Int32:
        """A copy of the free page numbers, for checks."""
        return self._stack[: self.num_free].copy()
