"""A radix tree over page-aligned token runs: every page in it is either read by a running request or evictable.

Locks count a node's own holders and its locked children, so that taking and giving a lock stops at the first ancestor
that keeps its state, and ``num_evictable`` is always exact. Only leaves are evicted, page by page from their end, least
recently used first. The heap that orders them holds at most one entry a node: an entry that is out of date when it
comes up is dropped or put back with the node's present time, so eviction never walks the tree.
The idea is SGLang's RadixAttention (https://arxiv.org/abs/2312.07104).
"""

import heapq
from collections import Counter

import numpy as np

from mizzen.kv_cache.page_pool import Int32
from mizzen.kv_cache.prefix_cache import MatchKeys, Node


class RadixTree:
    """``match_keys(a, b)`` gives the number of equal leading tokens of two int32 arrays."""

    def __init__(self, page_size: int, match_keys: MatchKeys) -> None:
        self._page_size = page_size
        self._match_keys = match_keys
        empty = np.empty(0, np.int32)
        self._root = Node(None, b"", empty, empty, 0)
        self._root.locks = 1  # so that no walk goes beyond it, and it is never evicted
        self._clock = 0
        self._next_serial = 1
        self._heap: list[tuple[int, int, Node]] = []  # last_access, serial (ends ties), node
        self.num_pages = 0
        self.num_evictable = 0

    # ---- lookup ----

    def match(self, tokens: Int32, salt: bytes, max_pages: int) -> int:
        node, matched = self._root, 0
        while matched < max_pages:
            child, pages = self._step_down(node, salt, tokens, matched, max_pages)
            matched += pages
            if child is None or pages < child.num_pages:
                break
            node = child
        return matched

    def acquire(self, tokens: Int32, salt: bytes, max_pages: int) -> tuple[Node, Int32]:
        self._clock += 1
        node, matched, found = self._root, 0, []
        while matched < max_pages:
            child, pages = self._step_down(node, salt, tokens, matched, max_pages)
            if child is None:
                break
            if pages < child.num_pages:
                child = self._split(child, pages)
            child.last_access = self._clock
            found.append(child.pages[:pages])
            matched += pages
            node = child
        self._lock(node)
        return node, np.concatenate(found) if found else self._root.pages

    def _step_down(self, node: Node, salt: bytes, tokens: Int32, start: int, max_pages: int) -> tuple[Node | None, int]:
        """The child of ``node`` that goes on with ``tokens`` from page ``start``, and how many of its pages do."""
        size = self._page_size
        child = node.children.get(self._key(node, salt, tokens, start))
        if child is None:
            return None, 0
        pages = min(child.num_pages, max_pages - start)
        if pages > 1:
            first = start * size
            pages = self._match_keys(child.tokens[: pages * size], tokens[first : first + pages * size]) // size
        return child, pages

    def _key(self, node: Node, salt: bytes, tokens: Int32, page: int) -> bytes:
        key = tokens[page * self._page_size : (page + 1) * self._page_size].tobytes()
        # Only the first page tells the namespace. Pages are equally long, so salt + page is unambiguous.
        return salt + key if node is self._root else key

    # ---- insertion ----

    def append(self, node: Node, salt: bytes, tokens: Int32, pages: Int32) -> Node | None:
        assert len(tokens) == len(pages) * self._page_size > 0
        assert node.locks > 0
        if node.locks == 1 and not node.children and node is not self._root:
            self._grow(node, tokens, pages)  # the caller's private leaf: one node a request, not one a page
            return node
        key = self._key(node, salt, tokens, 0)
        if key in node.children:
            return None
        child = self._new_node(node, key, tokens.copy(), pages.copy())
        child.locks = 1  # the lock moves down: node loses a holder and gains a locked child
        child.last_access = self._clock
        self.num_pages += len(pages)
        return child

    def finish(self, node: Node, salt: bytes, tokens: Int32, pages: Int32) -> Int32:
        start, count = 0, len(pages)
        while start < count:
            child, matched = self._step_down(node, salt, tokens, start, count)
            if child is None:
                break
            start += matched
            if matched < child.num_pages:
                if start == count:
                    break  # all there: no need to split
                child = self._split(child, matched)
            self._lock(child)
            self._unlock(node)
            node = child
        if start < count:
            appended = self.append(node, salt, tokens[start * self._page_size :], pages[start:])
            assert appended is not None
            node = appended
        self._clock += 1
        node.last_access = self._clock
        self._unlock(node)
        return pages[:start]

    def _new_node(self, parent: Node, key: bytes, tokens: Int32, pages: Int32) -> Node:
        node = Node(parent, key, tokens, pages, self._next_serial)
        self._next_serial += 1
        parent.children[key] = node
        return node

    def _grow(self, leaf: Node, tokens: Int32, pages: Int32) -> None:
        size, old, new = self._page_size, leaf.num_pages, leaf.num_pages + len(pages)
        if new > len(leaf.pages):
            spare = max(new, 2 * old)
            leaf.pages = _with_room(leaf.pages[:old], spare)
            leaf.tokens = _with_room(leaf.tokens[: old * size], spare * size)
        leaf.pages[old:new] = pages
        leaf.tokens[old * size : new * size] = tokens
        leaf.num_pages = new
        self.num_pages += len(pages)

    def _split(self, node: Node, at: int) -> Node:
        """Puts the first ``at`` pages of ``node`` into a new parent of it and returns that.

        ``node`` keeps its end, so whoever holds it still holds all that it reads.
        """
        size, parent = self._page_size, node.parent
        assert parent is not None
        assert 0 < at < node.num_pages
        upper = self._new_node(parent, node.key, node.tokens[: at * size].copy(), node.pages[:at].copy())
        upper.locks = 1 if node.locks else 0
        upper.last_access = node.last_access
        node.tokens = node.tokens[at * size : node.num_pages * size].copy()
        node.pages = node.pages[at : node.num_pages].copy()
        node.num_pages -= at
        node.parent = upper
        node.key = self._key(node, b"", node.tokens, 0)
        upper.children[node.key] = node
        return upper

    # ---- locks and eviction ----

    def _lock(self, node: Node) -> None:
        node.locks += 1
        while node.locks == 1:
            self.num_evictable -= node.num_pages
            assert node.parent is not None
            node = node.parent
            node.locks += 1

    def _unlock(self, node: Node) -> None:
        node.locks -= 1
        while node.locks == 0:
            self.num_evictable += node.num_pages
            self._queue(node)
            assert node.parent is not None
            node = node.parent
            node.locks -= 1
        assert node.locks > 0

    def _queue(self, node: Node) -> None:
        if not node.queued and not node.children:
            node.queued = True
            heapq.heappush(self._heap, (node.last_access, node.serial, node))

    def evict(self, count: int) -> Int32:
        assert count <= self.num_evictable
        freed, left = [], count
        while left:
            stamp, _, node = self._heap[0]
            if node.locks or node.children:
                heapq.heappop(self._heap)
                node.queued = False  # it is queued again when it is an evictable leaf again
            elif node.last_access != stamp:
                heapq.heapreplace(self._heap, (node.last_access, node.serial, node))
            else:
                taken = min(left, node.num_pages)
                freed.append(node.pages[node.num_pages - taken : node.num_pages].copy())
                node.num_pages -= taken
                left -= taken
                if not node.num_pages:
                    heapq.heappop(self._heap)
                    self._remove(node)
        self.num_evictable -= count
        self.num_pages -= count
        return np.concatenate(freed) if freed else self._root.pages

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        if not parent.locks:
            self._queue(parent)

    # ---- checks ----

    def check(self, holders: list[Node]) -> list[int]:
        held = Counter(map(id, holders))
        queued = {id(node) for _, _, node in self._heap}
        assert len(queued) == len(self._heap), "a node is queued twice"
        pages: list[int] = []
        evictable = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            locked_children = sum(1 for child in node.children.values() if child.locks)
            assert node.locks == held[id(node)] + locked_children + (node is self._root), "a lock was lost"
            for key, child in node.children.items():
                assert child.parent is node
                assert child.key == key
                assert key.endswith(child.tokens[: self._page_size].tobytes())
                assert child.num_pages > 0
                assert child.queued == (id(child) in queued)
                assert child.locks or child.children or child.queued, "an evictable leaf cannot be found"
                evictable += 0 if child.locks else child.num_pages
                pages.extend(child.pages[: child.num_pages].tolist())
                stack.append(child)
        assert evictable == self.num_evictable
        assert len(pages) == self.num_pages
        return pages


def _with_room(values: Int32, size: int) -> Int32:
    grown = np.empty(size, np.int32)
    grown[: len(values)] = values
    return grown
