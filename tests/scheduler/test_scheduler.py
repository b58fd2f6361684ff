import numpy as np
import pytest
from fake_device import EOS, Simulation, next_token, without_eos

from mizzen.errors import EngineRestarted


def _answers_for(simulation: Simulation, handle: int) -> list[int]:
    """The tokens that the request would get if nothing stopped it."""
    request = simulation.device.requests[handle]
    tokens = request.prompt.tolist()
    for _ in range(request.sampling.max_tokens or 0):
        tokens.append(next_token(tokens, len(request.prompt), request))
    return tokens[len(request.prompt) :]


# ---- batches ----


def test_decode_and_prefill_share_a_step() -> None:
    simulation = Simulation(max_batch_tokens=8)
    without_eos(simulation, [0, 1], 8)
    simulation.step()
    without_eos(simulation, [1] * 12, 4)
    output = simulation.schedule()
    assert output is not None
    assert output.num_decode_rows == 1
    assert output.num_scheduled.tolist() == [1, 7]
    assert output.samples.tolist() == [True, False]
    assert output.num_computed.tolist() == [2, 0]


def test_a_long_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    simulation = Simulation(max_batch_tokens=5)
    handle = without_eos(simulation, [0] * 12, 1)
    simulation.run()
    assert [output.num_scheduled.tolist() for output in simulation.outputs] == [[5], [5], [2]]
    assert [output.samples.tolist() for output in simulation.outputs] == [[False], [False], [True]]
    assert len(simulation.tokens[handle]) == 1


def test_a_length_stop_schedules_no_step_too_many() -> None:
    for depth in (0, 1, 2):
        simulation = Simulation()
        without_eos(simulation, [0, 1, 1], 5)
        simulation.run(depth)
        assert len(simulation.outputs) == 5
        assert simulation.ended[0].reason == "length"


def test_steps_may_be_scheduled_before_any_result() -> None:
    simulation = Simulation()
    without_eos(simulation, [0, 1], 8)
    outputs = [simulation.schedule() for _ in range(3)]
    assert [output.num_computed.tolist() for output in outputs if output] == [[0], [2], [3]]
    assert len(simulation.in_flight) == 3
    simulation.run(2)
    simulation.assert_answers()


def test_nothing_to_do_is_none() -> None:
    simulation = Simulation()
    assert simulation.schedule() is None
    assert not simulation.scheduler.has_work()


# ---- ends ----


def test_eos_ends_with_stop_and_counts_as_a_token() -> None:
    simulation = Simulation()
    handle = next(
        handle
        for handle in (simulation.add([0, 1], 20) for _ in range(20))
        if EOS in _answers_for(simulation, handle)[1:10]
    )
    simulation.run(depth=2)
    end = simulation.ended[handle]
    assert (end.reason, end.stop_token_id) == ("stop", EOS)
    assert simulation.tokens[handle][-1] == EOS
    assert end.completion_tokens == len(simulation.tokens[handle])
    simulation.assert_answers()


def test_a_stop_token_waits_for_min_tokens() -> None:
    simulation = Simulation()
    handle = without_eos(simulation, [0, 1], 12, stop_token_ids=(0, 1), min_tokens=4)
    simulation.run(depth=1)
    assert simulation.ended[handle].completion_tokens == 4
    assert simulation.ended[handle].stop_token_id == simulation.tokens[handle][-1]


def test_requests_with_many_and_few_stop_tokens_share_a_batch() -> None:
    simulation = Simulation()
    many = without_eos(simulation, [0, 1], 6, stop_token_ids=tuple(range(100, 356)))
    few = without_eos(simulation, [0, 1], 6, stop_token_ids=(0, 1))
    simulation.run()
    assert simulation.ended[many].reason == "length"
    assert simulation.ended[few].reason == "stop"
    assert simulation.ended[few].completion_tokens == 1
    without_eos(simulation, [1, 1], 3)
    simulation.run()
    assert simulation.scheduler._slots.stop_ids.shape[1] == 1, "the wide request is gone, and its width with it"


def test_a_stop_string_ends_with_stop_and_later_results_are_dropped() -> None:
    simulation = Simulation()
    handle = without_eos(simulation, [0, 1], 20)
    for _ in range(4):
        simulation.step(depth=2)
    seen = len(simulation.tokens[handle])
    simulation.stop(handle)
    assert simulation.ended[handle].reason == "stop"
    assert simulation.ended[handle].stop_token_id is None
    simulation.run(2)
    assert len(simulation.tokens[handle]) == seen
    simulation.check()


def test_stopping_what_has_ended_or_never_was_does_nothing() -> None:
    simulation = Simulation()
    handle = without_eos(simulation, [0, 1], 2)
    simulation.run()
    simulation.scheduler.stop(handle)
    simulation.scheduler.stop(12345)
    simulation.scheduler.abort("never seen", "abort")
    assert simulation.scheduler.take_ended() == []


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_choices_of_a_request_and_no_other(steps: int) -> None:
    simulation = Simulation(max_running_requests=2)
    aborted = [without_eos(simulation, [0, 1, 1], 9, request_id="one") for _ in range(3)]
    other = without_eos(simulation, [0, 1], 9, request_id="two")
    for _ in range(steps):
        simulation.step(depth=1)
    simulation.scheduler.abort("one", "abort")
    simulation.collect()
    assert [simulation.ended[handle].reason for handle in aborted] == ["abort"] * 3
    simulation.run(1)
    assert simulation.ended[other].reason == "length"
    simulation.check()


def test_abort_in_flight_frees_pages_once_and_the_slot_later() -> None:
    simulation = Simulation(max_running_requests=1)
    first = without_eos(simulation, [0, 1, 1], 9)
    simulation.schedule()
    simulation.schedule()
    simulation.scheduler.abort("request-0", "abort")
    simulation.collect()
    assert simulation.scheduler.load().kv_pages_used == 0
    second = without_eos(simulation, [1, 1], 3)
    assert simulation.schedule() is None, "its only slot still waits for two results"
    simulation.check()
    simulation.update()
    assert simulation.schedule() is None
    simulation.update()
    assert simulation.schedule() is not None
    simulation.run()
    assert not simulation.tokens[first]
    assert simulation.ended[second].reason == "length"
    simulation.assert_answers()


def test_tokens_that_only_the_device_knows_are_not_cached() -> None:
    simulation = Simulation(page_size=1)
    without_eos(simulation, [0, 1, 1, 0], 9)
    for _ in range(3):
        simulation.schedule()
    assert simulation.outputs[-1].num_computed.tolist() == [5]
    simulation.scheduler.abort("request-0")
    assert simulation.scheduler.load().kv_pages_cached == 4


def test_a_timeout_is_an_error_of_its_own() -> None:
    simulation = Simulation()
    late = without_eos(simulation, [0, 1], 20, deadline_s=5.0)
    patient = without_eos(simulation, [0, 1], 3, deadline_s=1000.0)
    simulation.scheduler.expire(4.9)
    assert simulation.scheduler.take_ended() == []
    simulation.scheduler.expire(5.0)
    simulation.collect()
    error = simulation.ended[late].error
    assert simulation.ended[late].reason == "error"
    assert error is not None
    assert (error.status, error.code) == (504, "request_timeout")
    simulation.run()
    simulation.scheduler.expire(2000.0)
    assert simulation.scheduler.take_ended() == []
    assert simulation.ended[patient].reason == "length"


def test_an_abort_for_a_timeout_is_the_same_error() -> None:
    simulation = Simulation()
    handle = without_eos(simulation, [0, 1], 20)
    simulation.scheduler.abort("request-0", "timeout")
    simulation.collect()
    error = simulation.ended[handle].error
    assert error is not None
    assert error.status == 504


def test_a_lost_api_takes_its_requests_with_it() -> None:
    simulation = Simulation()
    lost = without_eos(simulation, [0, 1], 9, api=0)
    kept = without_eos(simulation, [0, 1], 9, api=1)
    simulation.step(1)
    simulation.scheduler.abort_api(0)
    simulation.collect()
    assert set(simulation.ended) == {lost}
    simulation.run(1)
    assert simulation.ended[kept].reason == "length"


def test_abort_all_ends_everything_with_the_error() -> None:
    simulation = Simulation(max_running_requests=2)
    for _ in range(5):
        without_eos(simulation, [0, 1], 9)
    simulation.step(1)
    error = EngineRestarted("The engine was restarted.").wire()
    simulation.scheduler.abort_all(error)
    simulation.collect()
    assert [end.error for end in simulation.ended.values()] == [error] * 5
    assert not simulation.scheduler.has_work()
    simulation.run(1)
    simulation.check()


def test_timings_follow_the_request() -> None:
    simulation = Simulation(max_running_requests=1)
    simulation.now = 10.0
    without_eos(simulation, [0, 1], 1)
    simulation.now = 20.0
    second = without_eos(simulation, [0, 1], 3)
    simulation.run()
    timings = simulation.ended[second].timings
    times = [
        timings.arrival_s,
        timings.queued_s,
        timings.scheduled_s,
        timings.first_token_s,
        timings.last_token_s,
    ]
    assert times[:2] == [20.0, 20.0]
    assert all(time is not None for time in times)
    assert times == sorted(times)
    assert times[2] > 22.0  # the first request had to end before
    assert times[4] == times[3] + 4  # two more steps of two ticks each


def test_a_request_that_never_ran_has_no_such_times() -> None:
    simulation = Simulation()
    handle = without_eos(simulation, [0, 1], 3)
    simulation.scheduler.abort("request-0")
    simulation.collect()
    end = simulation.ended[handle]
    assert (end.completion_tokens, end.cached_tokens) == (0, 0)
    assert (end.timings.scheduled_s, end.timings.first_token_s, end.timings.last_token_s) == (None, None, None)


# ---- prefix cache ----


def test_a_second_request_reads_the_first_ones_pages() -> None:
    simulation = Simulation(page_size=2)
    without_eos(simulation, [0, 1, 1, 0, 1], 1)
    simulation.run()
    second = without_eos(simulation, [0, 1, 1, 0, 1, 1], 1)
    simulation.run()
    assert simulation.ended[second].cached_tokens == 4
    assert simulation.outputs[-1].num_computed.tolist() == [4]


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    simulation = Simulation(page_size=2)
    for _ in range(2):
        handle = without_eos(simulation, [0, 1, 1, 0], 1)
        simulation.run()
    assert simulation.ended[handle].cached_tokens == 2


def test_requests_of_one_step_share_a_prefix_at_once() -> None:
    simulation = Simulation(page_size=2, max_batch_tokens=64)
    for _ in range(3):
        without_eos(simulation, [0, 1, 1, 0, 1], 2)
    output = simulation.schedule()
    assert output is not None
    assert output.num_computed.tolist() == [0, 4, 4]
    simulation.run()
    simulation.assert_answers()


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    simulation = Simulation(page_size=2)
    first = without_eos(simulation, [0, 1, 1], 6)
    simulation.run(1)
    conversation = [0, 1, 1, *simulation.tokens[first]]
    second = without_eos(simulation, [*conversation, 0, 1], 1)
    simulation.run(1)
    assert simulation.ended[second].cached_tokens == 8  # of nine tokens: the last has no KV


def test_another_salt_finds_nothing() -> None:
    simulation = Simulation(page_size=2)
    handles = []
    for salt in ("a", "b", None, "", "a"):
        handles.append(without_eos(simulation, [0, 1, 1, 0, 1], 1, cache_salt=salt))
        simulation.run()
    assert [simulation.ended[handle].cached_tokens for handle in handles] == [0, 0, 0, 0, 4]


def test_without_a_prefix_cache_nothing_is_found_and_nothing_stays() -> None:
    simulation = Simulation(prefix_cache="none")
    for _ in range(2):
        handle = without_eos(simulation, [0, 1, 1, 0, 1], 1)
        simulation.run()
    assert simulation.ended[handle].cached_tokens == 0
    assert simulation.scheduler.load().kv_pages_cached == 0


# ---- load ----


def test_load_tells_what_runs_and_what_waits() -> None:
    simulation = Simulation(max_running_requests=2, page_size=2)
    for _ in range(5):
        without_eos(simulation, [0, 1, 1], 4)
    simulation.step()
    load = simulation.scheduler.load()
    assert (load.running, load.waiting, load.steps, load.generated_tokens) == (2, 3, 1, 2)
    assert load.kv_pages_total == 32
    assert load.kv_pages_used == 3  # one shared, one each
    simulation.run()
    load = simulation.scheduler.load()
    assert (load.running, load.waiting, load.kv_pages_used, load.generated_tokens) == (0, 0, 0, 20)
    assert load.kv_pages_cached > 0


def test_a_step_reuses_its_row_arrays_while_nothing_happens() -> None:
    simulation = Simulation(page_size=16, num_pages=32)
    for _ in range(3):
        without_eos(simulation, [0, 1], 12)
    for _ in range(4):
        simulation.step(1)
    first, second = simulation.outputs[-2:]
    assert np.shares_memory(first.slots, second.slots)
