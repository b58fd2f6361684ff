"""The load tester against a real server whose model computes nothing: lengths and cached tokens as it counts them."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.client import Target
from loadtest.run import Options, run
from loadtest.scenario import convert
from loadtest.served import Served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("served") / "log"
    settings = {
        "load_format": "null",
        "max_model_len": 4096,
        "kv_cache_bytes": "64MiB",
        "api_keys": "secret",
        "threads": 1,
    }
    with Served(smollm2, log, **settings) as served:
        served.wait_ready(60)
        yield served


def measured(server: Served, tmp_path: Path, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result, and its records."""
    spec = convert({"timeout_s": 60, **fields})
    records = tmp_path / "records.jsonl"
    options = Options(Target(f"http://127.0.0.1:{server.port}", api_key="secret"), sample_s=0.2, records=records,
                      metrics_url=f"http://127.0.0.1:{server.health_port}/metrics")  # fmt: skip
    result = asyncio.run(run(spec, options))
    return result, [json.loads(line) for line in records.read_text().splitlines()]


@pytest.mark.parametrize(("endpoint", "prompt"), [("chat", "text"), ("completions", "text"), ("completions", "tokens")])
def test_prompts_and_answers_are_as_long_as_asked_by_the_servers_own_count(
    server: Served, tmp_path: Path, endpoint: str, prompt: str
) -> None:
    work = {"input_tokens": {"min": 60, "max": 900}, "output_tokens": {"min": 1, "max": 60}}
    result, records = measured(server, tmp_path, endpoint=endpoint, prompt=prompt, workload=work, requests=40,
                               load={"kind": "closed", "concurrency": 8})  # fmt: skip
    tokens = result["summary"]["tokens"]
    assert (result["summary"]["complete"], result["summary"]["errors"]) == (40, {})
    assert tokens["answers_with_another_input_length"] == tokens["answers_with_another_output_length"] == 0
    assert tokens["input"] == sum(record["asked_prompt_tokens"] for record in records)
    assert len({record["prompt_tokens"] for record in records}) > 20


@pytest.mark.parametrize(("endpoint", "prompt"), [("chat", "text"), ("completions", "tokens")])
def test_a_replayed_trace_keeps_its_times_and_shares_what_its_hash_ids_promise(
    server: Served, tmp_path: Path, endpoint: str, prompt: str
) -> None:
    source = np.random.default_rng(3)
    rows, fresh, talks = [], 10_000, [[number] for number in range(6)]
    for place in range(120):
        talk = talks[int(source.integers(6))]
        talk[:] = [*talk[: int(source.integers(1, 5))], *range(fresh := fresh + 10, fresh + int(source.integers(1, 4)))]
        length = min(512 * len(talk) - int(source.integers(0, 400)), 5000)
        rows.append({"timestamp": 50 * place, "input_length": length, "output_length": 4, "hash_ids": talk.copy()})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result, records = measured(
        server, tmp_path, endpoint=endpoint, prompt=prompt, load={"kind": "replay", "speed": 2},
        workload={"kind": "trace", "format": "mooncake", "path": str(path)}, seed=hash(endpoint) % 1000,
    )  # fmt: skip
    tokens = result["summary"]["tokens"]
    assert result["dropped_too_long"] == sum(row["input_length"] + 4 > 4096 for row in rows)
    assert result["summary"]["complete"] == len(rows) - result["dropped_too_long"]
    assert tokens["answers_with_another_input_length"] == 0
    assert tokens["cached_promised"] > 10_000
    assert tokens["cached_where_promised"] == pytest.approx(tokens["cached_promised"], rel=0.02)
    kept = [row["timestamp"] / 2000 for row in rows if row["input_length"] + 4 <= 4096]
    assert [record["due_s"] for record in records] == pytest.approx(np.subtract(kept, kept[0]), abs=1e-5)
    late = [record["started_s"] - record["due_s"] for record in records]
    assert np.median(late) < 0.005
    assert min(late) >= 0
    server_line = result["server"]
    assert server_line["information"]["device"] == "cpu"
    # The server's counters come a moment after its answers.
    assert server_line["increase"]["prefix_hits"] == pytest.approx(tokens["cached"], rel=0.2)
    assert max(server_line["timeline"]["kv_usage"]) > 0


def test_what_the_server_refuses_is_counted_as_it_says(server: Served, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    path.write_text(
        "".join(json.dumps(body) + "\n" for body in (hello, {**hello, "temperature": 9}, {**hello, "nonsense": 1}))
    )
    result, _ = measured(server, tmp_path, workload={"kind": "requests", "path": str(path)},
                         load={"kind": "closed", "concurrency": 1})  # fmt: skip
    assert result["summary"]["complete"] == 1
    assert sum(result["summary"]["errors"].values()) == 2
    assert all(kind.startswith("refused 400") for kind in result["summary"]["errors"])
