"""Each figure has one definition (docs/loadtest.md): seconds throughout, counted from when a request was due.

Warm-up is left out by when a request was due. Latencies are those of answers that came to an end; what failed or never
ended is counted beside them, so that no figure is better because something is missing from it unseen.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.client import COMPLETE, UNFINISHED
from loadtest.driver import Record, Seen
from loadtest.figures import percentiles
from loadtest.scenario import Slo

LATE_S = 0.005  # a P99 of lag above this: the client does not keep up, and its figures are not the server's
BUSY = 0.9  # a share of one core above this, too
BINS = 10.0 ** (np.arange(-5 * 20, 3 * 20 + 1) / 20)  # 10 us to 1,000 s, 20 a decade
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
        2.042)  # fmt: skip


@dataclass(frozen=True)
class Window:
    """What is measured: requests due from ``start_s`` on; throughput under load until ``load_end_s`` (monotonic)."""

    start_s: float
    load_end_s: float

    @property
    def load_s(self) -> float:
        return self.load_end_s - self.start_s


def window(seen: Seen, warmup_s: float, warmup_requests: int) -> Window:
    start_s = seen.start_s + warmup_s
    if warmup_requests and len(seen.records) > warmup_requests:
        start_s = max(start_s, sorted(record.answer.due_s for record in seen.records)[warmup_requests])
    return Window(start_s, seen.load_end_s)


def ttft_s(record: Record) -> float | None:
    answer = record.answer
    return answer.arrivals[0] - answer.due_s if answer.arrivals else None


def tpot_s(record: Record) -> float | None:
    """Of the whole answer: from its first to its last arrival, by token after the first."""
    answer = record.answer
    if len(answer.arrivals) == 0 or answer.output_tokens < 2:
        return None
    return (answer.arrivals[-1] - answer.arrivals[0]) / (answer.output_tokens - 1)


def e2e_s(record: Record) -> float:
    answer = record.answer
    assert answer.ended_s is not None
    return answer.ended_s - answer.due_s


def gaps_s(records: Iterable[Record]) -> NDArray[np.float64]:
    """Between the arrivals of each answer."""
    parts = [np.diff(np.asarray(record.answer.arrivals)) for record in records if len(record.answer.arrivals) > 1]
    return np.concatenate(parts) if parts else np.empty(0)


def keeps(record: Record, slo: Slo) -> bool:
    """Whether a complete answer keeps all of ``slo``."""
    if record.answer.outcome != COMPLETE:
        return False
    arrivals = record.answer.arrivals
    gap_s = float(np.diff(np.asarray(arrivals)).max()) if len(arrivals) > 1 else None
    values = ((slo.ttft_ms, ttft_s(record)), (slo.tbt_ms, gap_s), (slo.tpot_ms, tpot_s(record)),
              (slo.e2e_ms, e2e_s(record)))  # fmt: skip
    return all(limit is None or value is None or value * 1e3 <= limit for limit, value in values)


def arrived(records: Iterable[Record]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When tokens arrived and how many each time; in sum what the server says that it sent, where it does."""
    times, counts = [], []
    for record in records:
        answer = record.answer
        if answer.tokens:
            times.append(np.asarray(answer.arrivals))
            counts.append(np.asarray(answer.counts) * (answer.output_tokens / answer.tokens))
    return (np.concatenate(times), np.concatenate(counts)) if times else (np.empty(0), np.empty(0))


def summary(seen: Seen, measured: Window, slo: Slo, *, offers: bool = True) -> dict[str, Any]:
    """All figures of a run; of the measured requests unless it says otherwise. ``offers``: the load is an open one."""
    records = [record for record in seen.records if record.answer.due_s >= measured.start_s]
    complete = [record for record in records if record.answer.outcome == COMPLETE]
    # Not only until the last answer: a server that waits for requests is no faster for it.
    last_s = max((record.answer.ended_s or 0.0 for record in records), default=measured.start_s)
    busy_s = max(last_s, measured.load_end_s) - measured.start_s
    tokens = sum(record.answer.output_tokens for record in records)
    times, counts = arrived(seen.records)
    while_loaded = float(counts[(times >= measured.start_s) & (times < measured.load_end_s)].sum())
    done_while_loaded = sum(
        record.answer.outcome == COMPLETE and measured.start_s <= (record.answer.ended_s or 0.0) < measured.load_end_s
        for record in seen.records
    )
    good = sum(keeps(record, slo) for record in records) if any(_limits(slo)) else None
    span_s = measured.load_s
    return {
        "requests": len(records),
        "warmup_requests": len(seen.records) - len(records),
        "complete": len(complete),
        "errors": _errors(records),
        "interrupted": seen.interrupted,
        "load_s": span_s,
        "duration_s": busy_s,
        "offered_requests_per_s": _rate(len(records), span_s) if offers else None,
        "requests_per_s": _rate(len(complete), busy_s),
        "requests_per_s_under_load": _rate(done_while_loaded, span_s),
        "output_tokens_per_s": _rate(tokens, busy_s),
        "output_tokens_per_s_under_load": _rate(while_loaded, span_s),
        "input_tokens_per_s": _rate(sum(record.answer.prompt_tokens or 0 for record in complete), busy_s),
        "goodput_requests_per_s": None if good is None else _rate(good, busy_s),
        "good_share": None if good is None else _rate(good, len(records)),
        "ttft_s": percentiles(_known(map(ttft_s, records))),
        "tbt_s": percentiles(gaps_s(records)),
        "tpot_s": percentiles(_known(map(tpot_s, complete))),
        "e2e_s": percentiles([e2e_s(record) for record in complete]),
        "tokens": _tokens(records, complete),
        "client": _client(seen, records),
    }


def _limits(slo: Slo) -> tuple[float | None, ...]:
    return slo.ttft_ms, slo.tbt_ms, slo.tpot_ms, slo.e2e_ms


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _rate(count: float, span_s: float) -> float | None:
    return count / span_s if span_s > 0 else None


def _errors(records: Sequence[Record]) -> dict[str, int]:
    """By kind, the most frequent first; "unfinished" is what the run's end cut off."""
    return dict(Counter(r.answer.outcome for r in records if r.answer.outcome != COMPLETE).most_common())


def _tokens(records: Sequence[Record], complete: Sequence[Record]) -> dict[str, Any]:
    """Counts as the server's usage tells them, beside what was asked for."""
    counted = [r for r in complete if r.answer.prompt_tokens is not None]
    asked = [r for r in counted if r.turn.input_tokens is not None]
    cached = [r for r in counted if r.answer.cached_tokens is not None]
    promised = [r for r in cached if r.turn.promised_cached is not None]
    wrong = [r for r in asked if r.turn.input_tokens != r.answer.prompt_tokens]
    short = [r for r in complete if r.turn.output_tokens is not None and r.answer.output_tokens != r.turn.output_tokens]
    reads = sum(len(record.answer.arrivals) for record in records)
    return {
        "input": sum(r.answer.prompt_tokens or 0 for r in counted),
        "input_counted_by": "server" if len(counted) == len(complete) else f"server, for {len(counted)} answers",
        "input_asked": sum(r.turn.input_tokens or 0 for r in asked),
        "input_of_those_asked": sum(r.answer.prompt_tokens or 0 for r in asked),
        "answers_with_another_input_length": len(wrong),
        "output": sum(record.answer.output_tokens for record in records),
        "output_counted_by": "server" if all(r.answer.usage_tokens is not None for r in complete) else "client",
        "answers_with_another_output_length": len(short),
        "cached": sum(r.answer.cached_tokens or 0 for r in cached) if cached else None,
        "cached_share": _rate(sum(r.answer.cached_tokens or 0 for r in cached),
                              sum(r.answer.prompt_tokens or 0 for r in cached)),
        "cached_where_promised": sum(r.answer.cached_tokens or 0 for r in promised) if promised else None,
        "cached_promised": sum(r.turn.promised_cached or 0 for r in promised) if promised else None,
        "input_per_request": percentiles([r.answer.prompt_tokens or 0 for r in counted]),
        "output_per_request": percentiles([r.answer.output_tokens for r in complete]),
        "per_arrival": _rate(sum(record.answer.tokens for record in records), reads),
    }  # fmt: skip


def _client(seen: Seen, records: Sequence[Record]) -> dict[str, Any]:
    """How well the client itself kept up; its loop's lag and its share of a core are those of the whole run."""
    lag = percentiles([r.answer.started_s - r.answer.due_s for r in records if r.answer.started_s])
    loop_lag = percentiles(seen.loop_lags_s)
    connect = percentiles([r.answer.sent_s - r.answer.started_s for r in records if r.answer.sent_s is not None])
    cpu_share = seen.cpu_s / max(seen.ended_s - seen.start_s, 1e-9)
    late = max(lag.get("p99", 0.0), loop_lag.get("p99", 0.0)) > LATE_S
    return {
        "send_lag_s": lag,
        "loop_lag_s": loop_lag,
        "connect_s": connect,
        "connections": seen.connections,
        "cpu_share": cpu_share,
        "is_bottleneck": bool(late or cpu_share > BUSY),
        # It waited for a core that others had: a machine of its own would mend that.
        "machine_is_busy": bool(late and cpu_share < BUSY / 2),
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and its 95% confidence interval (Student's t) over repetitions; without one for a single value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return {"mean": mean}
    half = t95(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def t95(freedom: int) -> float:
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.4 / freedom


def histogram(values: Sequence[float] | NDArray[np.float64]) -> dict[str, list[float]]:
    """Counts between the bounds of BINS, from the first that is not empty to the last; both ends collect the rest."""
    if not len(values):
        return {"bounds_s": [], "counts": []}
    counts, _ = np.histogram(np.clip(values, BINS[0], BINS[-1]), BINS)
    (filled,) = np.nonzero(counts)
    first, last = int(filled[0]), int(filled[-1])
    return {"bounds_s": BINS[first : last + 2].tolist(), "counts": counts[first : last + 1].tolist()}


def histograms(seen: Seen, measured: Window) -> dict[str, Any]:
    records = [record for record in seen.records if record.answer.due_s >= measured.start_s]
    complete = [record for record in records if record.answer.outcome == COMPLETE]
    return {
        "ttft_s": histogram(_known(map(ttft_s, records))),
        "tbt_s": histogram(gaps_s(records)),
        "e2e_s": histogram([e2e_s(record) for record in complete]),
    }


def windows(seen: Seen, measured: Window, count: int = 12) -> list[dict[str, Any]]:
    """The measured load in equal parts, to see whether it changes: requests and latencies by when they were due."""
    edges = np.linspace(measured.start_s, measured.load_end_s, count + 1)
    times, counts = arrived(seen.records)
    rows = []
    for start_s, end_s in itertools.pairwise(edges.tolist()):
        records = [record for record in seen.records if start_s <= record.answer.due_s < end_s]
        rows.append({
            "at_s": start_s - seen.start_s,
            "length_s": end_s - start_s,
            "requests": len(records),
            "failed": sum(record.answer.outcome not in (COMPLETE, UNFINISHED) for record in records),
            "output_tokens_per_s": _rate(float(counts[(times >= start_s) & (times < end_s)].sum()), end_s - start_s),
            "ttft_s": percentiles(_known(map(ttft_s, records))),
            "tbt_s": percentiles(gaps_s(records)),
        })  # fmt: skip
    return rows


def timeline(seen: Seen, max_bins: int = 120) -> dict[str, list[Any]]:
    """The whole run in equal bins, warm-up included. ``at_s`` is a bin's beginning, from the run's start. Requests and
    their latencies belong to the bin in which they were due, tokens and gaps to that in which they arrived."""
    length_s = max(seen.ended_s - seen.start_s, 1e-9)
    bin_s = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 600, 3600) if length_s / s <= max_bins), 86400.0)
    count = math.ceil(length_s / bin_s)
    edges = seen.start_s + bin_s * np.arange(count + 1)

    def per_bin(times: Sequence[float] | NDArray[np.float64], weights: Any = None) -> list[float]:
        return np.histogram(times, edges, weights=weights)[0].tolist()  # type: ignore[no-any-return]

    records = seen.records
    times, counts = arrived(records)
    first = [(record.answer.due_s, value) for record in records if (value := ttft_s(record)) is not None]
    parts = [np.asarray(record.answer.arrivals)[1:] for record in records if len(record.answer.arrivals) > 1]
    ended = [r.answer.ended_s or 0.0 for r in records if r.answer.outcome == COMPLETE]
    failed = [r.answer.ended_s or 0.0 for r in records if r.answer.outcome not in (COMPLETE, UNFINISHED)]
    begun = np.sort([record.answer.due_s for record in records])
    over = np.sort([record.answer.ended_s or 0.0 for record in records])
    middle = edges[:-1] + bin_s / 2
    ttft = _binned([at for at, _ in first], [value for _, value in first], edges)
    tbt = _binned(np.concatenate(parts) if parts else [], gaps_s(records), edges)
    return {
        "at_s": (edges[:-1] - seen.start_s).tolist(),
        "bin_s": [bin_s],
        "due": per_bin(begun),
        "complete": per_bin(ended),
        "failed": per_bin(failed),
        "output_tokens_per_s": [value / bin_s for value in per_bin(times, counts)],
        "in_flight": (np.searchsorted(begun, middle) - np.searchsorted(over, middle)).tolist(),
        **{f"ttft_{name}_s": values for name, values in ttft.items()},
        **{f"tbt_{name}_s": values for name, values in tbt.items()},
    }


def _binned(
    times: Sequence[float] | NDArray[np.float64], values: Sequence[float] | NDArray[np.float64], edges: Any
) -> dict[str, list[float | None]]:
    """P50, P90 and P99 of each bin; None where it has no values."""
    places = np.searchsorted(edges, np.asarray(times), side="right") - 1
    order = np.argsort(places, kind="stable")
    groups = np.split(np.asarray(values)[order], np.searchsorted(places[order], np.arange(1, len(edges) - 1)))
    rows = [np.percentile(group, (50, 90, 99)).tolist() if len(group) else [None] * 3 for group in groups]
    return {name: [row[place] for row in rows] for place, name in enumerate(("p50", "p90", "p99"))}
