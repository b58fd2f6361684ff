"""A trace replayed at several speeds on a server of its own: the program that the GPU's figures come from."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from programs import run_program

from loadtest.gpu.traces import at_speed, counted
from loadtest.scenario import convert
from tiny import make_tiny_model

SCENARIO = convert({"workload": {"kind": "trace", "path": "x", "format": "azure"}, "requests": 9, "drain_s": 60.0})


@pytest.mark.parametrize(
    ("speed", "limit_s", "duration_s", "drain_s"),
    [
        (2.0, 300.0, None, 60.0),  # 100 s of load, and time enough for the last answers
        (2.0, 130.0, None, 30.0),
        (2.0, 100.0, 100.0, 1.0),  # what is due at the limit is left out
        (1.0, 100.0, 100.0, 1.0),
    ],
)
def test_a_speed_takes_no_longer_than_its_limit(
    speed: float, limit_s: float, duration_s: float | None, drain_s: float
) -> None:
    one = at_speed(SCENARIO, 3, speed, 200.0, limit_s)
    assert (one.duration_s, one.drain_s, one.seed, one.load.speed) == (duration_s, drain_s, 3, speed)  # type: ignore[union-attr]


def test_a_duration_leaves_time_for_the_last_answers() -> None:
    short = at_speed(replace(SCENARIO, duration_s=90.0), 0, 2.0, 200.0, 110.0)
    assert (short.duration_s, short.drain_s) == (90.0, 20.0)
    whole = at_speed(replace(SCENARIO, duration_s=90.0), 0, 4.0, 200.0, 300.0)
    assert (whole.duration_s, whole.drain_s) == (None, 60.0)


def test_rows_that_were_neither_sent_nor_too_long_are_counted() -> None:
    result = {"dropped_too_long": 5, "summary": {"requests": 70, "warmup_requests": 10}}
    assert counted(result, 100)["not_sent"] == 15


@pytest.mark.slow
def test_a_trace_at_several_speeds_leaves_a_result_and_a_report(tmp_path: Path) -> None:
    model, trace = make_tiny_model(tmp_path / "model", "qwen3"), tmp_path / "trace.jsonl"
    rows = [{"timestamp": 100 * k, "input_length": 400, "output_length": 4, "hash_ids": [k // 2]} for k in range(20)]
    rows += [{"timestamp": 60_000, "input_length": 20, "output_length": 4, "hash_ids": [99]}]  # due after the limit
    rows[3]["input_length"] = 100_000
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--trace", trace, "--trace-format", "mooncake", "--speeds", "4,2", "--limit-s", "6", "--ttft-ms", "60000"]
    for setting in ("kv_cache_bytes=4MiB", "threads=1", "mixed_batches=false", "page_size=64"):
        words += ["--set", setting]
    printed = run_program("loadtest.gpu.traces", model, *words, "--out", tmp_path / "out")
    written = json.loads((tmp_path / "out.json").read_text())
    assert [one["scenario"]["load"]["speed"] for one in written["runs"]] == [2.0, 4.0]
    for one in written["runs"]:
        assert (one["summary"]["complete"], one["summary"]["errors"]) == (19, {})
        assert (one["dropped_too_long"], one["not_sent"]) == (1, 1)
        assert one["summary"]["tokens"]["output"] == 19 * 4
        assert one["summary"]["tokens"]["answers_with_another_output_length"] == 0
        assert 0 < one["summary"]["ttft_s"]["p50"] <= one["summary"]["ttft_s"]["max"]
        assert one["summary"]["tbt_s"]["count"] > 0
        assert one["server"]["increase"]["steps"] > 0
        assert one["environment"]["command"][2] == "loadtest.gpu.traces"
    assert written["exit_code"] == 0
    assert written["skipped"] == []
    assert written["settings"]["mixed_batches"] == "false"
    assert "replayed at speed 4" in printed
    assert "not sent      1 rows" in printed
    page = (tmp_path / "out.html").read_text()
    assert "<svg" in page
    assert "1 rows of the trace were not sent" in page
    assert "server_environment" in page
