"""Every submitted request ends exactly once: with all its choices finished, or with one error. Later words are dropped.

The client sends requests to the tokenizers, hears from tokenizers (accepted, refused) and from the detokenizer
(deltas), and is told by the supervisor which process died. It runs in one event loop and takes no locks.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
import structlog

from mizzen.errors import (
    EngineRestarted,
    RequestError,
    RequestFailed,
    RequestTimedOut,
    ServiceNotReady,
    WireError,
)
from mizzen.ipc.channels import Sender
from mizzen.ipc.messages import (
    AbortRequest,
    Delta,
    Deltas,
    Drain,
    Finish,
    FromSupervisor,
    Health,
    PeerDown,
    RequestAccepted,
    RequestRefused,
    TokenizeRequest,
)
from mizzen.observability.health import UNKNOWN, describe
from mizzen.observability.record import RequestRecord
from mizzen.server.admission import Admission
from mizzen.server.convert import Job

STALE_S = 5.0  # a snapshot older than this no longer proves readiness
BACKSTOP_S = 2.0  # the engine ends a request at its deadline; the api does so this much later, whatever happened
_REPEAT_ABORT_S = 1.0
_FORGET_ABORT_S = 60.0
LAST_WORD_S = 2.0  # an abort is answered within a step; a record waits no longer for what the engine says of it

log = structlog.get_logger()


class RequestEnded(RequestError):
    """A request's error, as another process worded it."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message, param=error.param, retry_after_s=error.retry_after_s)
        self.status = error.status
        self._error = error

    def wire(self) -> WireError:
        return self._error


class ClientGone(Exception):
    """The HTTP client went away: nobody is left to answer."""


class Answer:
    """One request in flight, and what has arrived for it."""

    def __init__(
        self,
        request_id: str,
        num_choices: int,
        tokenizer: int,
        life: int,
        deadline_s: float | None,
        record: RequestRecord,
    ) -> None:
        self.request_id = request_id
        self.record = record
        self._pace = record.inference.pace if record.inference is not None else None
        self.deadline_s = deadline_s
        self.accepted = False
        self.prompt_tokens: list[int] = []  # per prompt, once accepted
        self.open = set(range(num_choices))  # choices that have not finished
        self.tokenizer = tokenizer
        self.tokenizer_life = life
        self.gone = False
        self._deltas: list[Delta] = []
        self._error: WireError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self._error is not None or self.gone or not self.open

    async def until_accepted(self) -> None:
        """Raises RequestEnded if the request is refused or ends before it is accepted, ClientGone if nobody waits."""
        while not self.accepted:
            self._raise_if_over()
            await self._wait()

    async def next(self) -> list[Delta]:
        """What has arrived since the last call, at least one delta. Raises as ``until_accepted`` does."""
        while not self._deltas:
            self._raise_if_over()
            await self._wait()
        deltas, self._deltas = self._deltas, []
        if self._pace is not None:
            self._pace.add(deltas)
        return deltas

    def accept(self, prompt_tokens: list[int]) -> None:
        self.accepted, self.prompt_tokens = True, prompt_tokens
        self.record.accept(prompt_tokens)
        self._wake()

    def push(self, delta: Delta) -> None:
        self.accepted = True  # the detokenizer's word may overtake the tokenizer's
        self._deltas.append(delta)
        self.record.output(delta)
        self._wake()

    def end(self, error: WireError) -> None:
        self._error = self.record.error = error
        self._wake()

    def leave(self) -> None:
        self.gone = self.record.client_gone = True
        self._wake()

    def _raise_if_over(self) -> None:
        if self.gone:
            raise ClientGone
        if self._error is not None:
            raise RequestEnded(self._error)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class EngineClient:
    """The api's view of everything behind it.

    ``max_queued`` and ``max_running`` are the whole service's; this process takes ``1 / workers`` of them.
    ``timeout_s`` 0 means no deadline.
    """

    def __init__(
        self,
        *,
        api: int,
        workers: int,
        tokenizers: Sequence[Sender],
        engine: Sender,
        max_running: int,
        max_queued: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._workers = workers
        self._tokenizers = tokenizers
        self._engine = engine
        self._max_running = max_running
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._clock = clock
        self._answers: dict[str, Answer] = {}
        self._admission = Admission()
        self._aborted: dict[str, float] = {}  # request id -> when its abort was last sent
        self._last_words: dict[str, tuple[float, RequestRecord]] = {}  # of aborted requests: since when, whose
        self._lives = [0] * len(tokenizers)  # deaths so far
        self._down: set[int] = set()
        self._next_tokenizer = 0
        self._health = UNKNOWN
        self._health_s = clock()
        self.draining = False
        self.messages = 0  # handled so far: the heartbeat's progress

    # ---- what is known of the service ----

    def health(self) -> Health:
        """The last snapshot as of now: its clock goes on, and when it is too old it is neither live nor ready."""
        age_s = self._clock() - self._health_s
        health = msgspec.structs.replace(self._health, phase_s=self._health.phase_s + age_s)
        if self.draining:
            health = msgspec.structs.replace(health, ready=False, draining=True)
        if age_s > STALE_S:
            detail = f"the supervisor has not spoken for {age_s:.0f} s"
            health = msgspec.structs.replace(health, live=False, ready=False, detail=detail)
        return health

    def ready_health(self) -> Health:
        """The snapshot, if requests are served: then its model and engine are set. Raises ServiceNotReady."""
        health = self._health
        if self.draining or not health.ready or health.draining or health.model is None or health.engine is None:
            health = self.health()
            raise ServiceNotReady(
                f"The service is not ready: {describe(health)}. Retry later.", retry_after_s=health.retry_after_s
            )
        return health

    @property
    def in_flight(self) -> int:
        """Requests without a terminal yet."""
        return len(self._answers)

    # ---- requests ----

    def submit(self, job: Job, record: RequestRecord) -> Answer:
        """Sends a request on its way; ``record`` hears what becomes of it.

        Raises ServiceNotReady, QueueFull or InvalidRequest (more choices than fit).
        """
        health = self.ready_health()
        assert health.engine is not None
        now = self._clock()
        max_running = min(self._max_running, health.engine.max_running_requests)
        self._admission.admit(job.num_choices, math.ceil((max_running + self._max_queued) / self._workers), now)
        tokenizer = self._choose_tokenizer()
        answer = Answer(
            request_id=uuid.uuid4().hex,
            num_choices=job.num_choices,
            tokenizer=tokenizer,
            life=self._lives[tokenizer],
            deadline_s=now + self._timeout_s if self._timeout_s > 0 else None,
            record=record,
        )
        record.admit()
        self._answers[answer.request_id] = answer
        self._tokenizers[tokenizer].send(
            TokenizeRequest(
                request_id=answer.request_id,
                api=self._api,
                epoch=health.epoch,
                prompts=job.prompts,
                sampling=job.sampling,
                max_model_len=health.engine.max_model_len,
                arrival_s=now,
                deadline_s=answer.deadline_s,
                priority=job.priority,
                cache_salt=job.cache_salt,
                return_token_ids=job.return_token_ids,
            )
        )
        return answer

    def leave(self, answer: Answer) -> None:
        """The HTTP client is gone: aborts what still runs."""
        if not answer.ended:
            self._abort(answer)
            self._forget(answer)
            answer.leave()

    def end_all(self, error: RequestError) -> None:
        """Ends every request in flight, and aborts it."""
        for answer in list(self._answers.values()):
            self._end(answer, error.wire(), abort=True)

    def sweep(self) -> None:
        """Ends what is overdue and forgets old aborts. To be called a few times a second."""
        now = self._clock()
        for answer in list(self._answers.values()):
            if answer.deadline_s is not None and now > answer.deadline_s + BACKSTOP_S:
                error = RequestTimedOut(f"The request did not end within {self._timeout_s:g} s")
                self._end(answer, error.wire(), abort=True, reason="timeout")
        for request_id in [key for key, sent_s in self._aborted.items() if now - sent_s > _FORGET_ABORT_S]:
            del self._aborted[request_id]
        for request_id in [key for key, (since_s, _) in self._last_words.items() if now - since_s > LAST_WORD_S]:
            self._last_words.pop(request_id)[1].engine_done()

    def close(self) -> None:
        """No message is read any more."""
        for _, record in self._last_words.values():
            record.engine_done()
        self._last_words.clear()

    # ---- what arrives ----

    def handle(self, message: msgspec.Struct) -> None:
        """A message on the api's own channel."""
        self.messages += 1
        match message:
            case Deltas(items=items):
                for delta in items:
                    self._on_delta(delta)
            case RequestAccepted():
                if answer := self._answers.get(message.request_id):
                    answer.accept(message.prompt_tokens)
            case RequestRefused():
                self._aborted.pop(message.request_id, None)
                if left := self._last_words.pop(message.request_id, None):
                    left[1].refuse(message.tokenize_s, message.tokenized_s)
                    left[1].engine_done()
                if answer := self._answers.get(message.request_id):
                    answer.record.refuse(message.tokenize_s, message.tokenized_s)
                    self._end(answer, message.error, abort=False)
            case _:
                log.error("unexpected message", kind=type(message).__name__)

    def handle_control(self, message: FromSupervisor) -> None:
        """A message from the supervisor; Shutdown is the caller's."""
        match message:
            case Health():
                self._health, self._health_s = message, self._clock()
                up = {j for j in self._down if message.processes.get(f"tokenizer-{j}") in ("ready", None)}
                self._down -= up
            case PeerDown(name=name):
                self._on_peer_down(name)
            case Drain():
                self.draining = True
            case _:
                log.error("unexpected message", kind=type(message).__name__)

    def _on_delta(self, delta: Delta) -> None:
        answer = self._answers.get(delta.request_id)
        if answer is None:
            self._abort_unknown(delta)
            return
        finish = delta.finish
        if delta.index not in answer.open:
            return
        if finish is None:
            answer.push(delta)
            return
        answer.record.finish(delta.index, finish)
        if finish.error is not None or finish.reason not in ("stop", "length"):
            self._end(answer, _error_of(finish), abort=len(answer.open) > 1)
        else:
            answer.open.discard(delta.index)
            self._admission.release(1, self._clock())
            if not answer.open:
                del self._answers[delta.request_id]
            answer.push(delta)

    def _on_peer_down(self, name: str) -> None:
        kind, _, digits = name.rpartition("-")
        if name in ("engine", "detokenizer"):
            # No request is let in until the supervisor says that the service is ready again.
            self._health = msgspec.structs.replace(self._health, ready=False)
            self._aborted.clear()
            self.close()
            error = self._restarted(f"The {name} failed while the request was running")
            for answer in list(self._answers.values()):
                # A failed engine forgets its requests; a failed detokenizer leaves them running.
                self._end(answer, error, abort=name == "detokenizer")
        elif kind == "tokenizer" and digits.isdigit() and int(digits) < len(self._lives):
            tokenizer = int(digits)
            self._lives[tokenizer] += 1
            self._down.add(tokenizer)
            error = self._restarted("A tokenizer failed while the request was in it")
            for answer in list(self._answers.values()):
                if answer.tokenizer == tokenizer and not answer.accepted:
                    self._end(answer, error, abort=True)

    def _restarted(self, message: str) -> WireError:
        return EngineRestarted(f"{message}. Retry.", retry_after_s=self._health.retry_after_s).wire()

    # ---- endings ----

    def _end(self, answer: Answer, error: WireError, *, abort: bool, reason: str = "abort") -> None:
        answer.end(error)
        if abort:
            self._abort(answer, reason)
        else:
            answer.record.engine_done()
        self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        if self._answers.pop(answer.request_id, None) is not None:
            self._admission.release(len(answer.open), self._clock())

    def _abort(self, answer: Answer, reason: str = "abort") -> None:
        message = AbortRequest(answer.request_id, "timeout" if reason == "timeout" else "abort")
        self._aborted[answer.request_id] = self._clock()
        if answer.record.open:
            self._last_words[answer.request_id] = (self._clock(), answer.record)
        if self._lives[answer.tokenizer] == answer.tokenizer_life:
            self._tokenizers[answer.tokenizer].send(message)
        else:  # the process that knew the request is gone: whatever got through is at the engine
            self._engine.send(message)

    def _abort_unknown(self, delta: Delta) -> None:
        """Output nobody waits for: of an aborted request, or one of an earlier life of this process."""
        if delta.finish is not None:
            if left := self._last_words.get(delta.request_id):
                left[1].finish(delta.index, delta.finish)
                if not left[1].open:
                    del self._last_words[delta.request_id]
            return
        now = self._clock()
        if now - self._aborted.get(delta.request_id, -math.inf) >= _REPEAT_ABORT_S:
            self._aborted[delta.request_id] = now
            self._engine.send(AbortRequest(delta.request_id))

    def _choose_tokenizer(self) -> int:
        """Round robin over those that are up; over all if none is."""
        count = len(self._tokenizers)
        order = [(self._next_tokenizer + k) % count for k in range(count)]
        chosen = next((j for j in order if j not in self._down), order[0])
        self._next_tokenizer = (chosen + 1) % count
        return chosen


def _error_of(finish: Finish) -> WireError:
    return finish.error or RequestFailed(f"The engine ended the request ({finish.reason})").wire()
