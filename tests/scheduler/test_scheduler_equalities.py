"""Whatever the settings, every request gets the answer that it would get alone."""

import itertools
import random

import pytest
from fake_device import Simulation


def _workload(simulation: Simulation, *, requests: int, seed: int = 0) -> None:
    random_ = random.Random(seed)
    shared = [random_.randrange(2) for _ in range(11)]
    for _ in range(requests):
        prompt = shared[: random_.randrange(12)] + [random_.randrange(2) for _ in range(random_.randrange(1, 6))]
        simulation.add(prompt, random_.randrange(1, 15), priority=random_.randrange(3))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
@pytest.mark.parametrize("allocation", ["on-demand", "reserve"])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix", "longest-output"])
@pytest.mark.parametrize("prefill_steps", [0, 1, 64])
def test_answers_do_not_depend_on_settings(
    depth: int, prefix_cache: str, allocation: str, policy: str, prefill_steps: int
) -> None:
    for num_pages, page_size, budget in itertools.product((32, 40), (1, 3), (3, 64)):
        simulation = Simulation(
            num_pages=num_pages,
            page_size=page_size,
            prefix_cache=prefix_cache,
            allocation=allocation,
            policy=policy,
            max_batch_tokens=budget,
            prefill_steps=prefill_steps,
        )
        _workload(simulation, requests=24)
        simulation.run(depth)
        assert len(simulation.ended) == 24
        simulation.assert_answers()
        simulation.check()
        assert simulation.scheduler.load().kv_pages_used == 0
