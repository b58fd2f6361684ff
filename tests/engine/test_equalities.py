"""The same request gives the same tokens however the engine gets there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.harness import EngineUnderTest
from tiny import make_tiny_model

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
GREEDY: dict[str, Any] = {"temperature": 0.0}
PAGE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, "qwen3")
    return folder


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[EngineUnderTest]:
    made = EngineUnderTest(folder, **{"page_size": PAGE, **settings})
    try:
        yield made
    finally:
        made.close()


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    import random

    random_ = random.Random(seed)
    return [[random_.randrange(3, 250) for _ in range(length + k)] for k in range(count)]


def reference(folder: Path, asked: list[list[int]], **sampling: Any) -> list[list[int]]:
    """One by one, whole prompts, no cache, no overlap: the plainest way."""
    with engine(folder, prefix_cache="none", overlap_depth=0, max_running_requests=1, max_batch_tokens=512) as plain:
        return [plain.generate([prompt], ignore_eos=True, **sampling)[0] for prompt in asked]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("mixed", [True, False])
def test_chunked_batched_and_overlapped_equals_whole_and_alone(
    model: Path, sampling: dict[str, Any], depth: int, budget: int, mixed: bool
) -> None:
    asked = prompts(6, 20)
    expected = reference(model, asked, **sampling)
    with engine(model, overlap_depth=depth, max_batch_tokens=budget, mixed_batches=mixed) as batched:
        assert batched.generate(asked, ignore_eos=True, **sampling) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_cached_equals_cold(model: Path, sampling: dict[str, Any]) -> None:
    shared = prompts(1, 40)[0]
    asked = [shared + tail for tail in prompts(4, 5, seed=1)]
    expected = reference(model, asked, **sampling)
    with engine(model) as warm:
        assert warm.generate([shared], ignore_eos=True, **sampling) == reference(model, [shared], **sampling)
        for prompt, tokens in zip(asked, expected, strict=True):
            warm.submit(f"again-{len(prompt)}", prompt, sampling={"ignore_eos": True, **sampling})
            warm.run()
            answer = warm.answers[f"again-{len(prompt)}", 0]
            assert answer.token_ids == tokens
            assert answer.ended is not None
            assert answer.ended.cached_tokens >= 40
        # the answer itself is cached too: prompt and answer together are one long prefix
        follow_up = asked[0] + expected[0] + [9]
        warm.submit("turn-2", follow_up, sampling=GREEDY)
        warm.run()
        ended = warm.answers["turn-2", 0].ended
        assert ended is not None
        assert ended.cached_tokens >= len(asked[0] + expected[0]) - 2 * PAGE


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_equals_undisturbed(model: Path, sampling: dict[str, Any], depth: int) -> None:
    asked = prompts(6, 30)
    expected = reference(model, asked, max_tokens=40, **sampling)
    one_page = 2 * 2 * PAGE * 2 * 32 * 4  # K and V, layers, page, KV heads, head_dim, float32
    with engine(model, kv_cache_bytes=one_page * 41, max_model_len=96, overlap_depth=depth) as tight:
        assert tight.generate(asked, ignore_eos=True, max_tokens=40, **sampling) == expected
        assert tight.loop.load().preemptions > 0


def test_full_reservation_never_preempts_and_answers_the_same(model: Path) -> None:
    asked = prompts(6, 30)
    expected = reference(model, asked, max_tokens=40)
    one_page = 2 * 2 * PAGE * 2 * 32 * 4
    with engine(model, kv_cache_bytes=one_page * 41, max_model_len=96, kv_allocation="reserve") as tight:
        assert tight.generate(asked, ignore_eos=True, max_tokens=40, **GREEDY) == expected
        assert tight.loop.load().preemptions == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix", "longest-output"])
def test_the_policy_changes_the_order_not_the_tokens(model: Path, policy: str) -> None:
    asked = prompts(8, 12)
    expected = reference(model, asked)
    with engine(model, scheduling_policy=policy, max_running_requests=2) as ordered:
        assert ordered.generate(asked, ignore_eos=True, **GREEDY) == expected


def test_two_choices_with_a_seed_equal_two_requests(model: Path) -> None:
    prompt = prompts(1, 15)[0]
    sampling = {"temperature": 1.0, "ignore_eos": True}
    with engine(model) as both:
        both.submit("n2", prompt, index=0, sampling={**sampling, "seed": 5})
        both.submit("n2", prompt, index=1, sampling={**sampling, "seed": 6})
        both.run()
    with engine(model) as single:
        single.submit("a", prompt, sampling={**sampling, "seed": 5})
        single.run()
        single.submit("b", prompt, sampling={**sampling, "seed": 6})
        single.run()
    first, second = both.answers["n2", 0].token_ids, both.answers["n2", 1].token_ids
    assert first == single.answers["a", 0].token_ids
    assert second == single.answers["b", 0].token_ids
    assert first != second


def test_requests_that_arrive_over_time_answer_as_if_alone(model: Path) -> None:
    asked = prompts(12, 10)
    expected = reference(model, asked, **SAMPLED)
    with engine(model, max_batch_tokens=16) as busy:

        def arrive(turn: int) -> None:
            if turn % 3 == 0 and turn // 3 < len(asked):
                busy.submit(f"r{turn // 3}", asked[turn // 3], sampling={"ignore_eos": True, **SAMPLED})

        for turn in range(3 * len(asked)):
            arrive(turn)
            busy.step()
        busy.run()
    assert [busy.answers[f"r{k}", 0].token_ids for k in range(len(asked))] == expected
