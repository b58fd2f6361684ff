"""Random lives of a scheduler: whatever happens in whatever order, no page, slot, token or end is lost or doubled."""

import msgspec
import pytest
from fake_device import EOS, Simulation, reference
from hypothesis import strategies
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from mizzen.errors import EngineRestarted
from mizzen.ipc.messages import ChoiceEnded
from mizzen.scheduler.output import encode_step
from random_lives import CountedMachine, run_steps

MAX_MODEL_LEN = 24
MAX_DEPTH = 2
STEPS_IN_SHORT_RUN = 2_500
STEPS_IN_LONG_RUN = 100_000

prompts = strategies.lists(strategies.integers(0, 1), min_size=1, max_size=14)


class SchedulerMachine(CountedMachine):
    """Two replicas get the same events: every rank must come to the same steps from the same messages."""

    @initialize(
        page_size=strategies.sampled_from([1, 2, 3, 4]),
        spare_pages=strategies.sampled_from([0, 1, 3, 20]),
        prefix_cache=strategies.sampled_from(["radix", "radix", "none"]),
        allocation=strategies.sampled_from(["on-demand", "on-demand", "reserve"]),
        policy=strategies.sampled_from(["fcfs", "priority", "longest-prefix", "longest-output"]),
        max_running_requests=strategies.integers(1, 5),
        max_batch_tokens=strategies.sampled_from([1, 2, 5, 8, 64]),
        prefill_steps=strategies.sampled_from([0, 0, 1, 3, 64]),
    )
    def start(self, page_size: int, spare_pages: int, **config: object) -> None:
        self.replicas = [
            Simulation(
                num_pages=-(-MAX_MODEL_LEN // page_size) + spare_pages,
                page_size=page_size,
                max_model_len=MAX_MODEL_LEN,
                **config,
            )
            for _ in range(2)
        ]
        self.first = self.replicas[0]
        self.request_ids: list[str] = []

    @rule(
        prompt=prompts,
        max_tokens=strategies.integers(1, 10),
        min_tokens=strategies.integers(0, 3),
        ignore_eos=strategies.booleans(),
        stop_token_ids=strategies.sampled_from([(), (), (1,), (0, EOS)]),
        cache_salt=strategies.sampled_from([None, None, "", "a"]),
        priority=strategies.integers(-1, 1),
        api=strategies.integers(0, 1),
        patience=strategies.sampled_from([None, None, 3.0, 12.0]),
        choices=strategies.sampled_from([1, 1, 2, 3]),
    )
    def add(self, prompt: list[int], choices: int, patience: float | None, min_tokens: int, **fields: object) -> None:
        request_id = f"r{len(self.request_ids)}"
        self.request_ids.append(request_id)
        for replica in self.replicas:
            for _ in range(choices):
                replica.add(
                    prompt,
                    request_id=request_id,
                    min_tokens=min(min_tokens, fields["max_tokens"]),
                    deadline_s=None if patience is None else replica.now + patience,
                    **fields,
                )

    @precondition(lambda self: len(self.first.in_flight) <= MAX_DEPTH)
    @rule()
    def schedule(self) -> None:
        nothing_in_flight = not self.first.in_flight
        output = self.first.schedule()
        other = self.replicas[1].schedule()
        if output is None or other is None:
            assert output is other is None
            assert not (nothing_in_flight and self.first.scheduler.has_work()), "it hangs"
        else:
            assert encode_step(output) == encode_step(other)

    @precondition(lambda self: self.first.in_flight)
    @rule()
    def update(self) -> None:
        for replica in self.replicas:
            replica.update()

    @rule(turns=strategies.integers(1, 12), depth=strategies.integers(0, MAX_DEPTH))
    def run_turns(self, turns: int, depth: int) -> None:
        for replica in self.replicas:
            for _ in range(turns):
                replica.step(depth)

    @precondition(lambda self: self.request_ids)
    @rule(data=strategies.data(), reason=strategies.sampled_from(["abort", "timeout"]))
    def abort(self, data: strategies.DataObject, reason: str) -> None:
        request_id = data.draw(strategies.sampled_from([*self.request_ids, "unknown"]))
        for replica in self.replicas:
            replica.scheduler.abort(request_id, reason)

    @precondition(lambda self: self.first.tokens)
    @rule(data=strategies.data())
    def stop(self, data: strategies.DataObject) -> None:
        handle = data.draw(strategies.sampled_from([*self.first.tokens, 10**6]))
        for replica in self.replicas:
            replica.stop(handle)

    @rule(event=strategies.integers(0, 19))
    def lose_many(self, event: int) -> None:
        error = EngineRestarted("gone").wire() if event == 19 else None
        for replica in self.replicas:
            if event < 2:
                replica.scheduler.abort_api(event)
            elif event > 17:
                replica.scheduler.abort_all(error)
                assert not replica.scheduler.has_work()

    @rule(seconds=strategies.sampled_from([0.0, 5.0]))
    def expire(self, seconds: float) -> None:
        for replica in self.replicas:
            replica.now += seconds
            replica.scheduler.expire(replica.now)

    @invariant()
    def every_page_and_slot_is_accounted_for(self) -> None:
        type(self).steps_run += 1
        for replica in getattr(self, "replicas", []):
            replica.collect()
            replica.check()

    def teardown(self) -> None:
        if not hasattr(self, "replicas"):
            return
        for replica in self.replicas:
            replica.run(depth=1)
            replica.check()
            assert set(replica.ended) == set(replica.tokens), "a request without an end"
            assert replica.scheduler.load().kv_pages_used == 0
            replica.assert_answers()
            for handle, end in replica.ended.items():
                if end.reason in ("abort", "error") or handle in replica.stopped:
                    answer, _ = reference(replica.device.requests[handle])
                    assert answer[: len(replica.tokens[handle])] == replica.tokens[handle]
        ends = [msgspec.json.encode(list(replica.ended.values())) for replica in self.replicas]
        assert ends[0] == ends[1]
        assert self.first.tokens == self.replicas[1].tokens
        assert all(isinstance(end, ChoiceEnded) for end in self.first.ended.values())


@pytest.fixture(autouse=True)
def _paced_steps_of_these_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or longest-output would always take the whole budget."""
    monkeypatch.setattr("mizzen.scheduler.pace.TILE", 2)


def test_no_invariant_breaks_in_a_short_random_life() -> None:
    run_steps(SchedulerMachine, STEPS_IN_SHORT_RUN, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_invariant_breaks_in_100_000_random_steps() -> None:
    run_steps(SchedulerMachine, STEPS_IN_LONG_RUN, derandomize=False)
