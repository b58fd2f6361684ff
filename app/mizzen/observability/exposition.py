"""What all processes counted, merged, as Prometheus reads it. Every declared metric is there from the start, at zero.

The vLLM-named metrics are made here, from the same numbers: summed over labels and buckets that vLLM does not have.
"""

import platform
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mizzen.config.config import Config
from mizzen.observability import metrics
from mizzen.observability.feed import Histogram, Labels, Samples
from mizzen.observability.metrics import BY_NAME, COMMON_LABELS, METRICS, VLLM_METRICS, VllmMetric
from mizzen.version import __version__

ENGINE = "0"
_INFO = "vllm:cache_config_info"


class Merged(Collector):
    """The sums over all processes' messages since this process started."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._common = (config.server.served_model_names[0], ENGINE)
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        for metric in METRICS:
            series: list[Labels] = [(value,) for value in metric.values] if metric.labels else [()]
            if metric.kind == "histogram":
                self._histograms[metric.name] = {labels: Histogram(metric.buckets) for labels in series}
            else:
                self._values[metric.name] = dict.fromkeys(series, 0.0)
        engine = config.engine
        info = (
            engine.device, engine.tensor_parallel_size, engine.attention_backend, engine.cache.page_size,
            engine.cache.prefix_cache, engine.scheduler.policy, engine.scheduler.max_running_requests,
            engine.scheduler.max_batch_tokens, engine.overlap_depth, config.server.api_workers,
            config.tokenizer_workers,
        )  # fmt: skip
        self._values["mizzen_build_info"] = {(__version__, platform.python_version()): 1.0}
        self._values["mizzen_config_info"] = {tuple(map(str, info)): 1.0}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add(self, samples: Samples) -> None:
        for name, labels, value in samples.counters:
            series = self._values[name]
            series[labels] = series.get(labels, 0.0) + value
        for name, labels, value in samples.gauges:
            self._values[name][labels] = value
        for name, labels, counts, total in samples.histograms:
            histogram = self._histograms[name].setdefault(labels, Histogram(BY_NAME[name].buckets))
            histogram.counts = [a + b for a, b in zip(histogram.counts, counts, strict=True)]
            histogram.sum += total

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    # ---- prometheus_client's Collector ----

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            names = (*COMMON_LABELS, *metric.labels)
            if metric.kind == "histogram":
                yield _histogram(
                    metric.name,
                    metric.help,
                    names,
                    {(*self._common, *labels): one for labels, one in self._histograms[metric.name].items()},
                )
            else:
                values = {(*self._common, *labels): value for labels, value in self._values[metric.name].items()}
                yield _scalar(metric.name, metric.kind, metric.help, names, values)
        if self._config.metrics.vllm:
            for alias in VLLM_METRICS:
                yield self._cache_config(alias) if alias.name == _INFO else self._alias(alias)

    def _alias(self, alias: VllmMetric) -> Metric:
        source = BY_NAME[alias.source]
        if alias.kind == "histogram":
            coarse = Histogram(alias.buckets)
            for fine in self._histograms[source.name].values():
                _coarsen(fine, coarse)
            return _histogram(alias.name, alias.help, alias.labels, {self._common: coarse})
        rename = dict(alias.rename)
        extra = len(alias.labels) - len(COMMON_LABELS)  # of the source's labels, the first so many are kept
        sums: dict[Labels, float] = {}
        for labels, value in self._values[source.name].items():
            kept = (*self._common, *(rename.get(label, label) for label in labels[:extra]))
            sums[kept] = sums.get(kept, 0.0) + value
        return _scalar(alias.name, alias.kind, alias.help, alias.labels, sums)

    def _cache_config(self, alias: VllmMetric) -> Metric:
        """Its labels are its content. Without the KV cache's size, which is known late, there is nothing to tell."""
        pages = self._values[alias.source][()]
        cache = self._config.engine.cache
        labels = (
            str(cache.page_size),
            "auto",  # the KV cache has the model's type
            str(cache.prefix_cache != "none"),
            str(cache.memory_fraction),
            str(int(pages)),
            ENGINE,
        )
        return _scalar(alias.name, alias.kind, alias.help, alias.labels, {labels: 1.0} if pages else {})


def _scalar(name: str, kind: metrics.Kind, text: str, label_names: Labels, values: dict[Labels, float]) -> Metric:
    family = (
        CounterMetricFamily(name.removesuffix("_total"), text, labels=label_names)
        if kind == "counter"
        else GaugeMetricFamily(name, text, labels=label_names)
    )
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(name: str, text: str, label_names: Labels, series: dict[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=label_names)
    for labels, one in series.items():
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*one.bounds, float("inf")), one.counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]  # as shipped
        family.add_metric(labels, buckets, one.sum)
    return family


def _coarsen(fine: Histogram, coarse: Histogram) -> None:
    """Adds ``fine`` to ``coarse``, whose bounds are some of fine's."""
    index = 0
    for bound, count in zip((*fine.bounds, float("inf")), fine.counts, strict=True):
        while index < len(coarse.bounds) and bound > coarse.bounds[index]:
            index += 1
        coarse.counts[index] += count
    coarse.sum += fine.sum
