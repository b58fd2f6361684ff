"""Every page is free, owned by one request, or cached: never two at once.

Cached pages that no running request reads are as good as free: ``allocate`` evicts them when it must.
"""

from typing import Literal

from mizzen.kv_cache.page_pool import Int32, PagePool
from mizzen.kv_cache.prefix_cache import MatchKeys, NoPrefixCache, PrefixCache
from mizzen.kv_cache.radix_tree import RadixTree


class KVCache:
    """The pool's bookkeeping; the tensors are the runner's.

    ``allocation``: "on-demand" gives a request its pages as it grows, "reserve" all that it may ever need at admission.
    ``match_keys(a, b)`` gives the number of equal leading tokens of two int32 arrays.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_cache: Literal["radix", "none"],
        allocation: Literal["on-demand", "reserve"],
        match_keys: MatchKeys,
    ) -> None:
        assert num_pages > 0
        assert page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self.allocation = allocation
        self.prefixes: PrefixCache = RadixTree(page_size, match_keys) if prefix_cache == "radix" else NoPrefixCache()
        self._pool = PagePool(num_pages)

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` could give now."""
        return self._pool.num_free + self.prefixes.num_evictable

    @property
    def num_cached(self) -> int:
        """Pages that are only cached: evictable."""
        return self.prefixes.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> Int32:
        """``count`` (at most ``num_available``) pages, [count], now the caller's."""
        missing = count - self._pool.num_free
        if missing > 0:
            self._pool.put(self.prefixes.evict(missing))
        return self._pool.take(count)

    def free(self, pages: Int32) -> None:
        self._pool.put(pages)

    def check(self, owned: list[int], cached: list[int]) -> None:
        """Asserts that each page is in exactly one of ``owned``, ``cached`` and the pool."""
        pages = sorted(self._pool.free_pages().tolist() + owned + cached)
        assert pages == list(range(self.num_pages)), "pages are not conserved"
