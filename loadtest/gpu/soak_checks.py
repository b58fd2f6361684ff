"""What a soak must show, as functions of what was seen. A check is a name, whether it holds, and the figures in words.

Memory is compared between two quarters: the first and the last of what follows the warm-up (the first quarter of all),
in which the prefix cache fills and allocators find their size.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from loadtest.client import COMPLETE

MIB = 2**20
LEAST_SAMPLES = 16
CLOSED = "closed by the client"  # an outcome that a client gives itself
EXPECTED_REFUSALS = ("refused 429 rate_limit_exceeded", "refused 400 context_length_exceeded")


@dataclass(frozen=True, slots=True)
class Limits:
    """``rss_mib``: growth of one process; ``gpu_mib``: likewise of the GPU. ``silence_s``: time without a token of any
    stream; ``gap_s``: time between two arrivals of one stream (one that is preempted waits for pages)."""

    rss_mib: float = 48.0
    gpu_mib: float = 64.0
    silence_s: float = 2.0
    gap_s: float = 20.0
    files: int = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """``rss_bytes`` and ``files`` (open descriptors) by process; ``pages`` by state; ``finished`` and ``rejected`` by
    reason, since the server's start; ``gpu_bytes`` is None without a GPU."""

    at_s: float
    rss_bytes: dict[str, int]
    files: dict[str, int]
    gpu_bytes: int | None
    pages: dict[str, float]
    capacity: float
    running: float
    waiting: float
    steps: float
    tokens: float
    preemptions: float
    restarts: float
    finished: dict[str, float]
    rejected: dict[str, float]


@dataclass(slots=True)
class Seen:
    """What the clients saw. ``complete`` and so on are keys of ``outcomes``; ``faults``: requests that did not end as
    they must, in words."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    tokens: int = 0
    longest_silence_s: float = 0.0
    longest_gap_s: float = 0.0


Check = tuple[str, bool, str]


def quarters(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> tuple[float, float] | None:
    """Medians of the first and the last quarter after the warm-up; None if either has no value."""
    first_s, last_s = samples[0].at_s, samples[-1].at_s
    warm_s = first_s + (last_s - first_s) / 4
    quarter_s = (last_s - warm_s) / 4

    def median(of: Iterable[Sample]) -> float | None:
        values = [number for number in map(value, of) if number is not None]
        return statistics.median(values) if values else None

    first = median(sample for sample in samples if warm_s <= sample.at_s <= warm_s + quarter_s)
    last = median(sample for sample in samples if sample.at_s >= last_s - quarter_s)
    return None if first is None or last is None else (first, last)


def check(
    before: Sample, samples: Sequence[Sample], idle: Sample, seen: Seen, limits: Limits, max_running: int
) -> list[Check]:
    """``before``: ready, without load; ``samples``: under load; ``idle``: after it."""
    if len(samples) < LEAST_SAMPLES:
        return [("there are samples", False, f"{len(samples)} of at least {LEAST_SAMPLES}; faults: {seen.faults}")]
    expected = {COMPLETE, CLOSED, *EXPECTED_REFUSALS}
    return [
        _pages(idle),
        *_memory(samples, limits),
        _files(before, idle, limits),
        _progress(samples),
        ("no stall", seen.longest_silence_s <= limits.silence_s,
         f"longest time without any token {seen.longest_silence_s:.2f} s (limit {limits.silence_s:g})"),
        ("no starved stream", seen.longest_gap_s <= limits.gap_s,
         f"longest gap in one stream {seen.longest_gap_s:.2f} s (limit {limits.gap_s:g})"),
        ("every request ended once", not seen.faults and set(seen.outcomes) <= expected,
         f"{dict(seen.outcomes)}" + (f"; {len(seen.faults)} faults, first: {seen.faults[0]}" if seen.faults else "")),
        _server_agrees(before, idle, seen),
        _saturated(samples, seen, max_running),
        ("no restart", idle.restarts == 0, f"{idle.restarts:.0f} restarts"),
    ]  # fmt: skip


def _pages(idle: Sample) -> Check:
    used, total = idle.pages.get("used", -1.0), sum(idle.pages.values())
    words = f"{used:.0f} held when idle; used + cached + free = {total:.0f} of {idle.capacity:.0f}"
    return "no page is lost", used == 0 and total == idle.capacity > 0, words


def _memory(samples: Sequence[Sample], limits: Limits) -> list[Check]:
    names = sorted({name for sample in samples for name in sample.rss_bytes})
    kinds: list[tuple[str, Callable[[Sample], float | None], float]] = [
        (f"host memory of {name} is flat", lambda sample, name=name: sample.rss_bytes.get(name), limits.rss_mib)  # type: ignore[misc]
        for name in names
    ]
    kinds.append(("GPU memory is flat", lambda sample: sample.gpu_bytes, limits.gpu_mib))
    checks = []
    for title, value, limit in kinds:
        found = quarters(samples, value)
        if found is None:
            if title != "GPU memory is flat":
                checks.append((title, False, "too few samples"))
            continue
        first, last = (size / MIB for size in found)
        words = f"{first:.1f} to {last:.1f} MiB ({last - first:+.1f}, limit +{limit:g})"
        checks.append((title, last - first <= limit, words))
    return checks


def _files(before: Sample, idle: Sample, limits: Limits) -> Check:
    more = {name: count - before.files.get(name, 0) for name, count in idle.files.items()}
    name = max(more, key=lambda name: more[name])
    words = f"at most {more[name]:+d} open files when idle again ({name}, limit +{limits.files})"
    return "no connection is left", more[name] <= limits.files, words


def _progress(samples: Sequence[Sample]) -> Check:
    steps = [sample.steps for sample in samples]
    stood = sum(later <= earlier for earlier, later in pairwise(steps))
    words = f"{steps[-1] - steps[0]:.0f} steps over {len(samples)} samples, {stood} without a new one"
    return "steps go on", stood == 0, words


def _server_agrees(before: Sample, idle: Sample, seen: Seen) -> Check:
    """A client that closes may be too late, and its request complete or refused: so far the two may differ."""
    finished = {reason: count - before.finished.get(reason, 0.0) for reason, count in idle.finished.items()}
    complete, closed = seen.outcomes[COMPLETE], seen.outcomes[CLOSED]
    whole = finished.get("length", 0.0) + finished.get("stop", 0.0)
    refused = idle.rejected.get("rate_limit_exceeded", 0.0) - before.rejected.get("rate_limit_exceeded", 0.0)
    told = seen.outcomes[EXPECTED_REFUSALS[0]]
    good = (
        complete <= whole <= complete + closed
        and whole + finished.get("abort", 0.0) <= complete + closed
        and not finished.get("error", 0.0) + finished.get("timeout", 0.0)
        and told <= refused <= told + closed
    )
    shown = {reason: round(count) for reason, count in finished.items()}
    words = f"server {shown}, {refused:.0f} refused; clients {complete} complete, {closed} closed, {told} refused"
    return "server and clients agree", good, words


def _saturated(samples: Sequence[Sample], seen: Seen, max_running: int) -> Check:
    running = statistics.median(sample.running for sample in samples)
    refused, closed = seen.outcomes[EXPECTED_REFUSALS[0]], seen.outcomes[CLOSED]
    words = f"{running:.0f} of {max_running} running (median), {refused} refused, {closed} closed by the client"
    return "it was saturated", running >= 0.8 * max_running and refused > 0 and closed > 0, words


def memory_table(samples: Sequence[Sample]) -> str:
    """First and last quarter, and MiB a minute between them, by process."""
    minutes = (samples[-1].at_s - samples[0].at_s) * 9 / 16 / 60  # from the middle of one quarter to that of the other
    lines = ["| memory, MiB | first quarter after warm-up | last quarter | a minute |", "|---|---|---|---|"]
    names = sorted({name for sample in samples for name in sample.rss_bytes})
    rows: list[tuple[str, tuple[float, float] | None]] = [
        (name, quarters(samples, lambda sample, name=name: sample.rss_bytes.get(name)))  # type: ignore[misc]
        for name in names
    ]
    rows.append(("GPU", quarters(samples, lambda sample: sample.gpu_bytes)))
    for name, found in rows:
        if found is not None and minutes:
            first, last = (size / MIB for size in found)
            lines.append(f"| {name} | {first:,.1f} | {last:,.1f} | {(last - first) / minutes:+.2f} |")
    return "\n".join(lines)
