"""Random lives of the radix tree next to a model of it that is a plain dict."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import strategies
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from mizzen.kernels.key_compare import match_length_reference
from mizzen.kv_cache.prefix_cache import Node
from mizzen.kv_cache.radix_tree import RadixTree
from random_lives import CountedMachine, run_steps

STEPS_IN_SHORT_RUN = 4_000
STEPS_IN_LONG_RUN = 100_000

Prefix = tuple[bytes, tuple[int, ...]]  # salt and tokens


@dataclass
class Holder:
    node: Node
    salt: bytes
    tokens: list[int]  # of the pages that it reads through the tree


class RadixMachine(CountedMachine):
    """The model maps each cached prefix that ends with a page to that page."""

    @initialize(page_size=strategies.sampled_from([1, 2, 3]))
    def start(self, page_size: int) -> None:
        self.size = page_size
        self.tree = RadixTree(page_size, match_length_reference)
        self.model: dict[Prefix, int] = {}
        self.holders: list[Holder] = []
        self.next_page = 0

    keys = strategies.lists(strategies.integers(0, 1), min_size=0, max_size=12)
    salts = strategies.sampled_from([b"", b"", b"s"])

    def prefix(self, salt: bytes, tokens: list[int], pages: int) -> Prefix:
        return salt, tuple(tokens[: pages * self.size])

    def cached(self, salt: bytes, tokens: list[int]) -> int:
        count = 0
        while count < len(tokens) // self.size and self.prefix(salt, tokens, count + 1) in self.model:
            count += 1
        return count

    def new_pages(self, count: int) -> np.ndarray:
        self.next_page += count
        return np.arange(self.next_page - count, self.next_page, dtype=np.int32)

    @rule(salt=salts, tokens=keys)
    def match(self, salt: bytes, tokens: list[int]) -> None:
        count = self.tree.match(np.array(tokens, np.int32), salt, len(tokens) // self.size)
        assert count == self.cached(salt, tokens)

    @rule(salt=salts, tokens=keys, limit=strategies.integers(0, 12))
    def acquire(self, salt: bytes, tokens: list[int], limit: int) -> None:
        limit = min(limit, len(tokens) // self.size)
        node, pages = self.tree.acquire(np.array(tokens, np.int32), salt, limit)
        count = min(limit, self.cached(salt, tokens))
        assert pages.tolist() == [self.model[self.prefix(salt, tokens, page + 1)] for page in range(count)]
        self.holders.append(Holder(node, salt, tokens[: count * self.size]))

    @precondition(lambda self: self.holders)
    @rule(data=strategies.data(), more=keys)
    def append(self, data: strategies.DataObject, more: list[int]) -> None:
        holder = data.draw(strategies.sampled_from(self.holders))
        count = len(more) // self.size
        if not count:
            return
        more = more[: count * self.size]
        pages = self.new_pages(count)
        known = self.cached(holder.salt, holder.tokens + more)
        have = len(holder.tokens) // self.size
        node = self.tree.append(holder.node, holder.salt, np.array(more, np.int32), pages)
        assert (node is None) == (known > have), "only what is cached already is refused"
        if node is not None:
            holder.node = node
            holder.tokens = holder.tokens + more
            for page in range(count):
                self.model[self.prefix(holder.salt, holder.tokens, have + page + 1)] = int(pages[page])

    @precondition(lambda self: self.holders)
    @rule(data=strategies.data(), more=keys)
    def finish(self, data: strategies.DataObject, more: list[int]) -> None:
        holder = data.draw(strategies.sampled_from(self.holders))
        self.holders.remove(holder)
        count, have = len(more) // self.size, len(holder.tokens) // self.size
        tokens = holder.tokens + more[: count * self.size]
        pages = self.new_pages(count)
        known = self.cached(holder.salt, tokens) - have
        unwanted = self.tree.finish(holder.node, holder.salt, np.array(tokens[have * self.size :], np.int32), pages)
        assert unwanted.tolist() == pages[:known].tolist()
        for page in range(known, count):
            self.model[self.prefix(holder.salt, tokens, have + page + 1)] = int(pages[page])

    def protected(self) -> set[Prefix]:
        return {
            self.prefix(holder.salt, holder.tokens, count)
            for holder in self.holders
            for count in range(1, len(holder.tokens) // self.size + 1)
        }

    @rule(share=strategies.floats(0, 1))
    def evict(self, share: float) -> None:
        count = int(self.tree.num_evictable * share)
        evicted = set(self.tree.evict(count).tolist())
        assert len(evicted) == count
        gone = {prefix for prefix, page in self.model.items() if page in evicted}
        assert len(gone) == count
        assert not gone & self.protected(), "a page was evicted that a request reads"
        for prefix in gone:
            del self.model[prefix]
        for salt, tokens in self.model:
            assert len(tokens) == self.size or (salt, tokens[: -self.size]) in self.model, "a page lost its prefix"

    @invariant()
    def the_tree_agrees_with_the_model(self) -> None:
        type(self).steps_run += 1
        if not hasattr(self, "tree"):
            return
        pages = self.tree.check([holder.node for holder in self.holders])
        assert sorted(pages) == sorted(self.model.values())
        assert self.tree.num_pages - self.tree.num_evictable >= len(self.protected())


def test_the_tree_equals_a_dict_in_a_short_random_life() -> None:
    run_steps(RadixMachine, STEPS_IN_SHORT_RUN, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tree_equals_a_dict_in_100_000_random_steps() -> None:
    run_steps(RadixMachine, STEPS_IN_LONG_RUN, derandomize=False)
