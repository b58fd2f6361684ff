"""What a query asks for, checked against the table of metrics: names, labels and bucket bounds that exist."""

import re
from collections.abc import Iterator

from mizzen.observability.metrics import BY_NAME, COMMON_LABELS, Metric

SCRAPED = {"instance", "job"}  # added by Prometheus
_SELECTOR = re.compile(r"\b(mizzen_\w+)(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right) ?\(([^)]*)\)")


def _series(metric: Metric) -> dict[str, set[str]]:
    """Names that a scrape of ``metric`` gives, with what labels each has beside the metric's own."""
    if metric.kind == "histogram":
        return {f"{metric.name}_bucket": {"le"}, f"{metric.name}_sum": set(), f"{metric.name}_count": set()}
    return {metric.name: set()}


SERIES: dict[str, tuple[Metric, set[str]]] = {
    name: (metric, {*metric.labels, *COMMON_LABELS, *SCRAPED, *more})
    for metric in BY_NAME.values()
    for name, more in _series(metric).items()
}


def names(expression: str) -> set[str]:
    return {found[1] for found in _SELECTOR.finditer(expression)}


def problems(expression: str) -> Iterator[str]:
    """Why ``expression`` can never give what it is meant to."""
    known_labels: set[str] = set()
    for name, matchers in _SELECTOR.findall(expression):
        if name not in SERIES:
            yield f"there is no {name}"
            continue
        metric, labels = SERIES[name]
        known_labels |= labels
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in labels:
                yield f"{name} has no label {label}"
            if label == "le" and float(value) not in metric.buckets:
                yield f"{name} has no bucket {value}"
            if metric.values and label == metric.labels[-1]:
                wanted = value if operator.endswith("~") else re.escape(value)
                if not any(re.fullmatch(wanted, known) for known in metric.values):
                    yield f"{name} has no {label} like {value}"
    for group in _GROUPING.findall(expression):
        for label in filter(None, re.split(r",\s*", group)):
            if names(expression) and label not in known_labels:
                yield f"no metric in it has the label {label}"
