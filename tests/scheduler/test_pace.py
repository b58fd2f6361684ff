"""Under longest-output a step takes what is needed to be done when the longest request is, and no more."""

import random

from fake_device import Simulation, without_eos

from mizzen.scheduler.pace import TILE


def offline(num_requests: int, max_batch_tokens: int = 8192) -> tuple[Simulation, int]:
    """The simulation after its end, and the longest output."""
    simulation = Simulation(
        policy="longest-output",
        num_pages=num_requests * 80,
        page_size=16,
        max_batch_tokens=max_batch_tokens,
        max_model_len=1280,
        max_running_requests=256,
        prefix_cache="none",
    )
    draw = random.Random(num_requests)
    outputs = [draw.randint(30, 200) for _ in range(num_requests)]
    for count in outputs:
        without_eos(simulation, [draw.randint(0, 1) for _ in range(draw.randint(100, 1000))], count)
    simulation.run()
    simulation.assert_answers()
    return simulation, max(outputs)


def test_all_end_with_the_longest_in_steps_no_larger_than_it_takes() -> None:
    simulation, longest = offline(100)
    sizes = [output.num_tokens for output in simulation.outputs]
    assert len(sizes) <= longest + 3
    assert max(sizes) <= 2 * TILE
    assert sum(size % TILE == 0 for size in sizes) > 0.7 * longest, "until the prompts are through, steps are full"


def test_more_work_than_that_takes_larger_steps() -> None:
    simulation, _ = offline(400)
    assert simulation.outputs[0].num_tokens > 3 * TILE


def test_the_limit_holds() -> None:
    simulation, longest = offline(100, max_batch_tokens=200)
    assert max(output.num_tokens for output in simulation.outputs) == 200
    assert len(simulation.outputs) > longest + 3


def test_other_policies_fill_the_step() -> None:
    simulation = Simulation(max_batch_tokens=1024, num_pages=200, page_size=16, max_model_len=1280)
    without_eos(simulation, [1] * 1000, 5)
    simulation.run()
    assert simulation.outputs[0].num_tokens == 1000
