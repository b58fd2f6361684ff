"""Which pages each slot reads: first those in the prefix cache (locked), then those that are the slot's own.

A page whose content is cached already under another number stays the slot's own, and so do all behind it until the
request ends: thus a request locks no page that it does not read, and one that runs alone always has the whole pool.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from mizzen.kv_cache.cache import KVCache
from mizzen.kv_cache.page_pool import Int32
from mizzen.kv_cache.prefix_cache import Node

NEVER = np.iinfo(np.int32).max


class PageTables:
    """The host's page tables. Arrays are indexed by slot; what changes is recorded for the device's copy."""

    def __init__(self, kv_cache: KVCache, num_slots: int, max_model_len: int) -> None:
        self._kv_cache = kv_cache
        self._page_size = kv_cache.page_size
        self.table = np.zeros((num_slots, kv_cache.pages_for(max_model_len)), np.int32)  # [slots, pages]
        self.num_pages = np.zeros(num_slots, np.int32)
        self.num_cached = np.zeros(num_slots, np.int32)  # leading pages that are in the prefix cache
        self.capacity = np.zeros(num_slots, np.int32)  # tokens that fit into the slot's pages
        self.next_register = np.full(num_slots, NEVER, np.int32)  # with so many tokens, a page is ready to be cached
        self._nodes: list[Node | None] = [None] * num_slots
        self._salts = [b""] * num_slots
        self._changes: list[tuple[npt.NDArray[np.integer[Any]], Int32, Int32]] = []  # slots, columns, pages

    # ---- one slot's life ----

    def start(self, slot: int, tokens: Int32, salt: bytes, num_tokens: int, spare: int) -> int | None:
        """Locks the cached prefix of ``tokens``, all but the last token at most. Returns its length in tokens.

        None, and nothing changes, if room for ``num_tokens`` would leave fewer than ``spare`` pages available.
        """
        assert self._nodes[slot] is None
        prefixes = self._kv_cache.prefixes
        needed = self._kv_cache.pages_for(num_tokens)
        # Locking comes first: the prefix itself is among what could be evicted.
        node, pages = prefixes.acquire(tokens, salt, (len(tokens) - 1) // self._page_size)
        count = len(pages)
        if needed - count + spare > self._kv_cache.num_available:
            prefixes.finish(node, salt, _NOTHING, _NOTHING)
            return None
        self._nodes[slot], self._salts[slot] = node, salt
        self.num_cached[slot] = count
        self.next_register[slot] = (count + 1) * self._page_size
        self._extend(slot, 0, pages)
        return count * self._page_size

    def missing(self, slot: int, num_tokens: int) -> int:
        """Pages that the slot lacks to hold ``num_tokens``."""
        return max(0, self._kv_cache.pages_for(num_tokens) - int(self.num_pages[slot]))

    def grow(self, slot: int, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` in all. The caller has checked that the pages are available."""
        count = self.missing(slot, num_tokens)
        if count:
            self._extend(slot, int(self.num_pages[slot]), self._kv_cache.allocate(count))

    def grow_each(self, slots: npt.NDArray[np.integer[Any]]) -> None:
        """One more page for each of ``slots`` (no slot twice)."""
        pages = self._kv_cache.allocate(len(slots))
        columns = self.num_pages[slots]
        self.table[slots, columns] = pages
        self.num_pages[slots] = columns + 1
        self.capacity[slots] += self._page_size
        self._changes.append((slots, columns, pages))

    def register(self, slot: int, tokens: Int32, num_tokens: int) -> None:
        """Caches the slot's full pages. ``tokens`` are the slot's; the first ``num_tokens`` are known and computed."""
        first, full = int(self.num_cached[slot]), num_tokens // self._page_size
        if full <= first or self.next_register[slot] == NEVER:
            return
        node = self._nodes[slot]
        assert node is not None
        run = tokens[first * self._page_size : full * self._page_size]
        node = self._kv_cache.prefixes.append(node, self._salts[slot], run, self.table[slot, first:full])
        if node is None:
            self.next_register[slot] = NEVER
        else:
            self._nodes[slot] = node
            self.num_cached[slot] = full
            self.next_register[slot] = (full + 1) * self._page_size

    def release(self, slot: int, tokens: Int32, num_tokens: int) -> None:
        """Gives up all pages: full pages of the first ``num_tokens`` tokens stay cached, the rest is free."""
        node = self._nodes[slot]
        assert node is not None
        first, count = int(self.num_cached[slot]), int(self.num_pages[slot])
        full = max(first, num_tokens // self._page_size)
        pages = self.table[slot]
        run = tokens[first * self._page_size : full * self._page_size]
        self._kv_cache.free(self._kv_cache.prefixes.finish(node, self._salts[slot], run, pages[first:full].copy()))
        self._kv_cache.free(pages[full:count])
        self._nodes[slot] = None
        self.num_pages[slot] = self.num_cached[slot] = self.capacity[slot] = 0
        self.next_register[slot] = NEVER

    def _extend(self, slot: int, column: int, pages: Int32) -> None:
        end = column + len(pages)
        self.table[slot, column:end] = pages
        self.num_pages[slot] = end
        self.capacity[slot] = end * self._page_size
        if len(pages):
            columns = np.arange(column, end, dtype=np.int32)
            self._changes.append((np.full(len(pages), slot, np.int32), columns, pages))

    # ---- the device's copy, checks ----

    def take_changes(self) -> tuple[Int32, Int32, Int32]:
        """Slots, columns and pages of all entries written since the last call, each [P]."""
        changes, self._changes = self._changes, []
        if len(changes) == 1:
            slots, columns, pages = changes[0]
        elif changes:
            slots, columns, pages = (np.concatenate(parts) for parts in zip(*changes, strict=True))
        else:
            return _NOTHING, _NOTHING, _NOTHING
        return slots.astype(np.int32, copy=False), columns, pages

    def check(self) -> None:
        """Asserts every invariant of slots, prefix cache and pool."""
        owned: list[int] = []
        holders = []
        for slot, node in enumerate(self._nodes):
            count, cached = int(self.num_pages[slot]), int(self.num_cached[slot])
            assert self.capacity[slot] == count * self._page_size
            if node is None:
                assert count == cached == 0
                continue
            assert cached <= count
            holders.append(node)
            owned += self.table[slot, cached:count].tolist()
            path: list[int] = []
            while node is not None:
                path = node.pages[: node.num_pages].tolist() + path
                node = node.parent
            assert path == self.table[slot, :cached].tolist(), "a slot reads pages that it does not lock"
        self._kv_cache.check(owned, self._kv_cache.prefixes.check(holders))


_NOTHING = np.empty(0, np.int32)
