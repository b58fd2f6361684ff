"""What the engine says of itself in the log, at times."""

import pytest
from structlog.testing import capture_logs

from mizzen.engine.process import ProgressLine
from mizzen.ipc.messages import Load

LOADS = [
    Load(4, 2, 200, 50, steps=10, generated_tokens=100, prefix_queries=400, prefix_hits=100),
    Load(4, 0, 200, 100, steps=20, generated_tokens=140, preemptions=3, prefix_queries=400, prefix_hits=100),
    Load(1, 0, 200, 10, steps=30, generated_tokens=170, preemptions=3, prefix_queries=500, prefix_hits=190),
]


def said(*loads: Load, interval_s: float = 1e-9) -> list[dict[str, object]]:
    line = ProgressLine(interval_s)
    with capture_logs() as logs:
        for load in loads:
            line.update(load)
    return [dict(entry) for entry in logs]


def test_a_line_has_what_changed_since_the_last_one() -> None:
    lines = said(*LOADS)
    assert [(line["running"], line["waiting"], line["kv_used"]) for line in lines] == [
        (4, 2, "25.0%"), (4, 0, "50.0%"), (1, 0, "5.0%"),
    ]  # fmt: skip
    assert [line["preemptions"] for line in lines] == [0, 3, 0]


def test_the_hit_rate_is_that_of_the_newest_prompts() -> None:
    assert [line["prefix_hits"] for line in said(*LOADS)] == ["25.0%", "25.0%", "90.0%"]


@pytest.mark.parametrize("interval_s", [0.0, 3600.0])
def test_there_is_no_line_when_it_is_off_or_not_due(interval_s: float) -> None:
    assert said(*LOADS, interval_s=interval_s) == []


def test_an_idle_engine_says_nothing() -> None:
    assert len(said(LOADS[0], LOADS[0], LOADS[0])) == 1
