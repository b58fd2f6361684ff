"""loadtest.gpu.step_times: steps by kind, and in the order of time."""

from loadtest.gpu.step_times import Step, by_kind, timeline

DECODE = [Step(rows, rows, rows, 0.004, 0.003) for rows in (1, 32, 33)]
MIXED = [Step(9, 8, tokens, 0.010, 0.010) for tokens in (512, 513, 4096)]


def test_steps_are_grouped_by_rows_or_by_tokens_if_they_prefill() -> None:
    kinds = by_kind(DECODE + MIXED)
    assert {kind: mean["steps"] for kind, mean in kinds.items()} == {
        "decode   32": 2,
        "decode   64": 1,
        "mixed <=512": 1,
        "mixed <=2048": 1,
        "mixed > 2048": 1,
    }
    assert kinds["decode   32"] == {
        "steps": 2,
        "rows": 16.5,
        "decode_rows": 16.5,
        "tokens": 16.5,
        "ms": 4.0,
        "waiting": 0.75,
    }


def test_a_timeline_holds_every_step_once() -> None:
    groups = timeline(DECODE + MIXED + DECODE, 4)
    assert [(group["first"], group["steps"]) for group in groups] == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 1)]
    assert groups[1]["ms"] == 7.0


def test_a_timeline_of_few_steps_has_one_group_a_step() -> None:
    assert [group["tokens"] for group in timeline(DECODE, 24)] == [1.0, 32.0, 33.0]
