"""The client's figures against a server that knows what it did: within 1 ms or 1%, from its own record.

Both clocks are read in one event loop. A busy machine may hold that up between the server's reading and the client's:
how long is measured too, must be below 1 ms mostly, and is what means and high percentiles may be later by.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from delay_server import DelayServer, Handled, Script

from loadtest import run as running
from loadtest import terminal
from loadtest.client import Target
from loadtest.driver import Seen
from loadtest.run import Options, run
from loadtest.scenario import Scenario, convert

NAMES = ("mean", "p50", "p90", "p95", "p99")


class Both:
    """A run's result, what the client saw (``seen``), and what the server did for each of its requests, by prompt."""

    def __init__(self, result: dict[str, Any], seen: Seen, server: DelayServer) -> None:
        self.result, self.seen, self.server = result, seen, server
        self.summary = result["summary"]
        did = {handled.prompt: handled for handled in server.handled}
        self.pairs = [
            (record.answer, did[b" ".join(record.turn.pieces).decode()])
            for record in seen.records
            if b" ".join(record.turn.pieces).decode() in did
        ]

    def held_up_s(self) -> float:
        """The longest from the server's reading of the clock to the client's; mostly it must be short, and is never
        negative."""
        late = [
            mine - its
            for answer, did in self.pairs
            for mine, its in zip((*answer.arrivals, answer.ended_s or 0.0), (*did.sent_s, did.ended_s), strict=True)
        ]
        assert min(late) >= 0
        assert np.percentile(late, 75) < 0.001
        return max(late)


def load(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, server: DelayServer, **options: Any) -> Both:
    kept: list[Seen] = []
    drive = running._drive

    async def keep(*arguments: Any) -> Seen:
        kept.append(await drive(*arguments))
        return kept[-1]

    monkeypatch.setattr(running, "_drive", keep)

    async def both() -> dict[str, Any]:
        async with server.running():
            return await run(scenario, Options(Target(server.url), metrics_url="", **options))

    result = asyncio.run(both())
    return Both(result, kept[0], server)


def scenario(**fields: Any) -> Scenario:
    return convert({"workload": {"input_tokens": 24, "output_tokens": 20}, "duration_s": 60.0, **fields})


def assert_agree(figures: dict[str, float], known: list[float], held_up_s: float) -> None:
    """``held_up_s``: the longest that anything took from the server's clock reading to the client's."""
    assert figures["count"] == len(known)
    expected = dict(zip(NAMES, [float(np.mean(known)), *np.percentile(known, (50, 90, 95, 99))], strict=True))
    for name in NAMES:
        allowed_s = max(0.001, 0.01 * expected[name], 0.0 if name == "p50" else held_up_s)
        assert figures[name] == pytest.approx(expected[name], abs=allowed_s), name
    assert figures["max"] == pytest.approx(max(known), abs=max(0.001, held_up_s))


def random_answers(seed: int) -> Callable[[dict[str, Any], int], Script]:
    """First tokens after 20 to 80 ms, then 19 gaps of 4 to 12 ms; every tenth answer stalls once for 0.2 s."""
    source = random.Random(seed)

    def script(_body: dict[str, Any], number: int) -> Script:
        gaps = [source.uniform(0.02, 0.08), *(source.uniform(0.004, 0.012) for _ in range(19))]
        if number % 10 == 0:
            gaps[10] = 0.2
        return Script(tuple(gaps))

    return script


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("load_spec", [{"kind": "open", "rate": 60}, {"kind": "closed", "concurrency": 12}])
def test_every_latency_is_what_the_server_did(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, load_spec: dict[str, Any]
) -> None:
    both = load(monkeypatch, scenario(endpoint=endpoint, load=load_spec, requests=90), DelayServer(random_answers(1)))
    one = both.summary
    assert (one["complete"], one["errors"], len(both.pairs)) == (90, {}, 90)
    held_up_s = both.held_up_s()
    assert_agree(one["ttft_s"], [did.sent_s[0] - answer.due_s for answer, did in both.pairs], held_up_s)
    assert_agree(one["tbt_s"], [gap for _, did in both.pairs for gap in np.diff(did.sent_s).tolist()], held_up_s)
    assert_agree(one["tpot_s"], [(did.sent_s[-1] - did.sent_s[0]) / 19 for _, did in both.pairs], held_up_s)
    assert_agree(one["e2e_s"], [did.ended_s - answer.due_s for answer, did in both.pairs], held_up_s)
    lasted_s = max(did.ended_s for _, did in both.pairs) - both.seen.start_s
    assert one["duration_s"] == pytest.approx(lasted_s, rel=0.01)
    assert one["requests_per_s"] == pytest.approx(90 / lasted_s, rel=0.01)
    assert one["output_tokens_per_s"] == pytest.approx(90 * 20 / lasted_s, rel=0.01)
    assert one["tokens"]["input"] == sum(24 for _ in both.pairs)
    assert (one["tokens"]["output"], one["tokens"]["output_counted_by"]) == (1800, "server")
    stalls = [gap for gap in one["tbt_s"].items() if gap[0] == "max" and gap[1] >= 0.199]
    assert stalls


def test_throughput_under_load_counts_what_arrived_before_the_load_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    both = load(
        monkeypatch, scenario(load={"kind": "open", "rate": 50}, duration_s=1.0), DelayServer(random_answers(2))
    )
    end_s = both.seen.start_s + 1.0
    sent = sum(moment < end_s for _, did in both.pairs for moment in did.sent_s)
    assert both.summary["output_tokens_per_s_under_load"] == pytest.approx(sent, rel=0.01, abs=3)
    assert sent < sum(len(did.sent_s) for _, did in both.pairs)


def test_an_open_loop_that_the_server_cannot_hold_shows_the_growing_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_at_a_time(_body: dict[str, Any], _number: int) -> Script:
        return Script((0.03,), queue=True)  # 33 a second at most

    spec = scenario(load={"kind": "open", "rate": 66, "gaps": "constant"}, requests=80)
    both = load(monkeypatch, spec, DelayServer(one_at_a_time))
    first = [did.sent_s[0] - answer.due_s for answer, did in both.pairs]
    assert_agree(both.summary["ttft_s"], first, both.held_up_s())
    assert both.summary["ttft_s"]["max"] >= 80 * 0.03 - 80 / 66  # it has waited for all before it
    assert np.mean(first[60:]) > 2 * np.mean(first[:20])
    assert max(did.received_s - answer.due_s for answer, did in both.pairs) < 0.5  # all were sent in time nevertheless
    assert both.summary["offered_requests_per_s"] == pytest.approx(66, rel=0.02)
    assert both.summary["requests_per_s"] < 34


def test_errors_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {"error": {"message": "full", "code": "rate_limit_exceeded"}}
    kinds = [
        Script((0.01, 0.01)),
        Script(status=429, error=full),
        Script(status=500, error=b"<html>no JSON</html>"),
        Script((0.01, 0.01), then="error", error={"message": "gone", "code": "engine_restarted"}),
        Script((0.01,), then="drop"),
        Script((), then="drop"),
        Script((0.01,), then="hang"),
    ]
    server = DelayServer(lambda _body, number: kinds[number % 7])
    spec = scenario(load={"kind": "open", "rate": 100}, requests=35, timeout_s=1.5)
    one = load(monkeypatch, spec, server).summary
    assert one["complete"] == 5
    assert one["errors"] == {
        "cut": 10, "refused 429 rate_limit_exceeded": 5, "refused 500": 5, "error engine_restarted": 5, "timeout": 5,
    }  # fmt: skip
    assert one["e2e_s"]["count"] == 5


def test_what_the_run_cuts_off_is_unfinished_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    server = DelayServer(lambda _body, number: Script((0.01,), then="hang" if number % 2 else "done"))
    spec = scenario(load={"kind": "open", "rate": 50}, requests=20, drain_s=0.3)
    one = load(monkeypatch, spec, server).summary
    assert (one["complete"], one["errors"]) == (10, {"unfinished": 10})
    assert "10 answers were cut off" in terminal.cut_off(one)


def test_nobody_listening_is_told_at_once() -> None:
    with pytest.raises(running.RunFailed, match="--model does without it"):
        asyncio.run(run(scenario(), Options(Target("http://127.0.0.1:9"), metrics_url="")))


def test_warm_up_is_no_part_of_any_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_at_first(_body: dict[str, Any], number: int) -> Script:
        return Script((0.4,) if number < 10 else (0.01,))

    spec = scenario(load={"kind": "open", "rate": 40, "gaps": "constant"}, requests=40)
    cold = load(monkeypatch, spec, DelayServer(slow_at_first)).summary
    assert cold["ttft_s"]["max"] >= 0.4
    for changes in ({"warmup_requests": 10}, {"warmup_s": 10 / 40 - 0.001}):
        warm = load(monkeypatch, msgspec.structs.replace(spec, **changes), DelayServer(slow_at_first)).summary
        assert (warm["warmup_requests"], warm["requests"]) == (10, 30)
        assert warm["ttft_s"]["max"] < 0.4


def test_goodput_counts_answers_that_keep_every_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        Script((0.01, 0.01, 0.01)),
        Script((0.5, 0.01, 0.01)),
        Script((0.01, 0.5, 0.01)),
        Script((), then="drop"),
    ]
    server = DelayServer(lambda _body, number: answers[number % 4])
    spec = scenario(load={"kind": "open", "rate": 40}, requests=40, slo={"ttft_ms": 300, "tbt_ms": 300})
    one = load(monkeypatch, spec, server).summary
    assert one["good_share"] == 0.25
    assert one["goodput_requests_per_s"] == pytest.approx(10 / one["duration_s"])


def test_a_conversation_repeats_what_was_said_and_thinks_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    server = DelayServer(lambda _body, _number: Script((0.01, 0.01)))
    work = {"input_tokens": 20, "output_tokens": 2, "turns": 3, "turn_tokens": 5, "think_s": 0.1}
    spec = scenario(workload=work, load={"kind": "closed", "concurrency": 3}, requests=3)
    both = load(monkeypatch, spec, server)
    talks: dict[str, list[Handled]] = {}
    for handled in server.handled:
        talks.setdefault(handled.body["messages"][0]["content"], []).append(handled)
    assert [len(talk) for talk in talks.values()] == [3, 3, 3]
    for talk in talks.values():
        assert [len(handled.body["messages"]) for handled in talk] == [1, 3, 5]
        assert talk[2].body["messages"][3] == {"role": "assistant", "content": " word word"}
        assert talk[1].body["messages"] == talk[2].body["messages"][:3]
        for before, after in itertools.pairwise(talk):
            assert after.received_s - before.ended_s >= 0.1
    assert both.summary["complete"] == 9
    assert both.summary["ttft_s"]["p50"] < 0.1  # thinking is nobody's latency


def test_a_server_without_usage_is_counted_by_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    server = DelayServer(lambda _body, _number: Script((0.01,) * 5))
    server.usage = False
    one = load(monkeypatch, scenario(load={"kind": "open", "rate": 50}, requests=10), server).summary
    assert (one["tokens"]["output"], one["tokens"]["output_counted_by"]) == (50, "client")
    assert one["tokens"]["input_counted_by"] == "server, for 0 answers"


def test_prompts_are_as_long_as_asked_with_the_template_around_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = DelayServer(lambda _body, _number: Script((0.01,)))
    spec = scenario(workload={"input_tokens": {"min": 10, "max": 400}, "output_tokens": 2},
                    load={"kind": "closed", "concurrency": 4}, requests=30)  # fmt: skip
    both = load(monkeypatch, spec, server, records=tmp_path / "records.jsonl")
    assert both.result["counting"]["template_tokens"] == 7
    assert both.summary["tokens"]["answers_with_another_input_length"] == 0
    assert both.summary["tokens"]["answers_with_another_output_length"] == 30  # the script says 1
    rows = [msgspec.json.decode(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    assert all(row["prompt_tokens"] == row["asked_prompt_tokens"] for row in rows)


def test_a_key_and_extra_fields_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = DelayServer(lambda _body, _number: Script())

    async def once() -> None:
        async with server.running():
            options = Options(Target(server.url + "/v1", api_key="secret"), metrics_url="")
            spec = scenario(requests=1, extra_body={"temperature": 0.5}, load={"kind": "closed", "concurrency": 1})
            await run(spec, options)

    asyncio.run(once())
    assert server.handled[0].authorization == "Bearer secret"
    assert server.handled[0].body["temperature"] == 0.5
    assert server.handled[0].body["ignore_eos"] is True
