"""Each step computes some number of tokens for each request: no prefill phase, no decode phase.

A pure state machine: ``schedule`` says what the next step computes, ``update`` takes what it sampled. Several steps may
be in flight; ``update`` gets them in order. Every request added ends exactly once, in ``update`` or ``take_ended``.

All KV access is on one stream in the order of the steps, so an ended or preempted request's pages are free at once. Its
slot, and a preempted request's return to the queue, wait for the results in flight. In an undisturbed step the work is
a fixed number of vector operations; Python loops run over events only (a page is full, a request starts or ends).
"""

from typing import Literal

import msgspec
import numpy as np

from mizzen.config.config import SchedulingPolicy
from mizzen.errors import RequestTimedOut, WireError
from mizzen.ipc.messages import ChoiceEnded, FinishReason, Load, Timings
from mizzen.kv_cache.cache import KVCache
from mizzen.kv_cache.page_tables import PageTables
from mizzen.scheduler.output import Int32, Int64, SampledTokens, SchedulerOutput, SlotStart
from mizzen.scheduler.pace import paced_budget
from mizzen.scheduler.plan import StepKind, plan_step
from mizzen.scheduler.registry import Registry
from mizzen.scheduler.request import Request, RequestState
from mizzen.scheduler.running import IntP, Running
from mizzen.scheduler.slots import Slots
from mizzen.scheduler.waiting import WaitingQueue, policy_key

_Row = tuple[int, int, int, bool]  # slot, num_computed, num_scheduled, samples
WATERMARK = 0.01  # of the pool stays free at admission, so that what runs can grow before it must preempt
PREFILL_STEPS = 64  # in a row for which decoding waits where batches are not mixed: prompts may never stop coming


class StepResult(msgspec.Struct):
    """What one step brought, without the rows of requests that had ended before. ``rows`` index SampledTokens' rows."""

    handles: Int64  # [K]
    token_ids: Int32  # [K]
    rows: IntP  # [K], ascending
    ended: list[ChoiceEnded]


class Scheduler:
    """``eos_token_ids`` end a request unless it ignores them; its own stop_token_ids always do.

    ``prefill_steps``: 0 mixes batches; else a step prefills, while there are prompts and for so many steps in a row,
    or decodes.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        policy: SchedulingPolicy,
        max_running_requests: int,
        max_batch_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        prefill_steps: int = 0,
    ) -> None:
        assert kv_cache.pages_for(max_model_len) <= kv_cache.num_pages, "a request that runs alone must fit"
        self._kv_cache = kv_cache
        self._policy = policy
        self._max_batch_tokens = max_batch_tokens
        self._prefill_steps = prefill_steps
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._slots = Slots(max_running_requests, max_model_len)
        self._pages = PageTables(kv_cache, max_running_requests, max_model_len)
        reserve = kv_cache.allocation == "reserve"  # then nothing grows
        self._watermark = 0 if reserve else int(kv_cache.num_pages * WATERMARK) + 1
        self._ones = np.ones(max_running_requests, np.int32)
        self._true = np.ones(max_running_requests, np.bool_)

        self._requests = Registry()
        self._waiting = WaitingQueue(policy)
        self._running = Running(self._slots)
        self._draining: list[int] = []  # slots of ended and preempted requests with results in flight
        self._num_preempted = 0  # of these, preempted
        self._ended: list[ChoiceEnded] = []
        self._blocked_at: int | None = None  # pages that were available when the first waiting request did not fit

        self._next_number = 0
        self._next_step = 0
        self._prefilled_steps = 0  # since the last one that decoded
        self._updated_step = -1
        self._generated_tokens = 0
        self._preemptions = 0
        self._prefix_queries = 0  # tokens, of prompts at their first admission
        self._prefix_hits = 0

    # ---- requests come and go ----

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_preempted

    def has_work(self) -> bool:
        return len(self._requests) > 0

    def load(self) -> Load:
        available = self._kv_cache.num_available
        return Load(
            running=self.num_running,
            waiting=self.num_waiting,
            kv_pages_total=self._kv_cache.num_pages,
            kv_pages_used=self._kv_cache.num_pages - available,
            kv_pages_cached=self._kv_cache.num_cached,
            steps=self._updated_step + 1,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            waiting_preempted=self._waiting.num_preempted + self._num_preempted,
            waiting_for=self._waiting_for(),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
        )

    def _waiting_for(self) -> Literal["slots", "kv_pages", "batch_tokens"]:
        if not self._slots.num_free:
            return "slots"
        return "batch_tokens" if self._blocked_at is None else "kv_pages"

    def add(self, request: Request, now: float) -> None:
        assert request.sampling.max_tokens is not None
        max_len = len(request.prompt) + request.sampling.max_tokens
        assert 0 < len(request.prompt) < max_len <= self._max_model_len
        state = RequestState(
            request=request,
            max_len=max_len,
            key=policy_key(self._policy, request, self._next_number),
            timings=Timings(request.arrival_s, request.tokenize_s, request.tokenized_s, queued_s=now),
            tokens=np.require(request.prompt, np.int32, ("C", "W")),  # a view of a message's bytes is read-only
        )
        self._next_number += 1
        self._requests.add(state)
        self._enqueue(state)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends all choices of a request; ``reason`` "timeout" makes it a RequestTimedOut."""
        for state in self._requests.choices(request_id):
            if reason == "timeout":
                self._time_out(state)
            else:
                self._ended.append(self._end(state, "abort"))

    def abort_api(self, api: int) -> None:
        for state in [state for state in self._requests if state.request.api == api]:
            self._ended.append(self._end(state, "abort"))

    def abort_all(self, error: WireError | None = None) -> None:
        for state in list(self._requests):
            self._ended.append(self._end(state, "error" if error else "abort", error=error))

    def stop(self, handle: int) -> None:
        """The detokenizer found a stop string. A handle that has ended is ignored: the message crossed its end."""
        state = self._requests.get(handle)
        if state is not None:
            self._ended.append(self._end(state, "stop"))

    def expire(self, now: float) -> None:
        for state in self._requests.take_expired(now):
            self._time_out(state)

    def take_ended(self) -> list[ChoiceEnded]:
        """What has ended outside of ``update`` since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _time_out(self, state: RequestState) -> None:
        error = RequestTimedOut("The request took longer than its time limit.").wire()
        self._ended.append(self._end(state, "error", error=error))

    def _end(
        self,
        state: RequestState,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: WireError | None = None,
    ) -> ChoiceEnded:
        """Ends a request wherever it is. Its slot stays taken while results for it are in flight."""
        request, slot = state.request, state.slot
        if slot is None:
            known = len(state.tokens)
            self._dequeue(state)
        else:
            known = int(self._slots.num_known[slot])
            self._save_times(state, slot)
            if state.running:
                self._stop_running(state, slot)
                if self._slots.last_step[slot] <= self._updated_step:
                    self._slots.put(slot)
                else:
                    self._slots.ended[slot] = True
                    self._draining.append(slot)
            else:
                self._num_preempted -= 1
                self._slots.ended[slot] = True  # in self._draining already
        self._requests.remove(state)
        return ChoiceEnded(
            handle=request.handle,
            reason=reason,
            completion_tokens=known - state.num_prompt_tokens,
            cached_tokens=state.cached_tokens or 0,
            stop_token_id=stop_token_id,
            error=error,
            timings=state.timings,
        )

    def _stop_running(self, state: RequestState, slot: int) -> None:
        """Gives up the pages; what is known of them stays cached."""
        self._running.remove(state)
        state.running = False
        slots = self._slots
        full = min(int(slots.num_computed[slot]), int(slots.num_known[slot]))
        self._pages.release(slot, slots.tokens[slot], full)

    def _save_times(self, state: RequestState, slot: int) -> None:
        if state.timings.first_token_s is not None:
            state.timings.last_token_s = float(self._slots.last_token_s[slot])

    def _enqueue(self, state: RequestState) -> None:
        self._waiting.add(state)
        self._blocked_at = None

    def _dequeue(self, state: RequestState) -> None:
        self._waiting.remove(state)
        self._blocked_at = None

    # ---- preemption ----

    def _preempt_last(self) -> None:
        """Takes the pages of the last request in policy order; it will compute its tokens again."""
        assert len(self._running) > 1, "a request that runs alone fits"
        state = self._running.last
        slot = state.slot
        assert slot is not None
        self._stop_running(state, slot)
        state.preempted = True
        self._preemptions += 1
        if self._slots.last_step[slot] <= self._updated_step:
            self._requeue(state, slot)
        else:
            self._num_preempted += 1
            self._draining.append(slot)

    def _requeue(self, state: RequestState, slot: int) -> None:
        state.tokens = self._slots.tokens[slot, : self._slots.num_known[slot]].copy()
        self._save_times(state, slot)
        state.slot = None
        self._slots.put(slot)
        self._enqueue(state)

    def _drain(self) -> None:
        """Frees the slots whose last result has come; preempted requests wait again."""
        if not self._draining:
            return
        waiting, self._draining = self._draining, []
        for slot in waiting:
            if self._slots.last_step[slot] > self._updated_step:
                self._draining.append(slot)
            elif self._slots.ended[slot]:
                self._slots.put(slot)
            else:
                state = self._slots.occupants[slot]
                assert state is not None
                self._num_preempted -= 1
                self._requeue(state, slot)

    # ---- a step begins ----

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next step, or None if nothing can be scheduled now (results in flight may change that)."""
        preemptions = self._preemptions
        if not self._prefill_steps:
            return self._schedule("mixed", now, preemptions)
        prefill_first = self._prefilled_steps < self._prefill_steps
        kinds: tuple[StepKind, ...] = ("prefill", "decode") if prefill_first else ("decode", "prefill")
        for kind in kinds:
            output = self._schedule(kind, now, preemptions)
            if output is not None:
                self._prefilled_steps = self._prefilled_steps + 1 if kind == "prefill" else 0
                return output
        return None

    def _schedule(self, kind: StepKind, now: float, preemptions: int) -> SchedulerOutput | None:
        """``preemptions``: how many there had been when this step's scheduling began."""
        budget = self._max_batch_tokens
        if self._policy == "longest-output" and kind == "mixed":
            budget = paced_budget(budget, self._running, self._waiting, self._slots)
        while (plan := plan_step(kind, budget, self._running, self._slots, self._pages, self._kv_cache)) is None:
            self._preempt_last()
        decode, decode32, computed, full_pages, chunks = plan
        if len(decode):
            self._commit_decode(decode, computed, full_pages)
        rows = [self._commit_chunk(slot, count) for slot, count in chunks]
        started: list[SlotStart] = []
        # Who was just preempted must not come back for the same pages.
        if kind != "decode" and preemptions == self._preemptions:
            self._admit(budget - len(decode) - sum(count for _, count in chunks), now, rows, started)
        if not len(decode) and not rows:
            return None
        page_slots, page_columns, page_ids = self._pages.take_changes()
        output = SchedulerOutput(
            step=self._next_step,
            slots=decode32,
            num_computed=computed,
            num_scheduled=self._ones[: len(decode)],
            samples=self._true[: len(decode)],
            num_decode_rows=len(decode),
            started=started,
            page_slots=page_slots,
            page_columns=page_columns,
            page_ids=page_ids,
        )
        if rows:
            slots, starts, counts, samples = zip(*rows, strict=True)
            output.slots = np.concatenate((output.slots, np.array(slots, np.int32)))
            output.num_computed = np.concatenate((computed, np.array(starts, np.int32)))
            output.num_scheduled = np.concatenate((output.num_scheduled, np.array(counts, np.int32)))
            output.samples = np.concatenate((output.samples, np.array(samples, np.bool_)))
        self._next_step += 1
        return output

    def _commit_decode(self, decode: IntP, computed: Int32, full_pages: IntP) -> None:
        slots, pages = self._slots, self._pages
        if len(full_pages):
            pages.grow_each(full_pages)
        computed = computed + 1
        num_tokens = computed + 1
        slots.num_computed[decode] = computed
        slots.num_tokens[decode] = num_tokens
        slots.last_step[decode] = self._next_step
        if (num_tokens >= slots.max_len[decode]).any():
            self._running.counters_changed()
        for index in np.flatnonzero(np.minimum(computed, slots.num_known[decode]) >= pages.next_register[decode]):
            slot = int(decode[index])
            pages.register(slot, slots.tokens[slot], int(computed[index]))

    def _commit_chunk(self, slot: int, count: int) -> _Row:
        """Schedules ``count`` tokens, all known; the row samples if they are all that was left."""
        slots = self._slots
        start = int(slots.num_computed[slot])
        end = start + count
        self._pages.grow(slot, end)
        slots.num_computed[slot] = end
        slots.last_step[slot] = self._next_step
        samples = end == int(slots.num_tokens[slot])
        if samples:
            slots.num_tokens[slot] = end + 1
        self._pages.register(slot, slots.tokens[slot], end)
        self._running.counters_changed()
        return slot, start, count, samples

    def _admit(self, budget: int, now: float, rows: list[_Row], started: list[SlotStart]) -> None:
        """Starts waiting requests while budget, slots and pages last. The first that does not fit holds up the rest."""
        if not budget or not len(self._waiting) or not self._slots.num_free:
            return
        kv_cache, slots = self._kv_cache, self._slots
        if self._blocked_at is not None and kv_cache.num_available <= self._blocked_at:
            return  # nothing has changed for the one that did not fit: not worth matching its prefix again
        for state in self._waiting.candidates(self._cached_pages):
            count = len(state.tokens)
            needed = state.max_len - 1 if kv_cache.allocation == "reserve" else count  # the last token has no KV
            spare = self._watermark if self._running else 0
            slot = slots.next_free
            hit = self._pages.start(slot, state.tokens, state.salt, needed, spare)
            if hit is None:
                self._blocked_at = kv_cache.num_available
                break
            self._dequeue(state)
            if kv_cache.allocation == "reserve":
                self._pages.grow(slot, needed)
            slots.take(state, hit, self._stop_ids(state.request))
            state.slot = slot
            state.running, state.preempted = True, False
            self._running.add(state)
            request = state.request
            started.append(
                SlotStart(slot, request.handle, state.tokens, len(request.prompt), hit, request.sampling, request.seed)
            )
            if state.cached_tokens is None:
                state.cached_tokens = hit
                self._prefix_queries += count
                self._prefix_hits += hit
                state.timings.scheduled_s = now
            state.tokens = _NO_TOKENS  # the slot has them now
            row = self._commit_chunk(slot, min(budget, count - hit))
            rows.append(row)
            budget -= row[2]
            if not budget or not slots.num_free:
                break

    def _cached_pages(self, state: RequestState) -> int:
        limit = (len(state.tokens) - 1) // self._kv_cache.page_size
        return self._kv_cache.prefixes.match(state.tokens, state.salt, limit)

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        eos = () if request.sampling.ignore_eos else self._eos_token_ids
        return tuple(dict.fromkeys((*eos, *request.sampling.stop_token_ids)))

    # ---- a step's result ----

    def update(self, output: SchedulerOutput, sampled: SampledTokens, now: float) -> StepResult:
        """Takes the tokens that ``output`` sampled. Outputs are updated in their order, each once."""
        assert output.step == self._updated_step + 1
        self._updated_step = output.step
        slots = self._slots
        token_ids = sampled.token_ids
        rows: IntP = np.arange(len(token_ids))
        where = output.slots.astype(np.intp)
        if output.num_decode_rows < output.num_rows:
            where = where[output.samples]
        assert len(where) == len(token_ids)
        if self._draining:
            alive = ~slots.ended[where]
            rows, where, token_ids = rows[alive], where[alive], token_ids[alive]
        known = slots.num_known[where]
        slots.tokens[where, known] = token_ids
        first = known == slots.num_prompt[where]
        known = known + 1
        slots.num_known[where] = known
        slots.last_token_s[where] = now
        self._generated_tokens += len(where)
        for slot in where[first]:
            state = slots.occupants[slot]
            assert state is not None
            state.timings.first_token_s = now
        for slot in where[known >= self._pages.next_register[where]].tolist():
            full = min(int(slots.num_computed[slot]), int(slots.num_known[slot]))
            self._pages.register(slot, slots.tokens[slot], full)
        stopped = (slots.stop_ids[where] == token_ids[:, None]).any(1) & (known >= slots.stops_from[where])
        ended: list[ChoiceEnded] = []
        for index in np.flatnonzero(stopped | (known >= slots.max_len[where])).tolist():
            state = slots.occupants[where[index]]
            assert state is not None
            stop_token_id = int(token_ids[index]) if stopped[index] else None
            ended.append(self._end(state, "length" if stop_token_id is None else "stop", stop_token_id=stop_token_id))
        handles = slots.handles[where]
        self._drain()
        return StepResult(handles, token_ids, rows, ended)

    # ---- checks ----

    def check(self) -> None:
        """Asserts every invariant. Walks everything: for tests, and for an idle engine."""
        self._pages.check()
        self._slots.check(self._updated_step)
        self._requests.check()
        self._running.check()
        running = self._running.states()
        preempted = [self._slots.occupants[slot] for slot in self._draining if not self._slots.ended[slot]]
        states = running + self._waiting.states() + preempted
        assert len(states) == len(self._requests)
        assert set(map(id, states)) == set(map(id, self._requests))
        assert all(state is not None and state.running == (state in running) for state in states)
        assert len(preempted) == self._num_preempted
        for state in running:
            assert state.slot is not None
            assert self._slots.num_computed[state.slot] <= self._pages.capacity[state.slot]
        assert len(set(self._draining)) == len(self._draining)
        assert self._slots.num_taken == len(running) + len(self._draining)


_NO_TOKENS = np.empty(0, np.int32)
