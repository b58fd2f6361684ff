"""Batches that are not mixed: waiting prompts go first, alone, and decoding goes on between and after."""

import pytest
from fake_device import Simulation, without_eos


def _kinds(simulation: Simulation) -> str:
    """A letter for each step: p it prefilled, d it decoded."""
    return "".join("d" if output.num_decode_rows else "p" for output in simulation.outputs)


def test_a_prompt_takes_the_whole_budget_while_the_others_wait() -> None:
    simulation = Simulation(max_batch_tokens=8, prefill_steps=64)
    without_eos(simulation, [0, 1], 8)
    simulation.step()
    without_eos(simulation, [1] * 20, 4)
    simulation.run()
    prefill = [output for output in simulation.outputs if not output.num_decode_rows]
    assert [output.num_scheduled.tolist() for output in prefill] == [[2], [8], [8], [4]]
    assert _kinds(simulation) == "pppp" + "d" * 7
    simulation.assert_answers()


def test_several_prompts_share_a_step() -> None:
    simulation = Simulation(max_batch_tokens=8, prefill_steps=64, prefix_cache="none")
    for length in (3, 4, 5):
        without_eos(simulation, [1] * length, 2)
    simulation.run()
    assert [output.num_scheduled.tolist() for output in simulation.outputs] == [[3, 4, 1], [4], [1, 1, 1]]


def test_an_endless_stream_of_prompts_does_not_stop_decoding() -> None:
    simulation = Simulation(max_batch_tokens=4, prefill_steps=5, prefix_cache="none")
    patient = without_eos(simulation, [0, 1], 6)
    simulation.step()
    for _ in range(6 * 5):
        without_eos(simulation, [1, 0, 1, 0], 1)  # ends with its prefill: its slot is free for the next
        simulation.step()
    assert patient in simulation.ended
    assert _kinds(simulation).startswith("pppppd" * 5)
    simulation.run()
    simulation.assert_answers()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_preempted_requests_come_back_and_all_end(depth: int) -> None:
    simulation = Simulation(num_pages=16, page_size=2, prefix_cache="none", prefill_steps=64)
    handles = [without_eos(simulation, [index % 2] * 8, 20) for index in range(4)]
    simulation.run(depth)
    assert simulation.scheduler.load().preemptions > 0
    assert [simulation.ended[handle].completion_tokens for handle in handles] == [20] * 4
    assert next(iter(simulation.ended)) == handles[0]
    simulation.assert_answers()


def test_who_runs_out_of_pages_amid_its_prompt_lets_the_others_decode() -> None:
    """The second prompt is admitted while there are pages for it; decoding between its chunks takes some of them."""
    simulation = Simulation(
        num_pages=24, page_size=1, max_batch_tokens=2, max_model_len=24, prefill_steps=1, prefix_cache="none"
    )
    first = without_eos(simulation, [0] * 2, 14)
    simulation.step()
    second = without_eos(simulation, [1] * 18, 2)
    simulation.run()
    assert "ddd" in _kinds(simulation)[: _kinds(simulation).rindex("p")]
    assert list(simulation.ended) == [first, second]
    simulation.assert_answers()
