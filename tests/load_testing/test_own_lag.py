"""A client that does not keep up says so: figures that are partly its own must not pass for the server's."""

import time
from array import array

import pytest
import uvloop

from loadtest.client import COMPLETE, Answer
from loadtest.driver import Record, Seen, _until
from loadtest.figures import percentiles
from loadtest.measures import Window, summary
from loadtest.scenario import Slo
from loadtest.workloads import Turn


def answered(due_s: float, started_s: float) -> Record:
    arrivals = array("d", (started_s + 0.5, started_s + 1.0))
    answer = Answer(due_s, started_s, started_s, started_s + 1.0, arrivals, array("i", (1, 1)), COMPLETE, tokens=2)
    return Record(0, 0, Turn(), answer)


def run(*lags_s: float, loop_lag_s: float = 0.0, cpu_s: float = 4.0) -> Seen:
    """Of 10 s."""
    records = [answered(100.0 + place, 100.0 + place + lag_s) for place, lag_s in enumerate(lags_s)]
    return Seen(100.0, 0.0, 110.0, 110.0, records, [loop_lag_s] * 9, cpu_s)


@pytest.mark.parametrize(
    ("seen", "slow", "others"),
    [
        (run(*[0.001] * 9), False, False),
        (run(*[0.001] * 9, 0.9), True, True),
        (run(*[0.001] * 9, 0.9, cpu_s=8.0), True, False),
        (run(*[0.001] * 9, loop_lag_s=0.05, cpu_s=8.0), True, False),
        (run(*[0.001] * 9, cpu_s=9.5), True, False),
    ],
)
def test_a_client_that_is_late_or_has_no_core_left_is_called_the_bottleneck(
    seen: Seen, slow: bool, others: bool
) -> None:
    client = summary(seen, Window(100.0, 110.0), Slo())["client"]
    assert (client["is_bottleneck"], client["machine_is_busy"]) == (slow, others)


def test_what_the_client_is_late_by_is_part_of_every_latency() -> None:
    one = summary(run(2.0), Window(100.0, 110.0), Slo())
    assert one["ttft_s"]["max"] == pytest.approx(2.5)
    assert one["e2e_s"]["max"] == pytest.approx(3.0)
    assert one["client"]["send_lag_s"]["max"] == pytest.approx(2.0)


def test_a_server_that_waits_for_requests_is_no_faster_for_it() -> None:
    one = summary(run(0.0, 0.0), Window(100.0, 110.0), Slo())  # over after 2 s of 10
    assert (one["requests_per_s"], one["output_tokens_per_s"]) == (0.2, 0.4)


def test_no_request_leaves_early_on_an_event_loop_that_counts_milliseconds() -> None:
    async def waits() -> list[float]:
        start_s, late_s = time.monotonic(), []
        for place in range(40):
            await _until(moment := start_s + 0.0033 * place)
            late_s.append(time.monotonic() - moment)
        return late_s

    assert min(uvloop.run(waits())) >= 0


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == {}
    assert percentiles([1.0, 3.0])["mean"] == 2.0
