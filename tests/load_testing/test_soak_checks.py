"""Each check fails for what it is there to find. The soak itself runs for some seconds, marked slow."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from loadtest.gpu.soak_checks import MIB, Limits, Sample, Seen, check, memory_table, quarters
from tiny import make_tiny_model

REFUSED = "refused 429 rate_limit_exceeded"
BEFORE = Sample(
    at_s=0.0,
    rss_bytes={"api-0": 100 * MIB, "engine-0": 900 * MIB},
    files={"api-0": 20, "engine-0": 30},
    gpu_bytes=5000 * MIB,
    pages={"used": 0, "cached": 0, "free": 64},
    capacity=64,
    running=0,
    waiting=0,
    steps=0,
    tokens=0,
    preemptions=0,
    restarts=0,
    finished={"length": 2, "abort": 0, "error": 0, "timeout": 0},
    rejected={"rate_limit_exceeded": 1},
)
IDLE = replace(
    BEFORE,
    pages={"used": 0, "cached": 40, "free": 24},
    steps=900,
    finished={"length": 103, "abort": 8, "error": 0, "timeout": 0},
    rejected={"rate_limit_exceeded": 31},
)


def under_load(**changes: Any) -> list[Sample]:
    """A minute and a half; ``changes`` are functions of the time."""
    return [
        replace(BEFORE, at_s=at_s, steps=10 * at_s, running=8, **{name: of(at_s) for name, of in changes.items()})
        for at_s in (2.0 * k for k in range(48))
    ]


def seen(**changes: Any) -> Seen:
    outcomes = Counter({"complete": 100, "closed by the client": 10, REFUSED: 30})
    return Seen(**{"outcomes": outcomes, "longest_silence_s": 0.1, "longest_gap_s": 0.5, **changes})


def failed(
    samples: list[Sample] | None = None, idle: Sample = IDLE, what: Seen | None = None, before: Sample = BEFORE
) -> list[str]:
    checks = check(before, samples or under_load(), idle, what or seen(), Limits(), max_running=8)
    assert len({name for name, _, _ in checks}) == len(checks)
    return [name for name, holds, _ in checks if not holds]


def test_a_good_soak_passes_all_checks() -> None:
    assert failed() == []


@pytest.mark.parametrize("pages", [{"used": 1, "cached": 39, "free": 24}, {"used": 0, "cached": 40, "free": 23}, {}])
def test_a_lost_page_is_found(pages: dict[str, float]) -> None:
    assert failed(idle=replace(IDLE, pages=pages)) == ["no page is lost"]


def test_memory_that_grows_to_the_end_is_a_leak_and_what_a_start_takes_is_not() -> None:
    def leak(at_s: float) -> dict[str, int]:
        return {"api-0": 100 * MIB, "engine-0": int((900 + at_s) * MIB)}

    def warm_up(at_s: float) -> dict[str, int]:
        return {"api-0": 100 * MIB, "engine-0": int((900 + 20 * min(at_s, 20)) * MIB)}

    assert failed(under_load(rss_bytes=leak)) == ["host memory of engine-0 is flat"]
    assert failed(under_load(rss_bytes=warm_up)) == []
    assert "| engine-0 | 932.0 | 986.0 | +61" in memory_table(under_load(rss_bytes=leak))


def test_gpu_memory_that_grows_is_found_and_none_is_no_failure() -> None:
    assert failed(under_load(gpu_bytes=lambda at_s: int((5000 + 2 * at_s) * MIB))) == ["GPU memory is flat"]
    assert failed(under_load(gpu_bytes=lambda _: None)) == []


def test_quarters_are_medians_after_the_warm_up() -> None:
    first, last = quarters(under_load(), lambda sample: sample.at_s) or (0, 0)
    assert first == pytest.approx(94 * (1 / 4 + 3 / 32), abs=2)
    assert last == pytest.approx(94 * (1 - 3 / 32), abs=2)


def test_connections_that_stay_open_are_found() -> None:
    assert failed(idle=replace(IDLE, files={"api-0": 37, "engine-0": 30})) == ["no connection is left"]


def test_stalls_and_starved_streams_are_found() -> None:
    assert failed(what=seen(longest_silence_s=2.1)) == ["no stall"]
    assert failed(what=seen(longest_gap_s=21.0)) == ["no starved stream"]


def test_steps_that_stand_still_are_found() -> None:
    samples = under_load()
    samples[20] = replace(samples[20], steps=samples[19].steps)
    assert failed(samples) == ["steps go on"]


@pytest.mark.parametrize("outcome", ["cut", "error engine_restarted", "unreadable: x", "refused 500 internal_error"])
def test_any_other_ending_is_found(outcome: str) -> None:
    what = seen()
    what.outcomes[outcome] += 1
    assert failed(what=what) == ["every request ended once"]


def test_a_fault_is_found() -> None:
    assert failed(what=seen(faults=["complete: ended 2 times"])) == ["every request ended once"]


@pytest.mark.parametrize(
    ("finished", "rejected"),
    [
        ({"length": 101, "abort": 8}, 31),  # one fewer than the clients got
        ({"length": 113, "abort": 0}, 31),  # more than the clients that left can explain
        ({"length": 103, "abort": 10}, 31),  # likewise, together
        ({"length": 103, "abort": 7, "error": 1}, 31),
        ({"length": 103, "abort": 7, "timeout": 1}, 31),
        ({"length": 103, "abort": 8}, 30),
        ({"length": 103, "abort": 8}, 42),
    ],
)
def test_a_server_that_counts_otherwise_is_found(finished: dict[str, float], rejected: float) -> None:
    idle = replace(IDLE, finished=finished, rejected={"rate_limit_exceeded": rejected})
    assert failed(idle=idle) == ["server and clients agree"]


def test_what_was_not_saturated_proves_nothing() -> None:
    assert failed([replace(sample, running=6) for sample in under_load()]) == ["it was saturated"]
    without = Counter({"complete": 101, "closed by the client": 10})
    idle = replace(IDLE, rejected={"rate_limit_exceeded": 1})
    assert failed(idle=idle, what=seen(outcomes=without)) == ["it was saturated"]


def test_a_restart_is_found() -> None:
    assert failed(idle=replace(IDLE, restarts=1)) == ["no restart"]


def test_without_samples_nothing_holds() -> None:
    assert failed(under_load()[:3]) == ["there are samples"]


@pytest.mark.slow
def test_a_short_soak_of_a_tiny_model_holds_and_is_written_down(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3")
    settings = {"load_format": "auto", "threads": 1, "max_running_requests": 8, "max_queued_requests": 4}
    settings |= {"kv_cache_bytes": "1MiB"}
    options = ["--minutes", "0.25", "--sample-s", "0.5", "--max-prompt", "100", "--max-output", "100"]
    options += ["--silence-s", "30", "--gap-s", "60", "--json", str(tmp_path / "soak.json")]
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    printed = run_program("loadtest.gpu.soak", str(model), *options)
    written = json.loads((tmp_path / "soak.json").read_text())
    assert all(one["holds"] for one in written["checks"])
    assert written["seen"]["outcomes"]["complete"] > 10
    assert "| no page is lost | yes |" in printed
