"""Every panel of every dashboard, once. ``generate.py`` makes Grafana's JSON of it; a test runs each query.

Queries are PromQL with three shorthands, so that no panel forgets the dashboard's variables: ``{@}`` selects the chosen
models and instances, ``{@,status="500"}`` adds to that, and ``[R]`` is Grafana's rate interval.
"""

from dataclasses import dataclass
from typing import Literal

SELECTOR = 'model_name=~"$model",instance=~"$instance"'
TTFT_SLO, TBT_SLO = "1.0", "0.1"  # seconds, as the label ``le`` writes them; docker/prometheus has the same
INFERENCE = 'route=~"/v1/(chat/)?completions"'
QUANTILES = (0.5, 0.9, 0.99)

Kind = Literal["timeseries", "heatmap", "stat", "table"]


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""

    @property
    def expression(self) -> str:
        """As Grafana gets it."""
        return self.expr.replace("{@", "{" + SELECTOR).replace("[R]", "[$__rate_interval]")


@dataclass(frozen=True)
class Panel:
    """``columns``: thirds of the width. ``thresholds``: (from this value, this colour), ascending."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    columns: int = 1
    stacked: bool = False
    minimum: float | None = 0
    maximum: float | None = None
    thresholds: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """``variables``: (name, label, query), each a choice of several."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[tuple[str, str, str], ...] = (
        ("model", "Model", "label_values(mizzen_ready, model_name)"),
        ("instance", "Instance", 'label_values(mizzen_ready{model_name=~"$model"}, instance)'),
    )


# ---- shapes that recur ----


def rate(metric: str, by: str = "", matchers: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{{@{',' + matchers if matchers else ''}}}[R]))"


def mean(histogram: str) -> str:
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def percentiles(title: str, description: str, histogram: str, unit: str = "s") -> Panel:
    buckets = rate(f"{histogram}_bucket", "le")
    queries = [Query(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in QUANTILES]
    return Panel(title, description, (*queries, Query(mean(histogram), "mean")), unit)


def heatmap(title: str, description: str, histogram: str, unit: str = "s") -> Panel:
    query = Query(f"sum by (le) (increase({histogram}_bucket{{@}}[R]))", "{{le}}")
    return Panel(title, description, (query,), unit, "heatmap", minimum=None)


def within(histogram: str, bound: str, window: str = "[R]") -> str:
    """The share of observations not above ``bound``, one of the histogram's."""
    good = f'sum (rate({histogram}_bucket{{@,le="{bound}"}}{window}))'
    return f"{good} / sum (rate({histogram}_count{{@}}{window}))"


def stat(title: str, description: str, expr: str, unit: str = "short", *thresholds: tuple[float, str]) -> Panel:
    return Panel(title, description, (Query(expr),), unit, "stat", minimum=None, thresholds=thresholds)


TTFT, TBT = "mizzen_time_to_first_token_seconds", "mizzen_inter_token_latency_seconds"
E2E, TPOT = "mizzen_request_duration_seconds", "mizzen_time_per_output_token_seconds"
QUEUE, PREFILL, DECODE = (f"mizzen_request_{part}_time_seconds" for part in ("queue", "prefill", "decode"))
STEP, HOST, STEP_TOKENS = "mizzen_step_duration_seconds", "mizzen_step_host_time_seconds", "mizzen_step_tokens"
RESPONSES = "mizzen_http_responses_total"
SERVER_ERROR = f'{INFERENCE},status=~"5.."'
FAILED = f"{rate(RESPONSES, matchers=SERVER_ERROR)} / {rate(RESPONSES, matchers=INFERENCE)}"

BY_GPU, GPU = "max by (instance, rank, gpu)", "{{instance}} rank {{rank}}, GPU {{gpu}}"

GOOD_IF_HIGH = ((0, "red"), (0.95, "orange"), (0.99, "green"))
GOOD_IF_LOW = ((0, "green"), (0.01, "orange"), (0.05, "red"))
YES_IS_GOOD = ((0, "red"), (1, "green"))
ZERO_IS_GOOD = ((0, "green"), (1, "orange"))

OVERVIEW = Dashboard(
    "overview",
    "Overview",
    "Is it well? Traffic, errors, latency, saturation, service levels.",
    (
        Row(
            "Now",
            (
                stat("Ready", "Replicas that are ready.", "sum (mizzen_ready{@})", "short", *YES_IS_GOOD),
                stat("Requests", "Responses to inference requests.", rate(RESPONSES, matchers=INFERENCE), "reqps"),
                stat("Output", "Tokens generated.", rate("mizzen_generation_tokens_total"), "short"),
                stat("Running", "Requests in the batches.", "sum (mizzen_requests_running{@})"),
                stat("Waiting", "Requests that wait in the engines.", "sum (mizzen_requests_waiting{@})"),
                stat("Server errors", "Share of 5xx among inference responses.", FAILED, "percentunit", *GOOD_IF_LOW),
            ),
        ),
        Row(
            "Traffic",
            (
                Panel(
                    "Responses by route",
                    "HTTP responses of the api port.",
                    (Query(rate(RESPONSES, "route"), "{{route}}"),),
                    "reqps",
                ),
                Panel(
                    "Tokens",
                    "Prompt tokens, those of them found in the prefix cache, and generated ones.",
                    (
                        Query(rate("mizzen_prompt_tokens_total"), "prompt"),
                        Query(rate("mizzen_cached_prompt_tokens_total"), "prompt, cached"),
                        Query(rate("mizzen_generation_tokens_total"), "generated"),
                    ),
                ),
                Panel(
                    "Tokens by key",
                    "The ten busiest API keys, by their hashes.",
                    (Query(f"topk(10, {rate('mizzen_key_tokens_total', 'key')})", "{{key}}"),),
                ),
                Panel(
                    "Endings",
                    "Accepted answers, by how they ended. abort: the client left.",
                    (Query(rate("mizzen_requests_finished_total", "reason"), "{{reason}}"),),
                    "reqps",
                ),
                Panel(
                    "Requests by key",
                    "The ten API keys that ask most often.",
                    (Query(f"topk(10, {rate('mizzen_key_requests_total', 'key')})", "{{key}}"),),
                    "reqps",
                ),
            ),
        ),
        Row(
            "Errors",
            (
                Panel(
                    "Responses by status",
                    "Responses to inference requests. A stream that fails later has the status 200: see Endings.",
                    (Query(rate(RESPONSES, "status", INFERENCE), "{{status}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Refused",
                    "Requests refused before any work, by the error's code.",
                    (Query(rate("mizzen_requests_rejected_total", "reason"), "{{reason}}"),),
                    "reqps",
                ),
                Panel(
                    "Failures",
                    "Accepted answers that ended by an error or the timeout, and clients that left.",
                    (
                        Query(
                            rate("mizzen_requests_finished_total", "reason", 'reason=~"error|timeout"'), "{{reason}}"
                        ),
                        Query(rate("mizzen_requests_aborted_total"), "client left"),
                    ),
                    "reqps",
                ),
            ),
        ),
        Row(
            "Latency",
            (
                percentiles("Time to first token", "From arrival at the api, queueing included.", TTFT),
                percentiles("Time between tokens", "Of streams, as the api writes them.", TBT),
                percentiles("End to end", "Of answers that finished.", E2E),
                heatmap("Time to first token, all", "Requests by their time to first token.", TTFT),
                heatmap("Time between tokens, all", "Tokens by the gap before them.", TBT),
                heatmap("End to end, all", "Answers by their whole duration.", E2E),
                Panel(
                    "Where time goes",
                    "Mean time that finished answers spent queueing, in prefill and in decode.",
                    tuple(
                        Query(mean(metric), name)
                        for metric, name in ((QUEUE, "queue"), (PREFILL, "prefill"), (DECODE, "decode"))
                    ),
                    "s",
                    stacked=True,
                ),
                percentiles("Queue time", "From arrival in the engine until first scheduled.", QUEUE),
                percentiles("Time per output token", "Of an answer as a whole, after its first token.", TPOT),
            ),
        ),
        Row(
            "Saturation",
            (
                Panel(
                    "Requests running",
                    "Requests in the batch, by replica.",
                    (Query("sum by (instance) (mizzen_requests_running{@})", "{{instance}}"),),
                ),
                Panel(
                    "Requests waiting",
                    "By what the first of them waits for.",
                    (Query("sum by (reason) (mizzen_requests_waiting{@})", "{{reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "KV cache in use",
                    "Share of pages held by requests; evictable cache does not count.",
                    (Query("max by (instance) (mizzen_kv_cache_usage_ratio{@})", "{{instance}}"),),
                    "percentunit",
                    maximum=1,
                ),
            ),
        ),
        Row(
            "Service levels",
            (
                Panel(
                    "Attainment",
                    f"Share of first tokens within {TTFT_SLO} s, of gaps within {TBT_SLO} s, and of responses but 5xx.",
                    (
                        Query(within(TTFT, TTFT_SLO), f"first token within {TTFT_SLO} s"),
                        Query(within(TBT, TBT_SLO), f"gap within {TBT_SLO} s"),
                        Query(f"1 - {FAILED}", "no server error"),
                    ),
                    "percentunit",
                    columns=2,
                    maximum=1,
                ),
                stat(
                    "First tokens",
                    f"Share within {TTFT_SLO} s, of the whole time shown.",
                    within(TTFT, TTFT_SLO, "[$__range]"),
                    "percentunit",
                    *GOOD_IF_HIGH,
                ),
                stat(
                    "Gaps",
                    f"Share within {TBT_SLO} s, of the whole time shown.",
                    within(TBT, TBT_SLO, "[$__range]"),
                    "percentunit",
                    *GOOD_IF_HIGH,
                ),
            ),
        ),
    ),
)

ENGINE = Dashboard(
    "engine",
    "Engine",
    "What the engine does with its steps and its memory.",
    (
        Row(
            "KV cache and prefix cache",
            (
                Panel(
                    "Pages",
                    "Held by requests, only cached (evictable), free.",
                    (Query("sum by (state) (mizzen_kv_cache_pages{@})", "{{state}}"),),
                    stacked=True,
                ),
                Panel(
                    "Usage",
                    "Share of all pages that requests hold.",
                    (Query("max by (instance) (mizzen_kv_cache_usage_ratio{@})", "{{instance}}"),),
                    "percentunit",
                    maximum=1,
                ),
                Panel(
                    "Preemptions",
                    "Requests that lost their pages and are computed again.",
                    (Query(rate("mizzen_preemptions_total", "instance"), "{{instance}}"),),
                    "reqps",
                ),
                Panel(
                    "Hit rate",
                    "Share of looked-up prompt tokens that were cached.",
                    (
                        Query(
                            f"{rate('mizzen_prefix_cache_hits_total')} / {rate('mizzen_prefix_cache_queries_total')}",
                            "hit rate",
                        ),
                    ),
                    "percentunit",
                    maximum=1,
                ),
                Panel(
                    "Look-ups",
                    "Prompt tokens looked up, and found.",
                    (
                        Query(rate("mizzen_prefix_cache_queries_total"), "looked up"),
                        Query(rate("mizzen_prefix_cache_hits_total"), "found"),
                    ),
                ),
                stat("Capacity", "All pages.", "sum (mizzen_kv_cache_capacity_pages{@})"),
            ),
        ),
        Row(
            "Batches",
            (
                Panel(
                    "Requests",
                    "Running, and waiting by reason.",
                    (
                        Query("sum (mizzen_requests_running{@})", "running"),
                        Query("sum by (reason) (mizzen_requests_waiting{@})", "waiting: {{reason}}"),
                    ),
                ),
                percentiles("Tokens a step", "Prefill and decode together.", STEP_TOKENS, "short"),
                heatmap("Tokens a step, all", "Steps by their tokens.", STEP_TOKENS, "short"),
                percentiles("Prompt length", "Tokens, of finished answers.", "mizzen_request_prompt_tokens", "short"),
                percentiles(
                    "Answer length", "Tokens, of finished answers.", "mizzen_request_generation_tokens", "short"
                ),
            ),
        ),
        Row(
            "Steps",
            (
                Panel(
                    "Steps a second", "By replica.", (Query(rate("mizzen_steps_total", "instance"), "{{instance}}"),)
                ),
                percentiles("Step duration", "On the device, from when it could begin to its result.", STEP),
                heatmap("Step duration, all", "Steps by duration.", STEP),
                percentiles("Host time a step", "The loop's own work; waiting is not in it.", HOST),
                heatmap("Host time a step, all", "Steps by host time.", HOST),
                Panel(
                    "Host time by device time",
                    "Near or over 1 the host is what limits the steps: overlap cannot hide it.",
                    (Query(f"{rate(HOST + '_sum')} / {rate(STEP + '_sum')}", "host / device"),),
                    "percentunit",
                ),
                Panel(
                    "Device busy",
                    "Share of time in which rank 0's device is in a step. Below 1 under load, it waits for the host.",
                    (Query(rate("mizzen_device_busy_seconds_total", "instance"), "{{instance}}"),),
                    "percentunit",
                    maximum=1,
                ),
                Panel(
                    "Steps by executor",
                    "CUDA graphs of decode or mixed steps; eager: steps that fit no graph, and all on the CPU.",
                    (Query(f"{rate('mizzen_steps_total', 'executor')} > 0", "{{executor}}"),),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                Panel(
                    "GPU memory",
                    "In use, by whatever process. By NVML; nothing without it.",
                    (Query(f"{BY_GPU} (mizzen_gpu_memory_used_bytes{{@}})", GPU),),
                    "bytes",
                ),
                Panel(
                    "GPU memory in use",
                    "Share of all.",
                    (
                        Query(
                            f"{BY_GPU} (mizzen_gpu_memory_used_bytes{{@}})"
                            f" / {BY_GPU} (mizzen_gpu_memory_capacity_bytes{{@}})",
                            GPU,
                        ),
                    ),
                    "percentunit",
                    maximum=1,
                ),
                Panel(
                    "GPU utilization",
                    "Share of time in which any kernel runs, of whatever process; not how much of the GPU it uses.",
                    (Query(f"{BY_GPU} (mizzen_gpu_utilization_ratio{{@}})", GPU),),
                    "percentunit",
                    maximum=1,
                ),
            ),
        ),
    ),
)

PROCESSES = Dashboard(
    "processes",
    "Processes",
    "Which process is up, since when, and what it is doing.",
    (
        Row(
            "Service",
            (
                stat("Ready", "Fewest over the replicas.", "min (mizzen_ready{@})", "bool_yes_no", *YES_IS_GOOD),
                stat("Live", "Fewest over the replicas.", "min (mizzen_live{@})", "bool_yes_no", *YES_IS_GOOD),
                stat("Draining", "Replicas that end.", "sum (mizzen_draining{@})", "short", *ZERO_IS_GOOD),
                stat("Restarts", "Ever.", "sum (mizzen_process_restarts_total{@})", "short", *ZERO_IS_GOOD),
                stat("Engine's start", "What the slowest took.", "max (mizzen_engine_load_duration_seconds{@})", "s"),
                stat("Phase for", "How long the current one lasts.", "max (mizzen_phase_duration_seconds{@})", "s"),
            ),
        ),
        Row(
            "Over time",
            (
                Panel(
                    "Phase",
                    "Replicas in each phase.",
                    (Query("sum by (phase) (mizzen_phase{@}) > 0", "{{phase}}"),),
                    stacked=True,
                ),
                Panel(
                    "Processes that serve",
                    "1 or 0, fewest over the replicas.",
                    (Query("min by (process) (mizzen_process_ready{@})", "{{process}}"),),
                    maximum=1,
                ),
                Panel(
                    "Heartbeat age",
                    "Time since each main loop last said it is alive; MIZZEN_HEARTBEAT_TIMEOUT_S is the end of it.",
                    (Query("max by (process) (mizzen_process_heartbeat_age_seconds{@})", "{{process}}"),),
                    "s",
                ),
                Panel(
                    "Restarts",
                    "By process; all ranks of an engine are one.",
                    (
                        Query(
                            "sum by (instance, process) (increase(mizzen_process_restarts_total{@}[R]))",
                            "{{instance}} {{process}}",
                        ),
                    ),
                ),
                Panel(
                    "Phase duration",
                    "How long each replica has been in its phase.",
                    (Query("max by (instance) (mizzen_phase_duration_seconds{@})", "{{instance}}"),),
                    "s",
                ),
                Panel(
                    "Ready replicas",
                    "As /health/ready says.",
                    (Query("sum by (instance) (mizzen_ready{@})", "{{instance}}"),),
                    stacked=True,
                ),
            ),
        ),
        Row(
            "What runs",
            (
                Panel("Builds", "Versions.", (Query("mizzen_build_info{@}"),), kind="table", minimum=None),
                Panel(
                    "Configuration",
                    "The settings that matter most to performance.",
                    (Query("mizzen_config_info{@}"),),
                    kind="table",
                    columns=2,
                    minimum=None,
                ),
            ),
        ),
    ),
)

DASHBOARDS = (OVERVIEW, ENGINE, PROCESSES)
