"""Two scrapes and what happened between them: everything that is shown is a function of these.

As in PromQL, a counter that is less than before began again at zero, and a quantile is interpolated in its bucket.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """``values``: by series name and labels. ``at_s``: when, by any clock that only rises."""

    at_s: float
    values: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, at_s: float) -> "Scrape":
        """Raises ValueError for what is not Prometheus' text format."""
        values: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values.setdefault(sample.name, {})[frozenset(sample.labels.items())] = float(sample.value)
        return cls(at_s, values)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums over all other labels."""
        sums: dict[str, float] = {}
        for labels, value in self.values.get(name, {}).items():
            key = dict(labels).get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def total(self, name: str) -> float:
        return sum(self.values.get(name, {}).values())


class Window:
    """The scrapes of the last ``length_s`` seconds, the oldest and the newest of which are compared."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._scrapes: deque[Scrape] = deque([Scrape(0.0)], maxlen=1000)

    def add(self, scrape: Scrape) -> None:
        if not self._scrapes[-1].values:
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and self._scrapes[1].at_s <= scrape.at_s - self._length_s:
            self._scrapes.popleft()

    @property
    def newest(self) -> Scrape:
        return self._scrapes[-1]

    def increases(self, name: str, label: str) -> dict[str, float]:
        """By ``label``, between the oldest scrape and the newest."""
        old = self._scrapes[0].by(name, label)
        return {
            key: value - old.get(key, 0.0) if value >= old.get(key, 0.0) else value
            for key, value in self.newest.by(name, label).items()
        }

    def rate(self, name: str, label: str = "", *values: str) -> float:
        """A second; of all series, or of those whose ``label`` is one of ``values``. NaN with a single scrape."""
        elapsed_s = self.newest.at_s - self._scrapes[0].at_s
        increases = self.increases(name, label)
        increase = sum(increases.values()) if not values else sum(increases.get(value, 0.0) for value in values)
        return increase / elapsed_s if elapsed_s > 0 else math.nan

    def ratio(self, part: str, whole: str) -> float:
        """Of two counters' increases; NaN without any."""
        total = sum(self.increases(whole, "").values())
        return sum(self.increases(part, "").values()) / total if total else math.nan

    def quantiles(self, histogram: str, *quantiles: float) -> list[float]:
        """Of what was observed in the window; NaN where that is nothing."""
        increases = self.increases(f"{histogram}_bucket", "le")
        buckets = sorted((float(bound), count) for bound, count in increases.items())
        return [_quantile(buckets, quantile) for quantile in quantiles]


def _quantile(buckets: list[tuple[float, float]], quantile: float) -> float:
    """``buckets``: (upper bound, observations up to it), ascending, the last bound is infinite."""
    if not buckets or not buckets[-1][1]:
        return math.nan
    rank = quantile * buckets[-1][1]
    below, below_count = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound) or count == below_count:
                return below
            return below + (bound - below) * (rank - below_count) / (count - below_count)
        below, below_count = bound, count
    return below
