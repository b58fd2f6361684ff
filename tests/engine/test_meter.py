"""What the loop notes of its steps."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engine.harness import EngineUnderTest
from mizzen.engine.loop import EngineLoop
from mizzen.engine.meter import StepMeter
from mizzen.ipc.messages import Load
from mizzen.observability.feed import Feed, Histogram, Samples
from mizzen.observability.metrics import BY_NAME
from tiny import make_tiny_model


class Metered:
    """An engine whose loop is metered; ``report`` gives counters and (counts, sum) by name."""

    def __init__(self, folder: Path, depth: int) -> None:
        self.engine = EngineUnderTest(folder, overlap_depth=depth, page_size=4, max_running_requests=8)
        self._samples: list[Samples] = []
        self._meter = StepMeter(Feed(lambda samples: self._samples.append(samples) is None), self.engine.rank.runner)
        self.engine.loop = EngineLoop(
            self.engine.scheduler, self.engine.rank.runner, self.engine.inbox, self.engine.outbox,
            depth=depth, epoch=1, seed=0, meter=self._meter,
        )  # fmt: skip

    def report(self) -> tuple[dict[str, float], dict[str, tuple[int, float]]]:
        self._meter.report(self.engine.loop.load())
        samples = self._samples.pop()
        return (
            {name + "".join(f" {label}" for label in labels): value for name, labels, value in samples.counters},
            {name: (sum(counts), total) for name, _, counts, total in samples.histograms},
        )


class NoRunner:
    """A runner that has done nothing."""

    steps: Mapping[str, int] = {}
    busy_s = 0.0


@pytest.fixture(params=[0, 1, 2])
def metered(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Metered]:
    make_tiny_model(tmp_path / "tiny", "llama")
    made = Metered(tmp_path / "tiny", request.param)
    yield made
    made.engine.close()


def test_every_step_is_noted_once_and_its_tokens_are_those_computed(metered: Metered) -> None:
    engine = metered.engine
    began_s = time.monotonic()
    engine.submit("a", list(range(5, 25)), sampling={"max_tokens": 6, "ignore_eos": True})
    engine.submit("b", [5, 6, 8], sampling={"max_tokens": 9, "ignore_eos": True})
    engine.run()
    elapsed_s = time.monotonic() - began_s
    counters, histograms = metered.report()
    assert counters["mizzen_steps_total eager"] == engine.loop.steps > 8
    assert 0 < counters["mizzen_device_busy_seconds_total"] <= elapsed_s
    for name in ("mizzen_step_duration_seconds", "mizzen_step_host_time_seconds"):
        count, total_s = histograms[name]
        assert count == engine.loop.steps
        assert 0 < total_s <= elapsed_s, name
    assert histograms["mizzen_step_tokens"] == (engine.loop.steps, 20 + 5 + 3 + 8)
    assert counters["mizzen_prefix_cache_queries_total"] == 23
    assert counters["mizzen_prefix_cache_hits_total"] == 0


def test_a_second_report_has_only_what_is_new(metered: Metered) -> None:
    engine = metered.engine
    prompt = list(range(5, 25))
    engine.submit("a", prompt, sampling={"max_tokens": 2, "ignore_eos": True})
    engine.run()
    metered.report()
    before = engine.loop.steps
    time.sleep(0.3)  # longer than a feed's interval, and time in which the device has nothing to do
    began_s = time.monotonic()
    engine.submit("b", prompt, sampling={"max_tokens": 2, "ignore_eos": True})
    engine.run()
    elapsed_s = time.monotonic() - began_s
    counters, histograms = metered.report()
    assert counters["mizzen_steps_total eager"] == engine.loop.steps - before
    assert 0 < counters["mizzen_device_busy_seconds_total"] <= elapsed_s
    assert counters["mizzen_prefix_cache_queries_total"] == 20
    assert counters["mizzen_prefix_cache_hits_total"] == 16
    assert histograms["mizzen_step_tokens"] == (engine.loop.steps - before, 4 + 1)


def test_values_noted_together_fall_into_the_buckets_of_values_observed_one_by_one() -> None:
    sent: list[Samples] = []
    meter = StepMeter(Feed(lambda samples: sent.append(samples) is None), NoRunner())
    one_by_one = Histogram(BY_NAME["mizzen_step_tokens"].buckets)
    tokens = [1, 7, 8, 9, 256, 257, 20_000]
    for count in tokens:
        meter._in_flight.append((0.0, count))
        meter.result(1.0)
        one_by_one.observe(count)
    meter.report(Load())
    counts = next(counts for name, _, counts, _ in sent[0].histograms if name == "mizzen_step_tokens")
    assert counts == one_by_one.counts
