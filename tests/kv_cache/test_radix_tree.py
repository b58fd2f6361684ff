import numpy as np
import pytest

from mizzen.kernels.key_compare import match_length_reference
from mizzen.kv_cache.radix_tree import RadixTree

PAGE_SIZE = 4


class Fixture:
    """A tree and a supply of page numbers; a text stands for its characters' codes, a page each four."""

    def __init__(self) -> None:
        self.compares = 0
        self.tree = RadixTree(PAGE_SIZE, self._match_keys)
        self._next_page = 0

    def _match_keys(self, a: np.ndarray, b: np.ndarray) -> int:
        self.compares += 1
        return match_length_reference(a, b)

    def cache(self, text: str, salt: bytes = b"") -> list[int]:
        """As a request that runs and ends; returns the pages that it read."""
        tokens = _tokens(text)
        total = len(tokens) // PAGE_SIZE
        node, found = self.tree.acquire(tokens, salt, total)
        pages = np.arange(self._next_page, self._next_page + total - len(found), dtype=np.int32)
        self._next_page += len(pages)
        unwanted = self.tree.finish(node, salt, tokens[len(found) * PAGE_SIZE : total * PAGE_SIZE], pages)
        assert not len(unwanted)
        return found.tolist() + pages.tolist()

    def match(self, text: str, salt: bytes = b"") -> int:
        return self.tree.match(_tokens(text), salt, len(text) // PAGE_SIZE)

    def nodes(self) -> int:
        count, stack = 0, [self.tree._root]
        while stack:
            node = stack.pop()
            count += len(node.children)
            stack.extend(node.children.values())
        return count


def _tokens(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], np.int32)


@pytest.fixture
def radix() -> Fixture:
    return Fixture()


def test_a_match_is_a_whole_number_of_pages(radix: Fixture) -> None:
    radix.cache("aaaabbbbcccc")
    assert [radix.match(text) for text in ("", "aaa", "aaaa", "aaaabbb", "aaaabbbb", "aaaabbbbcccx", "xaaa")] == [
        *(0, 0, 1, 1, 2, 2, 0)
    ]


def test_looking_up_changes_nothing(radix: Fixture) -> None:
    radix.cache("aaaabbbbcccc")
    assert radix.match("aaaaxxxx") == 1
    assert radix.nodes() == 1


def test_a_shared_prefix_is_stored_once(radix: Fixture) -> None:
    first = radix.cache("aaaabbbbcccc")
    second = radix.cache("aaaabbbbdddd")
    assert first[:2] == second[:2]
    assert radix.tree.num_pages == 4
    assert radix.nodes() == 3


def test_salts_do_not_see_each_other(radix: Fixture) -> None:
    radix.cache("aaaabbbb", b"one")
    assert radix.match("aaaabbbb", b"one") == 2
    assert radix.match("aaaabbbb", b"two") == radix.match("aaaabbbb") == 0


def test_the_limit_cuts_a_match_short(radix: Fixture) -> None:
    pages = radix.cache("aaaabbbbcccc")
    node, found = radix.tree.acquire(_tokens("aaaabbbbcccc"), b"", 2)
    assert found.tolist() == pages[:2]
    radix.tree.check([node])


def test_a_request_that_grows_keeps_one_node(radix: Fixture) -> None:
    node, _ = radix.tree.acquire(_tokens("aaaa"), b"", 0)
    for page, letter in enumerate("abcdefgh"):
        grown = radix.tree.append(node, b"", _tokens(letter * PAGE_SIZE), np.array([page], np.int32))
        assert grown is not None
        node = grown
    assert radix.nodes() == 1
    assert radix.match("aaaabbbbccccddddeeeeffffgggghhhh") == 8


def test_a_leaf_that_two_requests_hold_is_not_extended_in_place(radix: Fixture) -> None:
    radix.cache("aaaa")
    one, _ = radix.tree.acquire(_tokens("aaaa"), b"", 1)
    two, _ = radix.tree.acquire(_tokens("aaaa"), b"", 1)
    assert one is two
    child = radix.tree.append(one, b"", _tokens("bbbb"), np.array([9], np.int32))
    assert child is not None
    assert child is not one
    radix.tree.check([child, two])


def test_content_that_is_cached_already_is_refused(radix: Fixture) -> None:
    one, _ = radix.tree.acquire(_tokens("aaaa"), b"", 0)
    two, _ = radix.tree.acquire(_tokens("aaaa"), b"", 0)
    assert radix.tree.append(one, b"", _tokens("aaaa"), np.array([0], np.int32)) is not None
    assert radix.tree.append(two, b"", _tokens("aaaabbbb"), np.array([1, 2], np.int32)) is None
    unwanted = radix.tree.finish(two, b"", _tokens("aaaabbbb"), np.array([1, 2], np.int32))
    assert unwanted.tolist() == [1]  # the page behind it is new, and stays
    assert radix.match("aaaabbbb") == 2


def test_the_least_recently_used_leaf_goes_first_from_its_end(radix: Fixture) -> None:
    old = radix.cache("aaaabbbbcccc")
    new = radix.cache("xxxxyyyy")
    assert radix.tree.evict(2).tolist() == old[1:]
    assert radix.match("aaaabbbbcccc") == 1
    assert radix.tree.evict(2).tolist() == [old[0], new[1]]


def test_a_hit_makes_a_prefix_young_again(radix: Fixture) -> None:
    first = radix.cache("aaaabbbb")
    second = radix.cache("xxxxyyyy")
    assert radix.cache("aaaabbbb") == first
    assert sorted(radix.tree.evict(2).tolist()) == second


def test_a_prefix_is_as_young_as_what_is_behind_it(radix: Fixture) -> None:
    trunk = radix.cache("aaaabbbb")
    holders = [radix.tree.acquire(_tokens("aaaabbbb"), b"", 2)[0] for _ in range(2)]
    other = radix.cache("xxxx")
    radix.tree.finish(holders[0], b"", _tokens(""), np.empty(0, np.int32))
    radix.tree.finish(holders[1], b"", _tokens("cccc"), np.array([77], np.int32))
    radix.tree.check([])
    assert [int(radix.tree.evict(1)[0]) for _ in range(4)] == [*other, 77, *reversed(trunk)]


def test_a_locked_prefix_is_never_evicted(radix: Fixture) -> None:
    radix.cache("aaaabbbbcccc")
    node, _ = radix.tree.acquire(_tokens("aaaabbbb"), b"", 2)
    assert radix.tree.num_evictable == 1
    radix.tree.evict(1)
    assert radix.match("aaaabbbb") == 2
    with pytest.raises(AssertionError):
        radix.tree.evict(1)
    radix.tree.check([node])


def test_evicting_everything_leaves_nothing(radix: Fixture) -> None:
    for text in ("aaaabbbb", "aaaacccc", "ddddeeee", "aaaabbbbffff"):
        radix.cache(text)
    assert len(radix.tree.evict(radix.tree.num_evictable)) == 6
    assert radix.tree.num_pages == radix.nodes() == 0
    radix.tree.check([])


def test_evicting_one_page_does_not_walk_the_tree(radix: Fixture) -> None:
    """Counted, not timed: the entries that one eviction looks at do not grow with the tree."""
    for number in range(400):
        radix.cache(f"{number:04d}aaaa")
    touched = []

    class Watched(list):  # type: ignore[type-arg]
        def __getitem__(self, index: object) -> object:
            touched.append(index)
            return super().__getitem__(index)  # type: ignore[index]

    radix.tree._heap = Watched(radix.tree._heap)
    radix.tree.evict(1)
    assert len(touched) == 1


def test_a_long_used_leaf_has_one_entry_in_the_heap(radix: Fixture) -> None:
    for _ in range(100):
        radix.cache("aaaabbbb")
    assert len(radix.tree._heap) == 1


def test_splitting_a_running_requests_leaf_leaves_it_whole(radix: Fixture) -> None:
    node, _ = radix.tree.acquire(_tokens("aaaa"), b"", 0)
    running = radix.tree.append(node, b"", _tokens("aaaabbbbcccc"), np.array([0, 1, 2], np.int32))
    assert running is not None
    other, found = radix.tree.acquire(_tokens("aaaabbbb"), b"", 2)
    assert found.tolist() == [0, 1]
    radix.tree.check([running, other])
    grown = radix.tree.append(running, b"", _tokens("dddd"), np.array([3], np.int32))
    assert grown is running
    assert radix.match("aaaabbbbccccdddd") == 4


def test_long_keys_cost_one_compare_a_node(radix: Fixture) -> None:
    radix.cache("abcd" * 1000)
    radix.compares = 0
    assert radix.match("abcd" * 1000) == 1000
    assert radix.compares == 1
