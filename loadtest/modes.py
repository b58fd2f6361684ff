"""What several runs tell together: how sure a figure is, where a server bends, what it holds, which of two is better.

Runs that are compared take turns, so that what changes on the machine meanwhile changes both; a ratio comes with its
95% interval over the pairs, and where that holds 1, nothing was shown.
"""

import asyncio
import contextlib
import math
import os
import shlex
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from loadtest.arrivals import Closed, Open
from loadtest.client import UNFINISHED
from loadtest.measures import interval
from loadtest.run import Options, RunFailed, run
from loadtest.scenario import Scenario, ScenarioError, Slo

PAUSE_S = 1.0  # between runs: what the one before left is to be gone
KEEPS_UP = 0.9  # a server that answers less of the offered rate while it is offered does not hold it
FAILED_SHARE = 0.01
STOP_TIMEOUT_S = 60.0
# Figures that runs are compared by: (where they lie in a summary; is more better?)
FIGURES: dict[str, tuple[tuple[str, ...], bool]] = {
    "requests/s": (("requests_per_s",), True),
    "output tokens/s": (("output_tokens_per_s",), True),
    "output tokens/s under load": (("output_tokens_per_s_under_load",), True),
    **{f"{title} {name}": ((key, name.lower()), False)
       for title, key in (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("TPOT", "tpot_s"), ("E2E", "e2e_s"))
       for name in ("mean", "P50", "P90", "P99")},
}  # fmt: skip

DRIFTS = {
    "output tokens/s": ("output_tokens_per_s",),
    "TTFT P50": ("ttft_s", "p50"),
    "TTFT P99": ("ttft_s", "p99"),
    "TBT P50": ("tbt_s", "p50"),
    "TBT P99": ("tbt_s", "p99"),
}


def figure(result: dict[str, Any], name: str) -> float | None:
    value = result["summary"]
    for key in FIGURES[name][0]:
        value = value.get(key)
        if value is None:
            return None
    return float(value)


async def repeated(scenario: Scenario, options: Options, times: int) -> dict[str, Any]:
    """The same load ``times``, with other seeds."""
    runs = []
    for number in range(times):
        seeded = msgspec.structs.replace(scenario, seed=scenario.seed + number)
        runs.append(await _paused(seeded, options, f"{number + 1}/{times} " if times > 1 else "", bool(number)))
        if interrupted(runs):
            break
    together = {}
    for name in FIGURES:
        values = [value for one in runs if (value := figure(one, name)) is not None]
        if len(values) == len(runs):
            together[name] = interval(values)
    return {"mode": "run", "runs": runs, "figures": together}


def interrupted(runs: Sequence[dict[str, Any]]) -> bool:
    return bool(runs) and bool(runs[-1]["summary"]["interrupted"])


async def _paused(scenario: Scenario, options: Options, label: str, pause: bool) -> dict[str, Any]:
    if pause:
        await asyncio.sleep(PAUSE_S)
    return await run(scenario, options, label)


# ---- sweep ----


def at(scenario: Scenario, *, rate: float | None = None, concurrency: int | None = None) -> Scenario:
    """The scenario under another load; how gaps are drawn stays."""
    load = scenario.load
    if concurrency is not None:
        ramp_s = load.ramp_s if isinstance(load, Closed) else 0.0
        return msgspec.structs.replace(scenario, load=Closed(concurrency, ramp_s))
    assert rate is not None
    base = load if isinstance(load, Open) else Open(rate)
    return msgspec.structs.replace(scenario, load=msgspec.structs.replace(base, rate=rate, end_rate=None))


async def sweep(scenario: Scenario, options: Options, *, rates: Sequence[float] = (), concurrencies: Sequence[int] = ()
                ) -> dict[str, Any]:  # fmt: skip
    """A run at each load, from light to heavy, and the knee of their curve."""
    loads = [at(scenario, rate=rate) for rate in sorted(rates)]
    loads += [at(scenario, concurrency=count) for count in sorted(concurrencies)]
    if not loads:
        raise ScenarioError("a sweep needs --rates or --concurrencies")
    runs: list[dict[str, Any]] = []
    for number, one in enumerate(loads, 1):
        runs.append(await _paused(one, options, f"{number}/{len(loads)} ", bool(runs)))
        if interrupted(runs):
            break
    return {"mode": "sweep", "runs": runs, "knee": knee(runs), "saturated_from": saturated_from(runs)}


def knee(runs: Sequence[dict[str, Any]]) -> int | None:
    """Which run has the most throughput for its latency: Kleinrock's power, output tokens/s over mean E2E. One whose
    end cut answers off cannot be it: those that came to their end were the quick ones."""
    powers = []
    for place, one in enumerate(runs):
        if one["summary"]["errors"].get(UNFINISHED):
            continue
        tokens, latency_s = figure(one, "output tokens/s under load"), figure(one, "E2E mean")
        if tokens and latency_s:
            powers.append((tokens / latency_s, place))
    return max(powers)[1] if powers else None


def keeps_up(result: dict[str, Any]) -> bool:
    one = result["summary"]
    offered, done = one["offered_requests_per_s"], one["requests_per_s_under_load"]
    return offered is None or (done is not None and done >= KEEPS_UP * offered)


def saturated_from(runs: Sequence[dict[str, Any]]) -> int | None:
    """The first run in which the server answered less than it was offered, as long as it was."""
    return next((place for place, one in enumerate(runs) if not keeps_up(one)), None)


# ---- search for the highest rate within limits ----


def misses(result: dict[str, Any], slo: Slo, percentile: str) -> list[str]:
    """In which ways a run does not keep ``slo`` at a percentile ("p90"); none: it keeps it."""
    one, found = result["summary"], []
    limits = (("TTFT", "ttft_s", slo.ttft_ms), ("TBT", "tbt_s", slo.tbt_ms), ("TPOT", "tpot_s", slo.tpot_ms),
              ("E2E", "e2e_s", slo.e2e_ms))  # fmt: skip
    for title, key, limit_ms in limits:
        value = one[key].get(percentile)
        if limit_ms is not None and value is not None and value * 1e3 > limit_ms:
            found.append(f"{title} {percentile.upper()} {value * 1e3:,.1f} ms > {limit_ms:g} ms")
    failed = sum(one["errors"].values())
    if failed > FAILED_SHARE * one["requests"]:
        found.append(f"{failed} of {one['requests']} failed")
    if not keeps_up(result):
        found.append(
            f"{one['requests_per_s_under_load']:.2f} of {one['offered_requests_per_s']:.2f} requests/s answered"
        )
    return found


async def search(
    scenario: Scenario, options: Options, *, start_rate: float, percentile: str, precision: float, most_runs: int
) -> dict[str, Any]:
    """The highest rate that keeps the scenario's SLO: doubled or halved until it lies between, then bisected."""
    if scenario.slo == Slo():
        raise ScenarioError("a search needs slo.ttft_ms, slo.tbt_ms, slo.tpot_ms or slo.e2e_ms")
    runs: list[dict[str, Any]] = []
    why: list[list[str]] = []

    async def holds(rate: float) -> bool:
        runs.append(await _paused(at(scenario, rate=rate), options, f"{rate:.3g}/s ", bool(runs)))
        why.append(misses(runs[-1], scenario.slo, percentile))
        return not why[-1]

    low, high = await bisect(holds, start_rate, precision, most_runs, lambda: interrupted(runs))
    return {"mode": "search", "runs": runs, "misses": why, "percentile": percentile, "highest_rate": low,
            "lowest_missed_rate": high}  # fmt: skip


async def bisect(
    holds: Callable[[float], Any], start: float, precision: float, most: int, stop: Callable[[], bool]
) -> tuple[float | None, float | None]:
    """The highest value known to hold and the lowest known not to, at most ``1 + precision`` apart after enough
    questions; None: none was found."""
    low: float | None = None
    high: float | None = None
    value = start
    for _ in range(most):
        if await holds(value):
            low = value
        else:
            high = value
        if stop() or (low is not None and high is not None and high <= low * (1 + precision)):
            break
        value = (
            low * 2 if low is not None and high is None else high / 2 if low is None and high else _middle(low, high)
        )
    return low, high


def _middle(low: float | None, high: float | None) -> float:
    assert low is not None
    assert high is not None
    return math.sqrt(low * high)


# ---- compare ----


@dataclass(frozen=True)
class Side:
    """One of two. ``command`` starts its server before each of its turns, and is ended after (two commits, one GPU)."""

    name: str
    options: Options
    command: str | None = None


async def compare(scenario: Scenario, a: Side, b: Side, pairs: int) -> dict[str, Any]:
    """``pairs`` times each, in the order a b, b a, a b, ...: both of a pair get the same load, every pair another. An
    interrupted pair does not count. Raises RunFailed if that leaves none."""
    runs: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    order = [("a", a), ("b", b)]
    turns = [(number, *turn) for number in range(pairs) for turn in (order if number % 2 == 0 else order[::-1])]
    for number, key, side in turns:
        seeded = msgspec.structs.replace(scenario, seed=scenario.seed + number)
        async with started(side):
            one = await _paused(seeded, side.options, f"{number + 1}/{pairs} {side.name} ", side.command is None)
        if interrupted([one]):
            break
        runs[key].append(one)
    whole = min(map(len, runs.values()))
    if not whole:
        raise RunFailed("interrupted before both had had a turn")
    first, second = runs["a"][:whole], runs["b"][:whole]
    return {"mode": "compare", "names": [a.name, b.name], "runs": first + second, "ratios": ratios(first, second)}


def ratios(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """b's figures over a's: the geometric mean over pairs, its 95% interval, and whether that tells b apart."""
    found: dict[str, dict[str, Any]] = {}
    for name, (_, more_is_better) in FIGURES.items():
        values = [(figure(one, name), figure(other, name)) for one, other in zip(a, b, strict=True)]
        logs = [math.log(there / here) for here, there in values if here and there]
        if len(logs) != len(values) or not logs:
            continue
        ratio = {key: math.exp(value) for key, value in interval(logs).items()}
        told = "better" if (ratio.get("low", 0) > 1) == more_is_better else "worse"
        apart = "low" in ratio and (ratio["low"] > 1 or ratio["high"] < 1)
        found[name] = {**ratio, "b_is": told if apart else "not told apart"}
    return found


@contextlib.asynccontextmanager
async def started(side: Side) -> AsyncIterator[None]:
    """Runs the side's server, if it has a command; nothing of it is left after."""
    if side.command is None:
        yield
        return
    process = subprocess.Popen(shlex.split(side.command), start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# ---- soak ----


async def soak(scenario: Scenario, options: Options, tolerance: float) -> dict[str, Any]:
    """One long run, and whether its end is like its beginning."""
    result = await run(scenario, options)
    changes = drifts(result["windows"])
    return {"mode": "soak", "runs": [result], "drifts": changes, "tolerance": tolerance,
            "steady": all(1 / (1 + tolerance) <= ratio <= 1 + tolerance for ratio in changes.values())}  # fmt: skip


def drifts(windows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the last third over the first, by the mean of their windows."""
    third = max(1, len(windows) // 3)
    found = {}
    for name, keys in DRIFTS.items():
        values = [value for window in windows if (value := _dig(window, keys)) is not None]
        if len(values) == len(windows) and sum(values[:third]) > 0:
            found[name] = sum(values[-third:]) / sum(values[:third])
    return found


def _dig(data: dict[str, Any], keys: tuple[str, ...]) -> float | None:
    value: Any = data
    for key in keys:
        value = value.get(key)
        if value is None:
            return None
    return float(value)
