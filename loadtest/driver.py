"""Requests leave when they are due, whatever the server does; how late the client itself was is measured.

In an open loop a conversation begins at its own time; in a closed one when a user is free. Either way a request's time
counts from when it was due: a client that is late, or a connection that is slow to be made, shows in its figures.
"""

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loadtest.arrivals import Closed
from loadtest.bodies import Bodies
from loadtest.client import COMPLETE, UNFINISHED, Answer, Client
from loadtest.workloads import Conversation, Turn

FAILED_PAUSE_S = 0.1  # a user whose request failed: else a server that refuses at once would be flooded
TICK_S = 0.02  # how often the client asks itself how late it is


@dataclass(slots=True)
class Record:
    """A request and its answer. ``conversation`` and ``turn`` count from 0."""

    conversation: int
    turn_number: int
    turn: Turn
    answer: Answer


@dataclass(slots=True)
class Seen:
    """A run. ``start_s``: its zero, by time.monotonic; ``load_end_s``: when the last request had been due or, in a
    closed loop, when the first user stopped asking; ``ended_s``: when all had ended."""

    start_s: float = 0.0
    start_unix_s: float = 0.0
    load_end_s: float = 0.0
    ended_s: float = 0.0
    records: list[Record] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    connections: int = 0
    interrupted: bool = False


@dataclass(slots=True)
class Live:
    """What a progress bar shows. ``planned``: how many conversations there are, where that is known."""

    planned: int | None = None
    conversations: int = 0  # that have ended
    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)


class Driver:
    """Runs one load. ``duration_s``: nothing new begins later; ``drain_s``: then the rest may take this long."""

    def __init__(self, client: Client, bodies: Bodies, *, duration_s: float | None, drain_s: float) -> None:
        self._client, self._bodies = client, bodies
        self._duration_s, self._drain_s = duration_s, drain_s
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.seen = Seen()
        self.live = Live()

    def interrupt(self) -> None:
        """Nothing new begins, and what runs is dropped: the figures are those until now."""
        self.seen.interrupted = True
        self._stop.set()

    async def open(self, timed: Iterable[tuple[float, Conversation]], span_s: float) -> Seen:
        """``timed``: seconds from the start, rising, and what is due then. The load ends after ``span_s``."""

        async def load() -> None:
            for number, (due_s, conversation) in enumerate(timed):
                await _until(due := self.seen.start_s + due_s)
                self._start(self._converse(number, conversation, due))
            self.seen.load_end_s = self.seen.start_s + span_s

        return await self._run(load())

    async def closed(self, spec: Closed, conversations: Iterator[Conversation]) -> Seen:
        numbered = enumerate(conversations)

        async def user(place: int) -> None:
            await _until(due := self.seen.start_s + spec.ramp_s * place / spec.concurrency)
            for number, conversation in numbered:
                if not await self._converse(number, conversation, due):
                    await asyncio.sleep(FAILED_PAUSE_S)
                if self._over(due := time.monotonic()):
                    return

        async def load() -> None:
            users = [self._start(user(place)) for place in range(spec.concurrency)]
            await asyncio.wait(users, timeout=self._duration_s, return_when=asyncio.FIRST_COMPLETED)
            self.seen.load_end_s = time.monotonic()

        return await self._run(load())

    def _start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _over(self, now: float) -> bool:
        return self._duration_s is not None and now >= self.seen.start_s + self._duration_s

    async def _run(self, load: Coroutine[Any, Any, None]) -> Seen:
        seen = self.seen
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection of all that is remembered here would hold up every stream
        cpu_s = time.process_time()
        seen.start_s, seen.start_unix_s = time.monotonic() + TICK_S, time.time() + TICK_S
        ticker = asyncio.create_task(self._tick())
        stopping = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(load)
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading  # its error, if it has one
                drained_s = seen.load_end_s + self._drain_s
                while self._tasks and (left_s := drained_s - time.monotonic()) > 0 and not self._stop.is_set():
                    await asyncio.wait({*self._tasks, stopping}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                seen.load_end_s = time.monotonic()
        finally:
            for task in (ticker, stopping, loading):
                task.cancel()
            await asyncio.gather(ticker, stopping, loading, return_exceptions=True)
            self._client.close()
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            gc.enable()
            gc.unfreeze()
        for record in seen.records:
            record.answer.end(UNFINISHED)
        seen.ended_s = time.monotonic()
        seen.cpu_s, seen.connections = time.process_time() - cpu_s, self._client.connections
        return seen

    async def _tick(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.seen.loop_lags_s.append(time.monotonic() - before - TICK_S)

    async def _converse(self, number: int, conversation: Conversation, due: float) -> bool:
        """Whether all its turns that were due were answered."""
        try:
            return await self._turns(number, conversation, due)
        finally:
            self.live.conversations += 1

    async def _turns(self, number: int, conversation: Conversation, due: float) -> bool:
        history: list[bytes] = []
        last = len(conversation.turns) - 1
        for place, turn in enumerate(conversation.turns):
            if place:
                due = time.monotonic() + turn.think_s
                if self._over(due):
                    break
                await asyncio.sleep(turn.think_s)
            answer = Answer(due_s=due, text=[] if place < last else None)
            self.seen.records.append(Record(number, place, turn, answer))
            self.live.sent += 1
            await self._client.ask(self._bodies.body(turn, history), answer)
            self._note(answer)
            if answer.outcome != COMPLETE:
                return False
            if place < last:
                history += self._bodies.said(turn, "".join(answer.text or ()))
                answer.text = None
        return True

    def _note(self, answer: Answer) -> None:
        live = self.live
        live.ended += 1
        live.failed += answer.outcome != COMPLETE
        live.tokens += answer.output_tokens
        if answer.arrivals:
            live.first_token_s.append(answer.arrivals[0] - answer.due_s)


async def _until(moment: float) -> None:
    # Again: uvloop's timers count milliseconds, and may be early by half of one.
    while (wait_s := moment - time.monotonic()) > 0:
        await asyncio.sleep(wait_s)
