"""Saturation over HTTP for minutes, with clients that leave: nothing leaks, nothing stalls, every request ends once.

    python -m loadtest.gpu.soak MODEL_FOLDER --minutes 8 [--set NAME=VALUE ...] --json FILE

More streams than the server runs at once and more than it lets wait, so that some are refused; lengths, sampling and
shared prefixes are random, and so is who closes the connection, and when. Exit code 1 if a check fails; the JSON holds
every sample. The server's log and its /metrics under load lie beside it.
"""

import argparse
import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import uvloop

from loadtest.client import COMPLETE, Answer, Client, Target
from loadtest.gpu.soak_checks import CLOSED, MIB, Check, Limits, Sample, Seen, check, memory_table
from loadtest.offline import environment, parse_setting
from loadtest.served import Failed, Served, vocabulary

ABORTED = 0.15  # of the requests; half of them at any time, half of them after some number of tokens
VARIED = 0.1  # of the requests: sampled in a way of their own
SHARED = 0.3  # of the prompts: begin as others do
WRONG = 0.01  # of the requests: too long for the context
REFUSED_PAUSE_S = 0.5
END_S = 60.0  # for the last answers
TIMEOUT_S = 3600.0  # of a request: none; a stream that starves is for the checks
PRINT_EVERY = 8  # samples
SETTLE_S = 2.0  # until every process has sent its counters
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.05, "seed": 7},
    {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"temperature": 1.0, "logprobs": 3},
)


class Load:
    """The clients. ``prompt`` and ``output`` are the longest of each, ``context`` the served one, in tokens."""

    def __init__(self, port: int, *, prompt: int, output: int, vocabulary: int, context: int, seed: int = 0) -> None:
        self.seen = Seen()
        # A connection for each request: that many come and go is part of what must leave nothing behind.
        target = Target(f"http://127.0.0.1:{port}", headers=(("connection", "close"),))
        self._client = Client(target, "/completions", TIMEOUT_S)
        self._prompt, self._output = prompt, output
        self._vocabulary, self._context = vocabulary, context
        self._source = np.random.default_rng(seed)
        self._prefixes = [self._draw(int(size)) for size in self._source.integers(1, prompt // 2, 8)]
        self._stopping = False
        self._last_s: float | None = None  # the last arrival of all

    async def run(self, streams: int, seconds: float) -> None:
        """``streams`` clients that ask again as soon as they are answered; then waits for the last answers."""
        clients = [asyncio.create_task(self._ask_on()) for _ in range(streams)]
        await asyncio.sleep(seconds)
        self._arrived(time.monotonic())  # a silence may have lasted until now
        self._stopping = True
        _, pending = await asyncio.wait(clients, timeout=END_S)
        if pending:
            self.seen.faults.append(f"{len(pending)} requests had not ended {END_S:g} s after the last was sent")
            for client in pending:
                client.cancel()
            await asyncio.wait(pending)

    async def _ask_on(self) -> None:
        while not self._stopping:
            outcome = await self._request()
            self.seen.outcomes[outcome] += 1
            if outcome.startswith("refused 429"):
                await asyncio.sleep(REFUSED_PAUSE_S)

    async def _request(self) -> str:
        source = self._source
        prompt, output = (
            self._draw(int(source.integers(1, self._prompt + 1))),
            int(source.integers(1, self._output + 1)),
        )
        if source.random() < SHARED:
            prompt = self._prefixes[source.integers(len(self._prefixes))] + prompt[: self._prompt // 2]
        if source.random() < WRONG:
            prompt = [1] * (self._context + 1)
        fields = SAMPLING[source.integers(len(SAMPLING))] if source.random() < VARIED else {"temperature": 0.6}
        leave_after_s = leave_at = None
        if source.random() < ABORTED:
            if source.random() < 0.5:
                leave_after_s = float(source.exponential(1.0))
            else:
                leave_at = int(source.integers(1, output + 1))

        def on_arrival(answer: Answer) -> None:
            self._arrived(answer.arrivals[-1])
            if leave_at is not None and answer.tokens >= leave_at:
                asking.cancel()

        answer = Answer()
        body = completion(prompt, output, **fields)
        asking = asyncio.create_task(self._client.ask(body, answer, on_arrival))
        timer = None
        if leave_after_s is not None:
            timer = asyncio.get_running_loop().call_later(leave_after_s, asking.cancel)
        try:
            await asyncio.wait([asking])
        finally:  # without an effect if it has ended
            asking.cancel()
            if timer is not None:
                timer.cancel()
        if not asking.cancelled():
            await asking  # its error, if it has one
        answer.end(CLOSED)
        self._note(answer, output)
        return answer.outcome

    def _arrived(self, now: float) -> None:
        if self._last_s is not None and not self._stopping:
            self.seen.longest_silence_s = max(self.seen.longest_silence_s, now - self._last_s)
        self._last_s = now

    def _note(self, answer: Answer, output: int) -> None:
        seen = self.seen
        seen.tokens += answer.tokens
        if len(answer.arrivals) > 1:
            seen.longest_gap_s = max(seen.longest_gap_s, float(np.diff(answer.arrivals).max()))
        if answer.outcome == COMPLETE and answer.tokens != output:
            seen.faults.append(f"{answer.tokens} tokens instead of {output}")
        if answer.outcome != CLOSED and answer.endings != 1:
            seen.faults.append(f"{answer.outcome}: ended {answer.endings} times {answer.message}")

    def _draw(self, size: int) -> list[int]:
        drawn: list[int] = self._source.integers(0, self._vocabulary, size).tolist()
        return drawn


def completion(prompt: list[int], max_tokens: int, **fields: Any) -> bytes:
    """A body whose answer is as long as ``max_tokens`` says. Token ids come back too: text is held back while a
    character is incomplete."""
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return msgspec.json.encode({**body, "return_token_ids": True, **fields})


def gpu_bytes() -> int | None:
    """Used memory of all GPUs; None without any."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    return sum(int(line) for line in answer.stdout.split()) * MIB


def take_sample(served: Served, start_s: float) -> Sample:
    processes = {name: psutil.Process(pid) for name, pid in served.pids().items()}
    scrape = served.metrics()
    return Sample(
        at_s=time.monotonic() - start_s,
        rss_bytes={name: process.memory_info().rss for name, process in processes.items()},
        files={name: process.num_fds() for name, process in processes.items()},
        gpu_bytes=gpu_bytes(),
        pages=scrape.by("mizzen_kv_cache_pages", "state"),
        capacity=scrape.total("mizzen_kv_cache_capacity_pages"),
        running=scrape.total("mizzen_requests_running"),
        waiting=scrape.total("mizzen_requests_waiting"),
        steps=scrape.total("mizzen_steps_total"),
        tokens=scrape.total("mizzen_generation_tokens_total"),
        preemptions=scrape.total("mizzen_preemptions_total"),
        restarts=scrape.total("mizzen_process_restarts_total"),
        finished=scrape.by("mizzen_requests_finished_total", "reason"),
        rejected=scrape.by("mizzen_requests_rejected_total", "reason"),
    )


async def soak(
    served: Served, load: Load, streams: int, seconds: float, sample_s: float, exposition: Path
) -> list[Sample]:
    """The samples taken under load; ``exposition`` gets the server's /metrics at its end. A sample that could not be
    taken is a fault: a process or its metrics were gone."""
    start_s = time.monotonic()
    samples: list[Sample] = []
    running = asyncio.create_task(load.run(streams, seconds))
    while (now := time.monotonic()) < start_s + seconds:
        try:
            samples.append(await asyncio.to_thread(take_sample, served, start_s))
        except (psutil.Error, OSError, subprocess.SubprocessError) as error:
            load.seen.faults.append(f"no sample at {now - start_s:.0f} s: {error}")
        if len(samples) % PRINT_EVERY == 1:
            print(progress(samples[-1], load.seen), flush=True)
        await asyncio.sleep(max(0.0, min(now + sample_s, start_s + seconds) - time.monotonic()))
    exposition.write_text(await asyncio.to_thread(served.exposition))
    await running
    return samples


def progress(sample: Sample, seen: Seen) -> str:
    rate, host_mib = seen.tokens / max(1.0, sample.at_s), sum(sample.rss_bytes.values()) / MIB
    return (
        f"{sample.at_s:5.0f} s: {sample.running:.0f} running, {sample.waiting:.0f} waiting,"
        f" pages used {sample.pages.get('used', 0):.0f}, {rate:,.0f} tok/s, host {host_mib:,.0f} MiB,"
        f" preemptions {sample.preemptions:.0f}, {dict(seen.outcomes)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--max-output", type=int, default=1024)
    parser.add_argument("--sample-s", type=float, default=2.0)
    parser.add_argument("--silence-s", type=float, default=Limits().silence_s, help="longest time without any token")
    parser.add_argument("--gap-s", type=float, default=Limits().gap_s, help="longest time between a stream's tokens")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting of Mizzen")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    limits = Limits(silence_s=args.silence_s, gap_s=args.gap_s)
    settings = {"load_format": "dummy", "max_queued_requests": 64, **dict(map(parse_setting, args.set))}
    with Served(args.model, args.json.with_suffix(".log"), **settings) as served:
        start = served.wait_ready(180.0)
        context = served.max_model_len()
        max_running = int(next(iter(served.metrics().by("mizzen_config_info", "max_running_requests"))))
        places = max_running + int(settings["max_queued_requests"])
        streams = places + max(2, places // 16)
        print(f"ready after {start['seconds']} s; {streams} streams for {max_running} running requests", flush=True)
        load = Load(served.port, prompt=args.max_prompt, output=args.max_output,
                    vocabulary=vocabulary(args.model), context=context)  # fmt: skip
        before = take_sample(served, time.monotonic())
        samples = uvloop.run(soak(served, load, streams, args.minutes * 60, args.sample_s,
                                 args.json.with_suffix(".prom")))  # fmt: skip
        try:
            served.wait_idle(20.0)
        except Failed as error:
            load.seen.faults.append(str(error))
        time.sleep(SETTLE_S)
        idle = take_sample(served, time.monotonic())
        checks: list[Check] = check(before, samples, idle, load.seen, limits, max_running)
        family = served.pids()
        code = served.stop()
        left = [name for name, pid in family.items() if name != "supervisor" and psutil.pid_exists(pid)]
        checks.append(
            ("it ends as told", code == 0 and not left, f"exit code {code}, processes left: {left or 'none'}")
        )
    result = {
        "environment": environment(),
        "model": args.model.name,
        "settings": settings,
        "minutes": args.minutes,
        "streams": streams,
        "start": start,
        "limits": limits,
        "checks": [{"name": name, "holds": holds, "words": words} for name, holds, words in checks],
        "seen": load.seen,
        "before": before,
        "samples": samples,
        "idle": idle,
    }
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if len(samples) > 1:
        seconds, tokens = samples[-1].at_s - samples[0].at_s, samples[-1].tokens - samples[0].tokens
        print(
            f"\n{args.model.name}: {seconds:.0f} s, {tokens / seconds:,.0f} output tok/s under load, {streams} streams"
        )
        print(memory_table(samples))
    print("\n| check | holds | |\n|---|---|---|")
    for name, holds, words in checks:
        print(f"| {name} | {'yes' if holds else '**no**'} | {words} |")
    return 0 if all(holds for _, holds, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
