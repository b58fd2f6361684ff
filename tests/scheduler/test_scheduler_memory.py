"""Who gets pages and in which order: allocation, preemption, admission, policies."""

import pytest
from fake_device import Simulation, without_eos


def test_preemption_takes_the_last_and_keeps_its_tokens() -> None:
    simulation = Simulation(num_pages=16, page_size=2, prefix_cache="none", max_batch_tokens=64)
    handles = [without_eos(simulation, [index % 2] * 8, 20) for index in range(3)]
    simulation.run(depth=1)
    assert simulation.scheduler.load().preemptions > 0
    assert [simulation.ended[handle].completion_tokens for handle in handles] == [20] * 3
    assert next(iter(simulation.ended)) == handles[0], "the first one was never held up"
    resumed = [start for output in simulation.outputs for start in output.started if len(start.token_ids) > 8]
    assert resumed
    assert all(start.num_prompt_tokens == 8 for start in resumed)
    assert handles[0] not in {start.handle for start in resumed}
    simulation.assert_answers()


@pytest.mark.parametrize("head_start", range(1, 5))
def test_the_first_in_policy_order_has_a_row_in_every_step(head_start: int) -> None:
    simulation = Simulation(
        num_pages=16, page_size=1, max_model_len=16, max_batch_tokens=2, policy="priority", prefix_cache="none"
    )
    without_eos(simulation, [0, 1], 14, priority=1)
    for _ in range(head_start):
        simulation.step()
    urgent = without_eos(simulation, [1] * 9, 3, priority=0)
    simulation.run()
    begin = next(i for i, output in enumerate(simulation.outputs) if any(s.handle == urgent for s in output.started))
    slot = next(start.slot for start in simulation.outputs[begin].started)
    scheduled = 0
    for output in simulation.outputs[begin:]:
        assert slot in output.slots
        scheduled += int(output.num_scheduled[output.slots == slot][0])
        if scheduled == 9 + 3 - 1:
            break
    assert simulation.scheduler.load().preemptions > 0


def test_a_preempted_request_comes_back_before_those_that_wait() -> None:
    simulation = Simulation(num_pages=16, page_size=2, prefix_cache="none", max_batch_tokens=64)
    for index in range(8):
        without_eos(simulation, [index % 2] * 6, 20)
    simulation.run(depth=1)
    assert simulation.scheduler.load().preemptions > 0
    assert list(simulation.ended) == sorted(simulation.ended)


def test_a_request_as_large_as_the_pool_runs() -> None:
    for prefix_cache in ("radix", "none"):
        for page_size in (1, 2, 4):
            simulation = Simulation(
                num_pages=32 // page_size, page_size=page_size, max_model_len=32, prefix_cache=prefix_cache
            )
            for _ in range(3):
                without_eos(simulation, [0, 1] * 8, 16)
            simulation.run(depth=1)
            assert [end.completion_tokens for end in simulation.ended.values()] == [16] * 3
            simulation.assert_answers()


def test_a_prompt_as_large_as_the_pool_is_admitted() -> None:
    simulation = Simulation(num_pages=16, page_size=2, max_model_len=32)
    for _ in range(2):
        without_eos(simulation, [0] * 31, 1)
    simulation.run(depth=1)
    assert [end.reason for end in simulation.ended.values()] == ["length"] * 2


def test_a_request_that_cannot_fit_is_refused_at_once() -> None:
    simulation = Simulation(max_model_len=32)
    with pytest.raises(AssertionError):
        simulation.add([0] * 30, 3)


def test_reservation_never_preempts() -> None:
    simulation = Simulation(num_pages=16, page_size=2, allocation="reserve", max_batch_tokens=64)
    for index in range(6):
        without_eos(simulation, [index % 2] * 6, 12)
    simulation.run(depth=1)
    assert simulation.scheduler.load().preemptions == 0
    assert len(simulation.ended) == 6
    simulation.assert_answers()


def test_admission_leaves_room_for_those_that_run() -> None:
    simulation = Simulation(num_pages=16, page_size=2, max_batch_tokens=64, prefix_cache="none")
    without_eos(simulation, [0] * 16, 2)
    without_eos(simulation, [1] * 16, 2)  # eight pages are left, but one must stay free
    output = simulation.schedule()
    assert output is not None
    assert output.num_rows == 1


# ---- policies ----


def _first_scheduled(policy: str, requests: list[dict[str, object]]) -> list[int]:
    simulation = Simulation(policy=policy, max_running_requests=1, max_batch_tokens=64)
    without_eos(simulation, [1, 1, 1, 1, 0, 0], 2)
    simulation.run()
    for request in requests:
        without_eos(simulation, **request)  # type: ignore[arg-type]
    simulation.run()
    return [start.handle for output in simulation.outputs for start in output.started][1:]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", [1, 2, 3, 4]),
        ("priority", [3, 1, 4, 2]),
        ("longest-prefix", [4, 2, 1, 3]),
        ("longest-output", [2, 4, 1, 3]),
    ],
)
def test_policies_order_the_waiting_requests(policy: str, order: list[int]) -> None:
    requests = [
        {"prompt": [0, 1, 0, 1, 0], "max_tokens": 2, "priority": 1},
        {"prompt": [1, 1, 0, 1, 0], "max_tokens": 5, "priority": 2},
        {"prompt": [0, 0, 0, 1, 0], "max_tokens": 1, "priority": 0},
        {"prompt": [1, 1, 1, 1, 0], "max_tokens": 3, "priority": 1},
    ]
    assert _first_scheduled(policy, requests) == order


def test_the_oldest_is_not_overtaken_for_ever() -> None:
    simulation = Simulation(policy="longest-prefix", max_running_requests=1)
    cached = [1, 1, 1, 1, 0]
    without_eos(simulation, cached, 1)
    simulation.run()
    unlucky = without_eos(simulation, [0, 1, 0, 1, 0], 1)
    for _ in range(300):
        for _ in range(2):
            without_eos(simulation, cached, 1)
        simulation.step()
        if unlucky in simulation.ended:
            break
    assert unlucky in simulation.ended


def test_a_blocked_head_is_not_matched_again_until_something_changes() -> None:
    simulation = Simulation(num_pages=16, page_size=2, max_batch_tokens=64)
    without_eos(simulation, [0] * 12, 16)
    simulation.step()
    without_eos(simulation, [1] * 30, 2)
    calls = []
    acquire = simulation.kv_cache.prefixes.acquire
    simulation.kv_cache.prefixes.acquire = lambda *args: calls.append(args) or acquire(*args)  # type: ignore[method-assign]
    for _ in range(6):
        simulation.step()
    assert len(calls) == 1
    simulation.run()
    assert len(simulation.ended) == 2


def test_the_load_says_what_the_first_waiting_request_lacks() -> None:
    slots = Simulation(num_pages=32, max_running_requests=1)
    for _ in range(2):
        without_eos(slots, [0, 1], 4)
    slots.step()
    assert (slots.scheduler.load().waiting, slots.scheduler.load().waiting_for) == (1, "slots")
    pages = Simulation(num_pages=16, page_size=2, allocation="reserve", max_batch_tokens=64)
    for _ in range(2):
        without_eos(pages, [0, 1], 24)
    pages.step()
    assert (pages.scheduler.load().waiting, pages.scheduler.load().waiting_for) == (1, "kv_pages")
    tokens = Simulation(num_pages=32, max_batch_tokens=4)
    for _ in range(2):
        without_eos(tokens, [0, 1, 0, 1], 4)
    tokens.step()
    assert (tokens.scheduler.load().waiting, tokens.scheduler.load().waiting_for) == (1, "batch_tokens")


def test_the_load_tells_preempted_requests_from_those_that_have_never_run() -> None:
    simulation = Simulation(num_pages=16, page_size=2, prefix_cache="none", max_batch_tokens=64)
    for index in range(3):
        without_eos(simulation, [index % 2] * 8, 20)
    while not simulation.scheduler.load().preemptions:
        simulation.step()
    load = simulation.scheduler.load()
    assert load.waiting_preempted == load.waiting > 0
