"""Which switches are run, and what is said of those that are not. No engine is started here."""

from typing import Any

import pytest

from loadtest.gpu.ablations import SWITCHES, plan, run_all, table
from mizzen.config.resolve import resolve
from mizzen.config.settings import load_settings


def result(rate: float, ttft_s: float = 2.0) -> dict[str, Any]:
    return {"output_tokens_per_s": rate, "time_to_first_token_s": {"mean": ttft_s, "p90": 2 * ttft_s}, "start_s": 1.0}


def test_each_switch_is_a_setting_that_there_is() -> None:
    plain = resolve(load_settings({"model": "m", "device": "cpu"}, env_file=None).settings)
    for name, changes in SWITCHES.items():
        changed = resolve(load_settings({"model": "m", "device": "cpu", **changes}, env_file=None).settings)
        graphs = "graphs" in name  # a CPU has none to turn off
        assert (changed == plain) == (name.startswith("baseline") or name == "fcfs" or graphs), name


def test_the_baseline_is_always_run_and_first() -> None:
    assert list(plan({}, ["silu_mul off"])) == ["baseline", "silu_mul off"]
    assert next(iter(plan({}))) == "baseline"
    assert list(plan({}))[-1] == "baseline again"


def test_common_settings_hold_for_all_and_switches_win() -> None:
    runs = plan({"page_size": 64, "scheduling_policy": "longest-output"})
    assert runs["baseline"] == {"page_size": 64, "scheduling_policy": "longest-output"}
    assert runs["fcfs"] == {"page_size": 64, "scheduling_policy": "fcfs"}


def test_what_changes_nothing_is_not_run() -> None:
    assert "fcfs" not in plan({})
    assert "longest-output" in plan({})
    assert "longest-output" not in plan({"scheduling_policy": "longest-output"})


def test_an_unknown_switch_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such switch: warp drive"):
        plan({}, ["warp drive"])


def test_what_would_end_too_late_is_reported_as_not_run() -> None:
    now = [0.0]

    def one(settings: dict[str, Any]) -> dict[str, Any]:
        now[0] += 30.0
        return result(100.0)

    results = run_all(plan({}), one, 100.0, clock=lambda: now[0])
    assert [name for name, value in results.items() if "not_run" not in value] == list(SWITCHES)[:3]
    assert results["baseline again"] == {"not_run": "no time left"}
    assert "| graphs off | 100 | 1.000 |" in table(results)
    assert "| baseline again | not run: no time left |" in table(results)


def test_a_run_that_fails_does_not_end_the_others() -> None:
    def one(settings: dict[str, Any]) -> dict[str, Any]:
        if settings.get("overlap_depth") == 0:
            raise RuntimeError("out of memory\nat length")
        return result(50.0 if settings.get("cuda_graph_rows") == 0 else 100.0, 4.0)

    results = run_all(plan({}, ["overlap off", "graphs off"]), one, 100.0)
    assert results["overlap off"] == {"not_run": "RuntimeError: out of memory"}
    assert "| graphs off | 50 | 0.500 | 4.000 (1.000) | 8.000 (1.000) | 1.0 |" in table(results)


def test_without_a_baseline_there_are_no_ratios() -> None:
    def one(settings: dict[str, Any]) -> dict[str, Any]:
        if not settings:
            raise RuntimeError("no")
        return result(50.0)

    assert "| graphs off | 50 |  | 2.000 | 4.000 | 1.0 |" in table(run_all(plan({}, ["graphs off"]), one, 100.0))
