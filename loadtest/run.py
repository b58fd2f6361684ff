"""One run: what is asked of whom, then the load, then every figure and all that it takes to run it again.

Before the load the server is asked what it serves, and two short requests tell how it counts our words: what it puts
around a prompt (a chat template, a first token) is then part of the tokens that a scenario asks for.
"""

import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtest import measures, traces, workloads
from loadtest.arrivals import Closed, Open, due_times
from loadtest.bodies import Bodies
from loadtest.client import COMPLETE, Answer, Client, Target
from loadtest.driver import Driver, Seen
from loadtest.prompts import WORDS, Pieces, Text, TokenIds, Tokenizer
from loadtest.scenario import Scenario, ScenarioError, ShareGpt, Synthetic, Trace
from loadtest.scrape import Sampler, fetch
from loadtest.workloads import Conversation, Made, Turn

COUNTED_WORDS = 100
NOT_THERE = ("not connected", "cut", "refused 502", "refused 503", "refused 504")  # yet, perhaps
FORMAT = 1  # of the result; a reader of another one refuses it


class RunFailed(Exception):
    """The server could not be asked at all."""


@dataclass(frozen=True)
class Options:
    """Whom to ask and what to do beside. ``model``: by default the first that the server lists. ``metrics_url``: None
    is /metrics of the same server, "" is none. ``wait_s``: how long the server may take to be there. ``watch`` runs
    beside a load. ``records``: a file for every request."""

    target: Target
    model: str | None = None
    tokenizer: Path | None = None
    metrics_url: str | None = None
    sample_s: float = 1.0
    wait_s: float = 0.0
    watch: Callable[[Driver, Scenario, str], Any] | None = None
    records: Path | None = None


@dataclass(frozen=True)
class Served:
    """What a server says that it serves. ``max_context``: None if it does not tell."""

    model: str
    max_context: int | None


@dataclass(frozen=True)
class Counting:
    """How the server counts: ``overhead`` tokens around a prompt, ``tokens_per_word``; None where it does not tell."""

    overhead: int | None = None
    tokens_per_word: float | None = None


def served(options: Options) -> Served:
    """Asks what is served, for ``wait_s`` until there is an answer. Raises RunFailed."""
    url, until_s = options.target.url("/models"), time.monotonic() + options.wait_s
    while True:
        try:
            listed = msgspec.json.decode(fetch(options.target, url, timeout_s=30.0)).get("data") or []
            break
        except (OSError, ValueError, AttributeError) as error:
            if time.monotonic() < until_s:
                time.sleep(0.5)
            elif options.model is not None:  # not every server has a list
                return Served(options.model, None)
            else:
                raise RunFailed(f"{url}: {error} (--wait waits for it, --model does without it)") from None
    models = {entry["id"]: entry.get("max_model_len") for entry in listed if isinstance(entry, dict) and "id" in entry}
    name = options.model or next(iter(models), None)
    if name is None:
        raise RunFailed(f"{url} lists no model: give its name with --model")
    return Served(name, models.get(name))


async def count(client: Client, bodies: Bodies, pieces: Pieces, until_s: float) -> Counting:
    """Asks for one token after one word and after many; the first until ``until_s`` (monotonic), for a server may list
    its models before it answers. Raises RunFailed."""
    source = np.random.default_rng(0)
    counts: list[int | None] = []
    for words in (1, COUNTED_WORDS):
        turn = Turn((pieces.random(source, words),), output_tokens=1)
        while True:
            answer = await client.ask(bodies.body(turn, []), Answer(due_s=time.monotonic()))
            if answer.outcome == COMPLETE:
                break
            if time.monotonic() > until_s or not answer.outcome.startswith(NOT_THERE):
                raise RunFailed(f"the first request was not answered: {answer.outcome} {answer.message}".rstrip())
            await asyncio.sleep(0.5)
        counts.append(answer.prompt_tokens)
    one, many = counts
    if one is None or many is None:
        return Counting()
    per_word = (many - one) / (COUNTED_WORDS - 1)
    return Counting(round(one - per_word), per_word)


def make(
    scenario: Scenario, pieces: Pieces, tokenizer: Tokenizer | None, overhead: int, max_context: int | None
) -> tuple[Iterator[Conversation], Made]:
    """Conversations as they are needed, and what is known of them (of endless ones, more and more)."""
    source = np.random.default_rng(scenario.seed)
    work = scenario.workload
    if isinstance(work, Synthetic):
        made = Made()
        endless = workloads.synthetic(work, pieces, source, overhead=overhead, max_context=max_context)
        return _counted(endless, made), made
    if isinstance(work, Trace):
        rows = traces.read(work, scenario.requests)
        made = traces.conversations(
            rows, work.format, pieces, seed=scenario.seed, overhead=overhead, max_context=max_context
        )
    elif isinstance(work, ShareGpt):
        made = workloads.sharegpt(work, tokenizer, source, overhead=overhead, max_context=max_context)
    else:
        made = workloads.requests(work)
    if not made.conversations:
        raise ScenarioError(f"workload: all {made.dropped_too_long} rows are too long for {max_context} tokens")
    return iter(made.conversations), made


def _counted(endless: Iterator[Conversation | None], made: Made) -> Iterator[Conversation]:
    for conversation in endless:
        if conversation is not None:
            yield conversation
        else:
            made.dropped_too_long += 1
            if made.dropped_too_long > 10_000:
                raise ScenarioError("workload: more than 10,000 conversations too long for the served context")


def timed(scenario: Scenario, conversations: Iterator[Conversation]) -> list[tuple[float, Conversation]]:
    """An open loop's whole plan: made before it begins, so that making it delays nothing."""
    load = scenario.load
    if isinstance(load, Open):
        times = due_times(load, np.random.default_rng((scenario.seed, 1)), scenario.duration_s)
        return list(zip(islice(times, scenario.requests), conversations, strict=False))
    assert not isinstance(load, Closed)
    plan = []
    for conversation in islice(conversations, scenario.requests):
        if conversation.due_s is None:
            raise ScenarioError("load.kind replay: a row of the workload has no timestamp")
        plan.append((conversation.due_s / load.speed, conversation))
    plan.sort(key=lambda pair: pair[0])
    first_s = plan[0][0]
    return [(due_s - first_s, one) for due_s, one in plan
            if scenario.duration_s is None or due_s - first_s < scenario.duration_s]  # fmt: skip


async def run(scenario: Scenario, options: Options, label: str = "") -> dict[str, Any]:
    """The result, as it is written to JSON. Raises ScenarioError and RunFailed."""
    began, until_s = datetime.now(UTC), time.monotonic() + options.wait_s
    model = await asyncio.to_thread(served, options)
    tokenizer = Tokenizer(options.tokenizer) if options.tokenizer else None
    pieces = _pieces(scenario, tokenizer)
    bodies = Bodies(scenario, model.model, pieces.joiner)
    client = Client(options.target, bodies.path, scenario.timeout_s)
    counting = await count(client, bodies, pieces, until_s)
    max_context = scenario.max_context or model.max_context
    conversations, made = make(scenario, pieces, tokenizer, counting.overhead or 0, max_context)
    driver = Driver(client, bodies, duration_s=scenario.duration_s, drain_s=scenario.drain_s)
    url = options.target.root + "/metrics" if options.metrics_url is None else options.metrics_url
    sampler = Sampler(options.target, url, options.sample_s) if url else None
    seen = await _drive(scenario, driver, conversations, sampler, options, label)
    measured = measures.window(seen, scenario.warmup_s, scenario.warmup_requests)
    if options.records is not None:
        write_records(options.records, seen)
    return {
        "format": FORMAT,
        "began": began.isoformat(timespec="seconds"),
        "label": label,
        "base_url": options.target.base_url,
        "model": model.model,
        "scenario": msgspec.to_builtins(scenario),
        "max_context": max_context,
        "dropped_too_long": made.dropped_too_long,
        "counting": {"template_tokens": counting.overhead, "tokens_per_word": counting.tokens_per_word,
                     "tokenizer": str(options.tokenizer) if options.tokenizer else None},
        "summary": measures.summary(seen, measured, scenario.slo, offers=not isinstance(scenario.load, Closed)),
        "histograms": measures.histograms(seen, measured),
        "timeline": measures.timeline(seen),
        "windows": measures.windows(seen, measured),
        "measured_s": [measured.start_s - seen.start_s, measured.load_end_s - seen.start_s],
        "server": sampler.result(seen.start_s) if sampler else {},
        "environment": environment(),
    }  # fmt: skip


async def _drive(
    scenario: Scenario,
    driver: Driver,
    conversations: Iterator[Conversation],
    sampler: Sampler | None,
    options: Options,
    label: str,
) -> Seen:
    load = scenario.load
    plan = [] if isinstance(load, Closed) else timed(scenario, conversations)
    driver.live.planned = scenario.requests if isinstance(load, Closed) else len(plan)
    if sampler is not None:
        await asyncio.to_thread(sampler.start)
    watching = asyncio.create_task(options.watch(driver, scenario, label)) if options.watch else None
    try:
        if isinstance(load, Closed):
            return await driver.closed(load, islice(conversations, scenario.requests))
        # Who asked for a number of requests has a load until the last; else it is as long as it was to be.
        whole = scenario.duration_s is not None and len(plan) != scenario.requests
        return await driver.open(plan, (scenario.duration_s or 0.0) if whole else plan[-1][0])
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if sampler is not None:
            await asyncio.to_thread(sampler.stop)


def _pieces(scenario: Scenario, tokenizer: Tokenizer | None) -> Pieces:
    if scenario.prompt == "tokens":
        return TokenIds(scenario.vocabulary)
    words = tokenizer.single(WORDS) if tokenizer else WORDS
    if len(words) < 16:
        raise ScenarioError(f"of {len(WORDS)} words the tokenizer has {len(words)} as one token: too few for prompts")
    return Text(words)


def write_records(path: Path, seen: Seen) -> None:
    """One JSON object a request, in seconds from the run's start."""
    with path.open("wb") as file:
        for record in seen.records:
            answer = record.answer

            def at(moment: float | None) -> float | None:
                return None if moment is None else round(moment - seen.start_s, 6)

            row = {
                "conversation": record.conversation, "turn": record.turn_number, "due_s": at(answer.due_s),
                "started_s": at(answer.started_s or None), "sent_s": at(answer.sent_s), "ended_s": at(answer.ended_s),
                "outcome": answer.outcome, "message": answer.message, "prompt_tokens": answer.prompt_tokens,
                "asked_prompt_tokens": record.turn.input_tokens, "cached_tokens": answer.cached_tokens,
                "promised_cached_tokens": record.turn.promised_cached, "output_tokens": answer.output_tokens,
                "asked_output_tokens": record.turn.output_tokens, "arrivals_s": [at(one) for one in answer.arrivals],
                "arrival_tokens": list(answer.counts),
            }  # fmt: skip
            file.write(msgspec.json.encode(row) + b"\n")


def environment() -> dict[str, Any]:
    """Of the client: what figures may depend on."""
    versions = {}
    for name in ("msgspec", "httptools", "uvloop", "numpy", "mizzen"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    spec = sys.modules["__main__"].__spec__
    program = spec.name.removesuffix(".__main__") if spec else "loadtest"
    return {
        "command": ["python", "-m", program, *_without_secrets(sys.argv[1:])],
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
        "versions": versions,
    }


def _without_secrets(words: list[str]) -> list[str]:
    hidden = list(words)
    for place, word in enumerate(hidden):
        for flag in ("--api-key", "--header"):
            if word == flag and place + 1 < len(hidden):
                hidden[place + 1] = "..."
            elif word.startswith(flag + "="):
                hidden[place] = flag + "=..."
    return hidden
