"""What /metrics says of a real server is what its clients saw: counts exactly, times within 5% or a bucket."""

import asyncio
import collections
import contextlib
import json
import os
import signal
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mizzen.observability.metrics import BY_NAME
from service.running import Server

pytestmark = pytest.mark.slow
STREAMS = 500
AT_ONCE = 24
TOKENS = 5
QUANTILES = (0.5, 0.9, 0.99)
Metrics = dict[str, dict[tuple[str, ...], float]]  # name -> values of the labels that not all have -> value


def scrape(url: str) -> Metrics:
    answer = httpx.get(f"{url}/metrics", timeout=10)
    assert answer.status_code == 200, answer.text
    found: Metrics = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = tuple(v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def total(metrics: Metrics, name: str, *labels: str) -> float:
    return metrics.get(name, {}).get(labels, 0.0)


@contextlib.contextmanager
def running(model: Path, folder: Path, **settings: Any) -> Iterator[Server]:
    server = Server(model, folder, **settings)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


class Client:
    """Streams by hand, so that its own time is little. Notes when text arrives."""

    def __init__(self, server: Server) -> None:
        self._port = server.port
        self.first_s: list[float] = []
        self.gaps_s = 0.0
        self.gaps = 0
        self.each_gap_s: list[float] = []  # those between events that arrived together share theirs
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.prompt_tokens = 0
        self.completion_tokens = 0

    async def stream(self, prompt: str, max_tokens: int, leave_after: int | None = None) -> None:
        """``leave_after``: hang up after so many reads with text."""
        fields = {"model": "test-model", "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0,
                  "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
        body = json.dumps(fields).encode()
        began_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        arrivals: list[float] = []
        gaps_s: list[float] = []
        text = b""
        while data := await reader.read(65_536):
            text += data
            if events := data.count(b'"text":"') - data.count(b'"text":""'):  # the last one may only tell the reason
                arrivals.append(time.monotonic())
                if len(arrivals) > 1:
                    gaps_s += [(arrivals[-1] - arrivals[-2]) / events] * events
                if leave_after is not None and len(arrivals) >= leave_after:
                    break
        writer.close()
        if leave_after is not None:
            self.outcomes["abort"] += 1
            return
        events = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: {")]
        if "error" in events[-1]:
            self.outcomes[events[-1]["error"]["code"]] += 1
            return
        usage = events[-1]["usage"]
        self.outcomes[events[-2]["choices"][0]["finish_reason"]] += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.first_s.append(arrivals[0] - began_s)
        self.gaps_s += arrivals[-1] - arrivals[0]
        self.each_gap_s += gaps_s
        self.gaps += usage["completion_tokens"] - 1

    async def streams(self, count: int, **fields: Any) -> None:
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with limit:
                await self.stream(f"Number {number} of {count} says", **fields)

        await asyncio.gather(*(one(number) for number in range(count)))


def until(server: Server, ended: int) -> Metrics:
    """The metrics once they know of ``ended`` answers, and of no more a second later."""
    deadline = time.monotonic() + 10
    while sum((metrics := scrape(server.url))["mizzen_requests_finished_total"].values()) < ended:
        assert time.monotonic() < deadline, metrics["mizzen_requests_finished_total"]
        time.sleep(0.1)
    time.sleep(1.0)
    return scrape(server.health_url)


def bucket(name: str, value: float) -> int:
    return bisect_left(BY_NAME[name].buckets, value)


def at(quantile: float, values: list[float]) -> float:
    return sorted(values)[int(quantile * (len(values) - 1))]


def quantile_bucket(metrics: Metrics, name: str, quantile: float) -> int:
    """The index of the bucket in which the quantile lies."""
    counts = [metrics[f"{name}_bucket"][le,] for le in sorted((k for (k,) in metrics[f"{name}_bucket"]), key=float)]
    return next(index for index, count in enumerate(counts) if count >= quantile * counts[-1])


@pytest.mark.timeout(420)
def test_counts_equal_the_clients_exactly_and_times_nearly(smollm2: Path, tmp_path: Path) -> None:
    with running(smollm2, tmp_path, api_workers=2, max_model_len=1024) as server:
        client = Client(server)
        asyncio.run(client.streams(STREAMS, max_tokens=TOKENS))
        assert client.outcomes == {"length": STREAMS}

        metrics = until(server, STREAMS)
        assert metrics["mizzen_requests_finished_total"]["length",] == STREAMS
        assert total(metrics, "mizzen_prompt_tokens_total") == client.prompt_tokens
        assert total(metrics, "mizzen_generation_tokens_total") == client.completion_tokens
        name = "mizzen_time_to_first_token_seconds"
        assert total(metrics, f"{name}_count") == STREAMS
        mean = total(metrics, f"{name}_sum") / STREAMS
        print("ttft", mean, sum(client.first_s) / STREAMS)
        assert mean == pytest.approx(sum(client.first_s) / STREAMS, rel=0.05)
        for quantile in QUANTILES:
            seen = bucket(name, at(quantile, client.first_s))
            assert abs(quantile_bucket(metrics, name, quantile) - seen) <= 1
        name = "mizzen_inter_token_latency_seconds"
        assert total(metrics, f"{name}_count") == client.gaps
        mean = total(metrics, f"{name}_sum") / client.gaps
        print("tbt", mean, client.gaps_s / client.gaps)
        assert mean == pytest.approx(client.gaps_s / client.gaps, rel=0.05)
        assert len(client.each_gap_s) == pytest.approx(client.gaps, rel=0.02)
        for quantile in QUANTILES:
            # One pause is a gap of all AT_ONCE streams, 1% of all gaps: a percentile may lie on its edge.
            least, most = (bucket(name, at(quantile + shift, client.each_gap_s)) for shift in (-0.006, 0.006))
            assert least - 1 <= quantile_bucket(metrics, name, quantile) <= most + 1, quantile
        assert total(metrics, "mizzen_steps_total", "eager") == total(metrics, "mizzen_step_tokens_count")
        for steps in ("mizzen_step_duration_seconds_count", "mizzen_step_tokens_count"):
            assert total(metrics, steps) == total(metrics, "mizzen_step_host_time_seconds_count")
        # A prompt's tokens, found in the cache or not, and all but the last token of each answer are computed.
        computed = client.prompt_tokens + client.completion_tokens - STREAMS
        hits = total(metrics, "mizzen_prefix_cache_hits_total")
        assert total(metrics, "mizzen_prefix_cache_queries_total") == client.prompt_tokens
        assert total(metrics, "mizzen_cached_prompt_tokens_total") == hits
        assert total(metrics, "mizzen_step_tokens_sum") == computed - hits

        # ---- what goes wrong ----
        assert [server.complete(n=2, max_tokens=3, ignore_eos=True).status_code for _ in range(5)] == [200] * 5
        assert [server.complete(model="other").status_code for _ in range(3)] == [404] * 3
        assert [server.complete([1] * 2000).status_code for _ in range(2)] == [400] * 2
        asyncio.run(client.streams(6, max_tokens=900, leave_after=2))

        async def streams_and_kill() -> None:
            streams = asyncio.create_task(client.streams(4, max_tokens=900))
            while scrape(server.url)["mizzen_requests_running"][()] < 4:
                await asyncio.sleep(0.1)
            os.kill(server.pids()["engine-0"], signal.SIGKILL)
            await streams

        asyncio.run(streams_and_kill())
        assert client.outcomes == {"length": STREAMS, "abort": 6, "engine_restarted": 4}
        server.wait_ready()
        assert server.complete(max_tokens=3, ignore_eos=True).status_code == 200

        metrics = until(server, STREAMS + 10 + 6 + 4 + 1)
        finished = {"stop": 0, "length": STREAMS + 10 + 1, "abort": 6, "timeout": 0, "error": 4}
        assert metrics["mizzen_requests_finished_total"] == {(reason,): n for reason, n in finished.items()}
        assert metrics["mizzen_requests_aborted_total"][()] == 6
        rejected = {key: n for key, n in metrics["mizzen_requests_rejected_total"].items() if n}
        assert rejected == {("model_not_found",): 3, ("context_length_exceeded",): 2}
        responses = metrics["mizzen_http_responses_total"]
        assert {key: n for key, n in responses.items() if key[0] == "/v1/completions"} == {
            ("/v1/completions", "200"): STREAMS + 5 + 6 + 4 + 1,
            ("/v1/completions", "404"): 3,
            ("/v1/completions", "400"): 2,
        }
        assert metrics["mizzen_process_restarts_total"]["engine",] == 1
        assert metrics["mizzen_key_requests_total"]["none",] == STREAMS + 5 + 6 + 4 + 1
        assert metrics["vllm:request_success_total"]["error",] == 4


def test_a_killed_metrics_process_ends_no_request_and_no_readiness(smollm2: Path, tmp_path: Path) -> None:
    with running(smollm2, tmp_path, load_format="null", max_restarts=0) as server:
        stream = server.stream(prompt="Hello", max_tokens=1500, ignore_eos=True)
        next(stream)
        for _ in range(2):  # once more than MIZZEN_MAX_RESTARTS allows others
            os.kill(server.pids()["metrics"], signal.SIGKILL)
            deadline = time.monotonic() + 15
            while True:
                assert server.health()[0] == 200
                assert time.monotonic() < deadline
                answer = httpx.get(f"{server.url}/metrics", timeout=10)
                if answer.status_code == 200 and "metrics" in server.pids():
                    break
                assert answer.status_code == 503
                assert answer.text.startswith("The metrics process does not answer")
                time.sleep(0.05)
        events = list(stream)
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.complete(max_tokens=3).status_code == 200
        time.sleep(1.0)
        for url in (server.url, server.health_url):
            assert scrape(url)["mizzen_requests_finished_total"]["length",] >= 1


def test_metrics_need_a_key_only_if_a_setting_says_so(smollm2: Path, tmp_path: Path) -> None:
    for required, status in (("false", 200), ("true", 401)):
        folder = tmp_path / required
        folder.mkdir()
        with running(
            smollm2, folder, load_format="null", api_keys="k1,k2", metrics_require_key=required, host="127.0.0.1"
        ) as server:
            for url in (server.url, server.health_url):
                assert httpx.get(f"{url}/metrics").status_code == status
                assert httpx.get(f"{url}/metrics", headers={"authorization": "Bearer k2"}).status_code == 200


def test_without_metrics_there_is_no_process_and_no_page(smollm2: Path, tmp_path: Path) -> None:
    with running(smollm2, tmp_path, load_format="null", metrics="false") as server:
        assert "metrics" not in server.pids()
        assert server.complete(max_tokens=3).status_code == 200
        for url in (server.url, server.health_url):
            assert httpx.get(f"{url}/metrics").status_code == 404
