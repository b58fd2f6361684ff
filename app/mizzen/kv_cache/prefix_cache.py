"""The seam between the KV cache and what remembers prefixes: a tree of pages, or nothing.

A request holds a lock on one node, the end of the cached prefix that it reads; no page above a locked node is evicted.
Keys are page-aligned int32 token arrays; ``salt`` separates namespaces.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from mizzen.kv_cache.page_pool import Int32

MatchKeys = Callable[[Int32, Int32], int]


class Node:
    """A run of pages below ``parent``. ``tokens`` and ``pages`` may have spare room behind ``num_pages`` pages."""

    __slots__ = (
        "children",
        "key",
        "last_access",
        "locks",
        "num_pages",
        "pages",
        "parent",
        "queued",
        "serial",
        "tokens",
    )

    def __init__(self, parent: "Node | None", key: bytes, tokens: Int32, pages: Int32, serial: int) -> None:
        self.parent = parent
        self.key = key  # its entry in parent.children
        self.tokens = tokens  # [>= num_pages * page_size]
        self.pages = pages  # [>= num_pages]
        self.num_pages = len(pages)
        self.children: dict[bytes, Node] = {}
        self.locks = 0  # requests whose prefix ends here, plus children with locks
        self.last_access = 0
        self.queued = False  # has its entry in the eviction heap
        self.serial = serial


class PrefixCache(Protocol):
    num_pages: int  # cached
    num_evictable: int  # of these, in no running request's prefix

    def match(self, tokens: Int32, salt: bytes, max_pages: int) -> int:
        """The number of leading pages of ``tokens`` that are cached. Changes nothing."""

    def acquire(self, tokens: Int32, salt: bytes, max_pages: int) -> tuple[Node, Int32]:
        """Locks the longest cached prefix of at most ``max_pages`` pages: its node and its page numbers."""

    def append(self, node: Node, salt: bytes, tokens: Int32, pages: Int32) -> Node | None:
        """Caches ``pages`` (at least one) behind the caller's ``node`` and moves its lock to their end.

        None, and nothing changes, if the first of these pages is cached already under another number.
        """

    def finish(self, node: Node, salt: bytes, tokens: Int32, pages: Int32) -> Int32:
        """Caches those of ``pages`` that are not yet and gives up the lock on ``node``. Returns the unwanted pages."""

    def evict(self, count: int) -> Int32:
        """Forgets ``count`` (at most ``num_evictable``) pages, least recently used first; returns their numbers."""

    def check(self, holders: list[Node]) -> list[int]:
        """Asserts every invariant, given one node for each lock held; returns all cached pages. Walks everything."""


class NoPrefixCache:
    """Remembers nothing: every page belongs to its request until that ends."""

    num_pages = 0
    num_evictable = 0

    def __init__(self) -> None:
        empty = np.empty(0, np.int32)
        self._empty = empty
        self._root = Node(None, b"", empty, empty, 0)

    def match(self, tokens: Int32, salt: bytes, max_pages: int) -> int:
        return 0

    def acquire(self, tokens: Int32, salt: bytes, max_pages: int) -> tuple[Node, Int32]:
        return self._root, self._empty

    def append(self, node: Node, salt: bytes, tokens: Int32, pages: Int32) -> Node | None:
        return None

    def finish(self, node: Node, salt: bytes, tokens: Int32, pages: Int32) -> Int32:
        return pages

    def evict(self, count: int) -> Int32:
        assert count == 0
        return self._empty

    def check(self, holders: list[Node]) -> list[int]:
        assert all(node is self._root for node in holders)
        return []
