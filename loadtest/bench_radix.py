"""The radix tree's match and insert at 4k and 32k tokens, and evicting half as many, in a tree of 100,000 nodes.

    python loadtest/bench_radix.py [--json FILE]

Each operation runs with the C++ key compare and with its numpy twin. The key has 16 nodes on its way (a conversation
that branched at each turn), then a run of its own.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mizzen.kernels.key_compare import MatchKeys, load_match_keys, match_length_reference
from mizzen.kv_cache.page_pool import Int32
from mizzen.kv_cache.radix_tree import RadixTree

NODES = 100_000
PAGE_SIZE = 16
BRANCHES = 16
REPEATS = 100
VOCABULARY = 50_000

Figures = dict[str, float]


class RadixBench:
    def __init__(self, match_keys: MatchKeys) -> None:
        self._random = np.random.default_rng(0)
        self._next_page = 0
        self.tree = RadixTree(PAGE_SIZE, match_keys)
        self._trunks = [self.tokens(2 * PAGE_SIZE) for _ in range(NODES // 50)]
        nodes = 0
        while nodes < NODES:
            nodes += self._converse()

    def _converse(self) -> int:
        """A conversation of 4 turns on one of the common beginnings; each turn is answered twice: 8 nodes."""
        key = self._trunks[int(self._random.integers(len(self._trunks)))]
        for _ in range(4):
            self.insert(np.concatenate((key, self.tokens(PAGE_SIZE))))
            key = np.concatenate((key, self.tokens(PAGE_SIZE * int(self._random.integers(1, 5)))))
        self.insert(key)
        return 8

    def tokens(self, count: int) -> Int32:
        return self._random.integers(0, VOCABULARY, count).astype(np.int32)

    def pages(self, count: int) -> Int32:
        self._next_page += count
        return np.arange(self._next_page - count, self._next_page, dtype=np.int32)

    def insert(self, key: Int32) -> None:
        """As a request does that runs and ends: lock the known prefix, cache the rest, let go."""
        total = len(key) // PAGE_SIZE
        node, found = self.tree.acquire(key, b"", total)
        self.tree.finish(node, b"", key[len(found) * PAGE_SIZE :], self.pages(total - len(found)))

    def branching_key(self, count: int) -> Int32:
        """A cached key of ``count`` tokens whose way has BRANCHES nodes."""
        key = self.tokens(count)
        for branch in range(1, BRANCHES):
            cut = count * branch // BRANCHES // PAGE_SIZE * PAGE_SIZE
            self.insert(np.concatenate((key[:cut], self.tokens(PAGE_SIZE))))
        self.insert(key)
        return key

    def measure(self, count: int) -> dict[str, Figures]:
        total = count // PAGE_SIZE
        key = self.branching_key(count)
        assert self.tree.match(key, b"", total) == total
        match = [_timed(lambda: self.tree.match(key, b"", total)) for _ in range(REPEATS)]
        insert, evict = [], []
        for _ in range(REPEATS):
            fresh = np.concatenate((key[: count // 2], self.tokens(count // 2)))
            insert.append(_timed(lambda fresh=fresh: self.insert(fresh)))
        for _ in range(REPEATS):
            cached = self.tree.num_pages
            evict.append(_timed(lambda: self.tree.evict(total // 2)))
            while self.tree.num_pages < cached:
                self._converse()
        return {"match": _figures(match), "insert": _figures(insert), "evict": _figures(evict)}


def _timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1e6


def _figures(costs: list[float]) -> Figures:
    return {"p50_us": round(float(np.percentile(costs, 50)), 2), "p99_us": round(float(np.percentile(costs, 99)), 2)}


def run() -> dict[str, dict[str, Figures]]:
    """Microseconds by compare and length, then by operation."""
    compiled = load_match_keys(Path(tempfile.gettempdir()) / "mizzen-bench-kernels")
    compares = {"numpy": match_length_reference}
    if compiled is not match_length_reference:
        compares = {"c++": compiled, **compares}
    result = {}
    for name, compare in compares.items():
        bench = RadixBench(compare)
        for count in (4_096, 32_768):
            result[f"{name} {count // 1024}k"] = bench.measure(count)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run()
    print(f"{f'radix tree, {NODES:,} nodes':28}{'operation':>10}{'p50 us':>10}{'p99 us':>10}")
    for name, operations in result.items():
        for operation, figures in operations.items():
            print(f"{name:28}{operation:>10}{figures['p50_us']:10.1f}{figures['p99_us']:10.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
