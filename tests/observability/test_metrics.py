"""Counting, sending, merging and exposing: what each process counted is what /metrics says, once."""

import re
import shutil
import subprocess
from typing import Any

import pytest
from api_service import make_config
from prometheus_client.parser import text_string_to_metric_families

from mizzen.config.config import Config, MetricsConfig
from mizzen.ipc.messages import Delta, Finish, Timings
from mizzen.observability.exposition import Merged
from mizzen.observability.feed import Feed, Histogram, Samples
from mizzen.observability.metrics import BY_NAME, MAX_KEYS, METRICS, VLLM_METRICS
from mizzen.observability.record import InferenceRecord, RequestRecord
from mizzen.observability.requests import RequestMetrics, key_names
from mizzen.sampling_params import SamplingParams

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 10.0
        return self.now


def make_feed(merged: Merged) -> Feed:
    def send(samples: Samples) -> bool:
        merged.add(samples)
        return True

    return Feed(send, clock=Clock())


def config(**metrics: Any) -> Config:
    base = make_config()
    return Config(**{f: getattr(base, f) for f in base.__struct_fields__} | {"metrics": MetricsConfig(**metrics)})


def series(merged: Merged) -> Series:
    """By name and labels, without those on all of them."""
    found: Series = {}
    for family in text_string_to_metric_families(merged.exposition().decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found, "a series twice"
            found[key] = sample.value
    return found


# ---- the table ----


def test_names_labels_and_help_keep_the_rules() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"mizzen_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert "replica" not in metric.labels
        if metric.kind == "histogram" and metric.name.endswith("_seconds"):
            assert metric.buckets[0] <= 0.001, f"{metric.name} is blind below a millisecond"


def test_every_vllm_histogram_can_be_made_from_its_source() -> None:
    for alias in VLLM_METRICS:
        assert set(alias.buckets) <= set(BY_NAME[alias.source].buckets), alias.name


# ---- feeds ----


def test_values_fall_into_prometheus_buckets() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]  # upper bounds are inclusive
    assert histogram.sum == 8.0


def test_a_feed_sends_differences_and_keeps_what_could_not_be_sent() -> None:
    sent: list[Samples] = []
    up = False

    def send(samples: Samples) -> bool:
        if up:
            sent.append(samples)
        return up

    feed = Feed(send, clock=Clock())
    feed.counter("mizzen_preemptions_total").add(3)
    feed.histogram("mizzen_step_tokens").observe(1)
    feed.flush()
    up = True
    feed.counter("mizzen_preemptions_total").add(2)
    feed.flush()
    feed.flush()
    assert [samples.counters for samples in sent] == [
        [("mizzen_preemptions_total", (), 5.0)],
        [("mizzen_preemptions_total", (), 0)],
    ]
    assert [len(samples.histograms) for samples in sent] == [1, 0]


def test_a_feed_sends_no_more_often_than_its_interval() -> None:
    sent: list[Samples] = []
    feed = Feed(lambda samples: sent.append(samples) is None, clock=lambda: 1.0)
    feed.flush()
    feed.flush()
    assert len(sent) == 1


def test_a_metric_with_wrong_labels_or_kind_is_a_bug_where_it_is_made() -> None:
    feed = Feed(lambda _: True)
    with pytest.raises(AssertionError):
        feed.counter("mizzen_requests_finished_total")
    with pytest.raises(AssertionError):
        feed.gauge("mizzen_preemptions_total")
    with pytest.raises(KeyError):
        feed.counter("mizzen_unheard_of_total")


# ---- merging ----


def test_counters_of_two_workers_add_up_and_gauges_are_the_last() -> None:
    merged = Merged(config())
    first, second = make_feed(merged), make_feed(merged)
    for feed, count in ((first, 2), (second, 5)):
        feed.counter("mizzen_requests_finished_total", "stop").add(count)
        feed.histogram("mizzen_time_to_first_token_seconds").observe(0.03, count)
        feed.gauge("mizzen_requests_running").set(count)
        feed.flush()
    found = series(merged)
    assert found["mizzen_requests_finished_total", (("reason", "stop"),)] == 7
    assert found["mizzen_time_to_first_token_seconds_count", ()] == 7
    assert found["mizzen_time_to_first_token_seconds_sum", ()] == pytest.approx(0.21)
    assert found["mizzen_requests_running", ()] == 5


def test_every_declared_metric_is_exposed_from_the_start() -> None:
    text = Merged(config()).exposition().decode()
    for metric in METRICS:
        assert f"# TYPE {metric.name} {metric.kind}" in text
        assert f"# HELP {metric.name} {metric.help}" in text
    found = series(Merged(config()))
    assert found["mizzen_requests_waiting", (("reason", "kv_pages"),)] == 0
    assert found["mizzen_inter_token_latency_seconds_bucket", (("le", "+Inf"),)] == 0


# ---- vLLM's names ----

VLLM_SERIES = [
    "vllm:cache_config_info{block_size,cache_dtype,enable_prefix_caching,engine,gpu_memory_utilization,num_gpu_blocks}",
    "vllm:e2e_request_latency_seconds_bucket{engine,le,model_name}",
    "vllm:e2e_request_latency_seconds_count{engine,model_name}",
    "vllm:e2e_request_latency_seconds_sum{engine,model_name}",
    "vllm:generation_tokens_total{engine,model_name}",
    "vllm:inter_token_latency_seconds_bucket{engine,le,model_name}",
    "vllm:inter_token_latency_seconds_count{engine,model_name}",
    "vllm:inter_token_latency_seconds_sum{engine,model_name}",
    "vllm:iteration_tokens_total_bucket{engine,le,model_name}",
    "vllm:iteration_tokens_total_count{engine,model_name}",
    "vllm:iteration_tokens_total_sum{engine,model_name}",
    "vllm:kv_cache_usage_perc{engine,model_name}",
    "vllm:num_preemptions_total{engine,model_name}",
    "vllm:num_requests_running{engine,model_name}",
    "vllm:num_requests_waiting{engine,model_name}",
    "vllm:prefix_cache_hits_total{engine,model_name}",
    "vllm:prefix_cache_queries_total{engine,model_name}",
    "vllm:prompt_tokens_total{engine,model_name}",
    "vllm:request_decode_time_seconds_bucket{engine,le,model_name}",
    "vllm:request_decode_time_seconds_count{engine,model_name}",
    "vllm:request_decode_time_seconds_sum{engine,model_name}",
    "vllm:request_generation_tokens_bucket{engine,le,model_name}",
    "vllm:request_generation_tokens_count{engine,model_name}",
    "vllm:request_generation_tokens_sum{engine,model_name}",
    "vllm:request_prefill_time_seconds_bucket{engine,le,model_name}",
    "vllm:request_prefill_time_seconds_count{engine,model_name}",
    "vllm:request_prefill_time_seconds_sum{engine,model_name}",
    "vllm:request_prompt_tokens_bucket{engine,le,model_name}",
    "vllm:request_prompt_tokens_count{engine,model_name}",
    "vllm:request_prompt_tokens_sum{engine,model_name}",
    "vllm:request_queue_time_seconds_bucket{engine,le,model_name}",
    "vllm:request_queue_time_seconds_count{engine,model_name}",
    "vllm:request_queue_time_seconds_sum{engine,model_name}",
    "vllm:request_success_total{engine,finished_reason,model_name}",
    "vllm:request_time_per_output_token_seconds_bucket{engine,le,model_name}",
    "vllm:request_time_per_output_token_seconds_count{engine,model_name}",
    "vllm:request_time_per_output_token_seconds_sum{engine,model_name}",
    "vllm:time_to_first_token_seconds_bucket{engine,le,model_name}",
    "vllm:time_to_first_token_seconds_count{engine,model_name}",
    "vllm:time_to_first_token_seconds_sum{engine,model_name}",
]
VLLM_TTFT_BUCKETS = [
    "0.001",
    "0.005",
    "0.01",
    "0.02",
    "0.04",
    "0.06",
    "0.08",
    "0.1",
    "0.25",
    "0.5",
    "0.75",
    "1.0",
    "2.5",
    "5.0",
    "7.5",
    "10.0",
    "20.0",
    "40.0",
    "80.0",
    "160.0",
    "640.0",
    "2560.0",
    "+Inf",
]


def test_the_vllm_names_and_labels_are_those_that_tools_read() -> None:
    merged = Merged(config())
    make = make_feed(merged)
    make.gauge("mizzen_kv_cache_capacity_pages").set(64)
    make.flush()
    families = text_string_to_metric_families(merged.exposition().decode())
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    assert sorted({f"{s.name}{{{','.join(sorted(s.labels))}}}" for s in samples}) == VLLM_SERIES
    assert all(s.labels["engine"] == "0" and s.labels.get("model_name", "tiny") == "tiny" for s in samples)
    bounds = [s.labels["le"] for s in samples if s.name == "vllm:time_to_first_token_seconds_bucket"]
    assert bounds == VLLM_TTFT_BUCKETS
    info = next(s for s in samples if s.name == "vllm:cache_config_info")
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("16", "64")


def test_vllm_metrics_mean_what_vllms_do() -> None:
    merged = Merged(config())
    feed = make_feed(merged)
    for reason, count in (("slots", 3), ("preempted", 1)):
        feed.gauge("mizzen_requests_waiting", reason).set(count)
    feed.gauge("mizzen_kv_cache_usage_ratio").set(0.25)
    for reason in ("error", "timeout", "timeout", "stop"):
        feed.counter("mizzen_requests_finished_total", reason).add()
    for seconds in (0.0015, 0.002, 0.0055, 0.3, 9000.0):
        feed.histogram("mizzen_time_to_first_token_seconds").observe(seconds)
    feed.flush()
    found = series(merged)
    assert found["vllm:num_requests_waiting", ()] == 4
    assert found["vllm:kv_cache_usage_perc", ()] == 0.25
    assert found["vllm:request_success_total", (("finished_reason", "error"),)] == 3
    assert found["vllm:request_success_total", (("finished_reason", "stop"),)] == 1
    buckets = {le: found["vllm:time_to_first_token_seconds_bucket", (("le", le),)] for le in VLLM_TTFT_BUCKETS}
    assert [buckets[le] for le in ("0.001", "0.005", "0.01", "0.25", "0.5", "2560.0", "+Inf")] == [0, 2, 3, 3, 4, 4, 5]


def test_one_setting_drops_the_vllm_names() -> None:
    assert "vllm:" in Merged(config()).exposition().decode()
    assert "vllm:" not in Merged(config(vllm=False)).exposition().decode()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_criticise() -> None:
    exposition = Merged(config(vllm=False)).exposition()
    done = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ---- requests ----


def finished(reason: Any = "length", completion: int = 3, error: Any = None) -> Finish:
    return Finish(reason, 7, completion, 4, error=error, timings=Timings(0.0, None, None, 1.0, 1.5, 2.0, 4.0))


class Requests:
    def __init__(self, *keys: str) -> None:
        self.merged = Merged(config())
        self.feed = make_feed(self.merged)
        self.metrics = RequestMetrics(self.feed, keys)

    def admitted(self, choices: int = 1) -> RequestRecord:
        record = RequestRecord("POST", "/v1/completions", "id", 0.0, self.metrics.on_request_end)
        sampling = SamplingParams(n=choices)
        inference = InferenceRecord("text_completion", "tiny", sampling, True, 1, choices)
        inference.pace = self.metrics.pace(record, inference)
        record.inference, record.status, record.route = inference, 200, "/v1/completions"
        record.admit()
        record.accept([7])
        return record

    def say(self, record: RequestRecord, *deltas: Delta) -> None:
        assert record.inference is not None
        assert record.inference.pace is not None
        record.inference.pace.add(list(deltas))

    def found(self) -> Series:
        self.metrics.flush()
        return series(self.merged)


def test_tokens_are_counted_as_they_pass_and_once_in_all() -> None:
    requests = Requests()
    record = requests.admitted()
    requests.say(record, Delta("id", 0, "a", 1))
    requests.say(record, Delta("id", 0, "bc", 2))
    found = requests.found()
    assert found["mizzen_prompt_tokens_total", ()] == 7
    assert found["mizzen_generation_tokens_total", ()] == 3
    assert found["mizzen_inter_token_latency_seconds_count", ()] == 2  # two tokens share one gap
    assert found["mizzen_requests_finished_total", (("reason", "length"),)] == 0
    record.finish(0, finished(completion=4))  # the fourth had no text
    record.http_done()
    found = requests.found()
    assert found["mizzen_prompt_tokens_total", ()] == 7
    assert found["mizzen_generation_tokens_total", ()] == 4
    assert found["mizzen_cached_prompt_tokens_total", ()] == 4
    assert found["mizzen_requests_finished_total", (("reason", "length"),)] == 1
    assert found["mizzen_request_queue_time_seconds_sum", ()] == 0.5
    assert found["mizzen_request_prefill_time_seconds_sum", ()] == 0.5
    assert found["mizzen_request_decode_time_seconds_sum", ()] == 2.0
    assert found["mizzen_time_per_output_token_seconds_sum", ()] == pytest.approx(2 / 3)
    assert found["mizzen_http_responses_total", (("route", "/v1/completions"), ("status", "200"))] == 1


@pytest.mark.parametrize("choices", [1, 2])
def test_tokens_handed_over_together_share_their_gap_evenly(choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1000.0, 1000.25, 1000.5])
    requests = Requests()
    record = requests.admitted(choices)
    monkeypatch.setattr("mizzen.observability.requests.monotonic", lambda: next(now))
    everyone = range(choices)
    requests.say(record, *(Delta("id", index, "a", 1) for index in everyone for _ in range(2)))  # the second has no gap
    requests.say(record, *(Delta("id", index, "", 0) for index in everyone))
    requests.say(record, *(Delta("id", index, "a", 1) for _ in range(5) for index in everyone))
    found = requests.found()
    assert found["mizzen_generation_tokens_total", ()] == 7 * choices
    assert found["mizzen_time_to_first_token_seconds_count", ()] == choices
    assert found["mizzen_inter_token_latency_seconds_sum", ()] == 0.5 * choices
    least, each = (found["mizzen_inter_token_latency_seconds_bucket", (("le", le),)] for le in ("0.001", "0.1"))
    assert (least, each) == (choices, 6 * choices)  # five of 0.1 s


def test_a_client_that_left_counts_as_aborted_by_choice_and_not_as_a_duration() -> None:
    requests = Requests()
    record = requests.admitted(choices=2)
    requests.say(record, Delta("id", 0, "a", 1))
    record.client_gone = True
    record.http_done()
    for index in range(2):
        record.finish(index, finished("abort", completion=1))
    found = requests.found()
    assert found["mizzen_requests_finished_total", (("reason", "abort"),)] == 2
    assert found["mizzen_requests_aborted_total", ()] == 2
    assert found["mizzen_prompt_tokens_total", ()] == 14
    assert found["mizzen_generation_tokens_total", ()] == 2
    assert found["mizzen_request_duration_seconds_count", ()] == 0


def test_an_engine_that_died_makes_an_error_of_every_choice() -> None:
    from mizzen.errors import EngineRestarted

    requests = Requests()
    record = requests.admitted(choices=2)
    record.error = EngineRestarted("gone").wire()
    record.engine_done()
    record.http_done()
    assert requests.found()["mizzen_requests_finished_total", (("reason", "error"),)] == 2


def test_a_refusal_counts_by_its_code_and_not_as_finished() -> None:
    from mizzen.errors import QueueFull, RequestTooLong

    requests = Requests()
    full = RequestRecord(
        "POST", "/v1/completions", "id", 0.0, requests.metrics.on_request_end, error=QueueFull("").wire()
    )
    full.http_done()
    long = requests.admitted()
    assert long.inference is not None
    long.inference.accepted_s = None
    long.error = RequestTooLong(10, 5, param="prompt").wire()
    long.engine_done()
    long.http_done()
    found = requests.found()
    assert found["mizzen_requests_rejected_total", (("reason", "rate_limit_exceeded"),)] == 1
    assert found["mizzen_requests_rejected_total", (("reason", "context_length_exceeded"),)] == 1
    assert sum(value for (name, _), value in found.items() if name == "mizzen_requests_finished_total") == 0


def test_use_is_counted_by_key_without_showing_keys_and_with_bounded_names() -> None:
    keys = [f"secret-{number}" for number in range(MAX_KEYS + 50)]
    names = key_names(keys)
    assert len(names) == len(keys) + 1
    assert len(set(names)) == MAX_KEYS + 2  # and "none", and "other"
    assert not any("secret" in name for name in names)
    requests = Requests(*keys)
    for number in (1, MAX_KEYS + 1, MAX_KEYS + 50):
        record = requests.admitted()
        record.api_key = number
        record.finish(0, finished())
        record.http_done()
    found = requests.found()
    assert found["mizzen_key_requests_total", (("key", names[1]),)] == 1
    assert found["mizzen_key_requests_total", (("key", "other"),)] == 2
    assert found["mizzen_key_tokens_total", (("key", "other"), ("type", "generation"))] == 6
    assert found["mizzen_key_tokens_total", (("key", "other"), ("type", "prompt"))] == 14
