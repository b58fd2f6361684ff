"""The open loop and its figures."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.figures import percentiles
from loadtest.replay import Replay, Row, Timed, fitting, prepare, read_trace, replay, summary, table
from loadtest.streams import CLOSED, COMPLETE, Stream


def test_a_trace_counts_from_its_first_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:16:00.0000000,1,1\n"
    )
    first, second = read_trace(path, 2)
    assert first == Row(0.0, 374, 44)
    assert second.due_s == pytest.approx(4.314579)
    assert (second.prompt_tokens, second.output_tokens) == (396, 109)


def test_rows_beyond_the_context_are_dropped() -> None:
    rows = [Row(0, 100, 28), Row(1, 100, 29)]
    assert fitting(rows, 128) == rows[:1]


def test_requests_have_the_lengths_of_the_trace_and_prompts_of_their_seed() -> None:
    rows = [Row(0.0, 3, 5), Row(8.0, 2, 1)]
    one, other = (prepare(rows, 4.0, seed=seed, vocabulary=50, temperature=0.6) for seed in (1, 2))
    assert [request.due_s for request in one] == [0.0, 2.0]
    assert one == prepare(rows, 4.0, seed=1, vocabulary=50, temperature=0.6)
    assert one != other
    body = json.loads(one[0].body)
    assert (len(body["prompt"]), body["max_tokens"], body["temperature"]) == (3, 5, 0.6)
    assert all(0 <= token < 50 for token in body["prompt"])


def test_arrivals_do_not_wait_for_a_server_that_never_answers() -> None:
    bodies: list[bytes] = []
    left: list[None] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        bodies.append(await reader.readexactly(length))
        with contextlib.suppress(ConnectionError):  # the client drops it
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        left.append(None)

    requests = [Timed(0.005 * k, b"%d" % k, 5) for k in range(20)] + [Timed(1000.0, b"never", 5)]

    async def use() -> Replay:
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            result = await replay(server.sockets[0].getsockname()[1], requests, limit_s=1.0)
            while len(left) < 20:
                await asyncio.sleep(0.01)
            return result

    result = asyncio.run(use())
    assert sorted(map(int, bodies)) == list(range(20))
    assert {stream.outcome for stream in result.streams} == {CLOSED}
    figures = summary(result, requests)
    assert (figures["complete"], figures["unfinished"], figures["not_sent"]) == (0, 20, 1)
    assert figures["stopped_early"] == "time limit: 20 unfinished, 1 not sent"
    assert figures["client"]["send_lag_s"]["count"] == 20
    assert "20 unfinished" in table({1.0: figures})


def seen(due_s: float, sent_s: float, *arrivals: float, tokens: int | None = None, outcome: str = COMPLETE) -> Stream:
    async def make() -> Stream:
        return Stream(b"")

    stream = asyncio.run(make())
    stream.due_s, stream.sent_s, stream.arrivals, stream.outcome = due_s, sent_s, list(arrivals), outcome
    stream.ended_s = arrivals[-1] if arrivals else sent_s
    stream.tokens, stream.endings = len(arrivals) if tokens is None else tokens, 1
    return stream


def figures(*streams: Stream, asked: tuple[int, ...], span_s: float, **changed: Any) -> dict[str, Any]:
    requests = [Timed(0.0, b"", count) for count in asked]
    requests[-1] = Timed(span_s, b"", asked[-1])
    fields: dict[str, Any] = {"start_s": 100.0, "duration_s": 10.0, "not_sent": 0, "tick_lags_s": [0.0], "cpu_s": 4.0}
    return summary(Replay(list(streams), **{**fields, **changed}), requests)


def test_latencies_count_from_when_a_request_was_due() -> None:
    one = figures(seen(100.0, 102.0, 103.0, 103.5, 105.5), seen(101.0, 101.0, 102.0), asked=(3, 1), span_s=1.0)
    assert one["time_to_first_token_s"]["max"] == 3.0
    assert one["time_to_first_token_s"]["p50"] == 2.0
    assert (one["time_between_tokens_s"]["count"], one["time_between_tokens_s"]["max"]) == (2, 2.0)
    assert one["end_to_end_s"]["max"] == 5.5
    assert one["duration_s"] == 5.5
    assert one["requests_per_s"] == pytest.approx(2 / 5.5)
    assert one["output_tokens_per_s"] == pytest.approx(4 / 5.5)


def test_the_tail_does_not_count_as_loaded() -> None:
    one = figures(seen(100.0, 100.0, 101.0, 102.0, 109.0, 110.0), asked=(4,), span_s=4.0)
    assert one["output_tokens_per_s_while_arriving"] == 2 / 4.0


def test_a_client_that_sends_late_is_called_the_bottleneck() -> None:
    on_time = [seen(100.0, 100.001, 101.0) for _ in range(10)]
    assert not figures(*on_time, asked=(1,) * 10, span_s=1.0)["client"]["is_bottleneck"]
    late = seen(100.0, 100.9, 101.0)
    one = figures(*on_time[1:], late, asked=(1,) * 10, span_s=1.0)
    assert one["client"]["is_bottleneck"]
    assert "(bottleneck)" in table({2.0: one})
    assert figures(*on_time, asked=(1,) * 10, span_s=1.0, tick_lags_s=[0.5] * 9)["client"]["is_bottleneck"]


def test_errors_are_counted_by_kind_and_wrong_lengths_seen() -> None:
    refused = [seen(100.0, 100.0, outcome="refused 429 rate_limit_exceeded") for _ in range(2)]
    one = figures(*refused, seen(100.0, 100.0, 101.0, tokens=7), asked=(5, 5, 8), span_s=1.0)
    assert one["errors"] == {"refused 429 rate_limit_exceeded": 2}
    assert (one["complete"], one["wrong_token_counts"], one["ended_once"]) == (1, 1, True)
    assert "1 of 3, 2 refused 429 rate_limit_exceeded" in table({1.0: one})


def test_percentiles_of_nothing_are_nothing() -> None:
    assert percentiles([]) == {}
    assert percentiles([1.0, 3.0])["mean"] == 2.0
