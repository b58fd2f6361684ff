"""A device without arithmetic: the "KV" of a position is the identity of its whole token prefix.

Each row that runs must find, through its page table, exactly the prefixes of its own tokens: a page that was freed too
early, handed out twice or matched wrongly shows at once. The next token is a function of the prefix and the seed, so
that a request's answer must not depend on batching, chunking, caching, preemption or overlap.
"""

import hashlib
from collections import deque

import numpy as np

from mizzen.ipc.messages import ChoiceEnded
from mizzen.kv_cache.cache import KVCache
from mizzen.kv_cache.radix_tree import RadixTree
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import SampledTokens, SchedulerOutput, decode_step, encode_step
from mizzen.scheduler.request import Request
from mizzen.scheduler.scheduler import Scheduler

VOCABULARY = 2  # few tokens: many shared prefixes
EOS = 7


def match_keys(a: np.ndarray, b: np.ndarray) -> int:
    count = 0
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        if x != y:
            break
        count += 1
    return count


class Prefixes:
    """Numbers for token prefixes: equal numbers mean equal tokens (and salt)."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def root(self, salt: str | None) -> int:
        return self._numbers.setdefault((f"salt {salt}", 0), len(self._numbers) + 1)

    def extend(self, prefix: int, token: int) -> int:
        return self._numbers.setdefault((prefix, token), len(self._numbers) + 1)


def next_token(tokens: list[int], num_prompt: int, request: Request) -> int:
    """A fixed function of all tokens and the seed; EOS about once in ten, never before min_tokens."""
    mixed = request.seed + 1
    for token in tokens[-12:]:
        mixed = (mixed * 6364136223846793005 + token + 1442695040888963407) % 2**61
    mixed = (mixed ^ len(tokens) * 0x9E3779B97F4A7C15) >> 17
    generated = len(tokens) - num_prompt
    if mixed % 10 == 0 and generated >= request.sampling.min_tokens and not request.sampling.ignore_eos:
        return EOS
    return int(mixed // 10 % VOCABULARY)


def reference(request: Request) -> tuple[list[int], str]:
    """What the request must be answered if nothing ends it from outside: tokens and finish reason."""
    tokens, num_prompt = request.prompt.tolist(), len(request.prompt)
    assert request.sampling.max_tokens is not None
    while True:
        token = next_token(tokens, num_prompt, request)
        tokens.append(token)
        generated = len(tokens) - num_prompt
        stops = token in request.sampling.stop_token_ids or (token == EOS and not request.sampling.ignore_eos)
        if stops and generated >= request.sampling.min_tokens:
            return tokens[num_prompt:], "stop"
        if generated == request.sampling.max_tokens:
            return tokens[num_prompt:], "length"


def _digest(salt: str | None) -> bytes:
    return b"" if salt is None else hashlib.sha256(salt.encode()).digest()


class FakeDevice:
    def __init__(
        self, num_slots: int, num_pages: int, page_size: int, max_model_len: int, max_batch_tokens: int
    ) -> None:
        self._page_size = page_size
        self._max_batch_tokens = max_batch_tokens
        self._table = np.full((num_slots, -(-max_model_len // page_size)), -1, np.int64)
        self.kv = np.zeros((num_pages, page_size), np.int64)
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]
        self._prefix: list[list[int]] = [[] for _ in range(num_slots)]  # of each token, its prefix's number
        self._computed = [0] * num_slots
        self._handles = [-1] * num_slots
        self._num_prompt = [0] * num_slots
        self.prefixes = Prefixes()
        self.requests: dict[int, Request] = {}

    def run(self, output: SchedulerOutput) -> SampledTokens:
        for start in output.started:
            slot, request = start.slot, self.requests[start.handle]
            assert start.token_ids[: start.num_prompt_tokens].tolist() == request.prompt.tolist()
            assert start.seed == request.seed
            assert start.num_computed_tokens < len(start.token_ids)
            self._tokens[slot], self._prefix[slot] = [], []
            self._handles[slot], self._num_prompt[slot] = start.handle, start.num_prompt_tokens
            self._computed[slot] = start.num_computed_tokens
            self._table[slot] = -1
            for token in start.token_ids.tolist():
                self._push(slot, token)
        self._table[output.page_slots, output.page_columns] = output.page_ids
        self._check_rows(output)
        size, written = self._page_size, set()
        for slot, start, count in self._rows(output):
            for position in range(start, start + count):
                cell = (int(self._table[slot, position // size]), position % size)
                assert cell[0] >= 0, "a row computes a token without a page for it"
                assert cell not in written, "two rows write the same place"
                written.add(cell)
                self.kv[cell] = self._prefix[slot][position]
        for slot, start, count in self._rows(output):
            positions = np.arange(start + count)
            read = self.kv[self._table[slot, positions // size], positions % size]
            assert read.tolist() == self._prefix[slot][: start + count], "a row reads another sequence's KV"
            self._computed[slot] = start + count
        sampled = []
        for slot, samples in zip(output.slots.tolist(), output.samples.tolist(), strict=True):
            assert samples == (self._computed[slot] == len(self._tokens[slot]))
            if samples:
                request = self.requests[self._handles[slot]]
                self._push(slot, next_token(self._tokens[slot], self._num_prompt[slot], request))
                sampled.append(self._tokens[slot][-1])
        return SampledTokens(np.array(sampled, np.int32))

    def _push(self, slot: int, token: int) -> None:
        path = self._prefix[slot]
        before = path[-1] if path else self.prefixes.root(self.requests[self._handles[slot]].cache_salt)
        self._tokens[slot].append(token)
        path.append(self.prefixes.extend(before, token))

    def _rows(self, output: SchedulerOutput) -> list[tuple[int, int, int]]:
        columns = (output.slots.tolist(), output.num_computed.tolist(), output.num_scheduled.tolist())
        return list(zip(*columns, strict=True))

    def _check_rows(self, output: SchedulerOutput) -> None:
        rows = self._rows(output)
        assert rows
        assert 0 < output.num_tokens <= self._max_batch_tokens
        assert len({slot for slot, _, _ in rows}) == len(rows)
        assert all(array.dtype == np.int32 for array in (output.slots, output.num_computed, output.num_scheduled))
        assert all(array.dtype == np.int32 for array in (output.page_slots, output.page_columns, output.page_ids))
        assert output.samples.dtype == np.bool_
        for index, (slot, start, count) in enumerate(rows):
            assert count > 0
            assert start == self._computed[slot], "a row does not go on where its slot is"
            assert start + count <= len(self._tokens[slot]), "a row computes tokens that nobody knows"
            assert count == 1 or index >= output.num_decode_rows


class Simulation:
    """A scheduler, its device and whoever listens to it."""

    def __init__(
        self,
        *,
        num_pages: int = 32,
        page_size: int = 2,
        prefix_cache: str = "radix",
        allocation: str = "on-demand",
        policy: str = "fcfs",
        max_running_requests: int = 4,
        max_batch_tokens: int = 8,
        max_model_len: int = 32,
        prefill_steps: int = 0,
    ) -> None:
        self.max_model_len = max_model_len
        self.prefill_steps = prefill_steps
        self.kv_cache = KVCache(
            num_pages, page_size, prefix_cache=prefix_cache, allocation=allocation, match_keys=match_keys
        )
        self.scheduler = Scheduler(
            self.kv_cache,
            policy=policy,
            max_running_requests=max_running_requests,
            max_batch_tokens=max_batch_tokens,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            prefill_steps=prefill_steps,
        )
        self.device = FakeDevice(max_running_requests, num_pages, page_size, max_model_len, max_batch_tokens)
        self.in_flight: deque[tuple[SchedulerOutput, SampledTokens]] = deque()
        self.outputs: list[SchedulerOutput] = []
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, ChoiceEnded] = {}
        self.stopped: set[int] = set()  # for a stop string
        self.now = 0.0
        self._next_handle = 0

    def add(self, prompt: list[int], max_tokens: int = 4, *, request_id: str | None = None, **fields: object) -> int:
        """Adds a request; fields of Request and SamplingParams. Returns its handle."""
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        of_request = {
            name: fields.pop(name) for name in ("priority", "cache_salt", "deadline_s", "api", "seed") if name in fields
        }
        request = Request(
            handle=handle,
            request_id=request_id or f"request-{handle}",
            index=0,
            prompt=np.array(prompt, np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, **fields),
            arrival_s=self.now,
            **{"api": 0, "seed": handle, **of_request},
        )
        self.device.requests[handle] = request
        self.tokens[handle] = []
        self.scheduler.add(request, self.now)
        return handle

    def schedule(self) -> SchedulerOutput | None:
        """Schedules a step and runs it; its result stays in flight."""
        self.now += 1
        preemptions = self.scheduler.load().preemptions
        output = self.scheduler.schedule(self.now)
        if output is not None:
            assert not output.started or self.scheduler.load().preemptions == preemptions, "took pages, gave them away"
            assert not self.prefill_steps or output.num_decode_rows in (0, output.num_rows), "a mixed batch"
            # Through the wire format, as other ranks get it.
            self.in_flight.append((output, self.device.run(decode_step(encode_step(output)))))
            self.outputs.append(output)
        return output

    def update(self) -> None:
        """Hands the oldest result in flight over."""
        self.now += 1
        output, sampled = self.in_flight.popleft()
        result = self.scheduler.update(output, sampled, self.now)
        assert len(result.handles) == len(result.token_ids) == len(result.rows)
        assert sampled.token_ids[result.rows].tolist() == result.token_ids.tolist()
        for handle, token in zip(result.handles.tolist(), result.token_ids.tolist(), strict=True):
            assert handle not in self.ended, "a token after the end"
            self.tokens[handle].append(token)
        self._end(result.ended)

    def stop(self, handle: int) -> None:
        """The detokenizer found a stop string."""
        if handle in self.tokens and handle not in self.ended:
            self.stopped.add(handle)
        self.scheduler.stop(handle)
        self.collect()

    def collect(self) -> None:
        self._end(self.scheduler.take_ended())

    def _end(self, ended: list[ChoiceEnded]) -> None:
        for end in ended:
            assert end.handle not in self.ended, "two terminal outputs"
            self.ended[end.handle] = end
            assert end.completion_tokens == len(self.tokens[end.handle])

    def step(self, depth: int = 0) -> None:
        """One turn of the engine's loop."""
        output = self.schedule() if len(self.in_flight) <= depth else None
        if self.in_flight and (output is None or len(self.in_flight) > depth):
            self.update()
        self.collect()

    def check(self) -> None:
        """The scheduler's own invariants, and that each cached page holds what its key says."""
        self.scheduler.check()
        tree = self.kv_cache.prefixes
        if not isinstance(tree, RadixTree):
            return
        salts = {_digest(request.cache_salt): request.cache_salt for request in self.device.requests.values()}
        size = self.kv_cache.page_size
        stack = [(child, None) for child in tree._root.children.values()]
        while stack:
            node, prefix = stack.pop()
            if prefix is None:
                prefix = self.device.prefixes.root(salts[node.key[: len(node.key) - size * 4]])
            for position, token in enumerate(node.tokens[: node.num_pages * size].tolist()):
                prefix = self.device.prefixes.extend(prefix, token)
                page = node.pages[position // size]
                assert self.device.kv[page, position % size] == prefix, "a cached page holds something else"
            stack.extend((child, prefix) for child in node.children.values())

    def run(self, depth: int = 0, limit: int = 10_000) -> None:
        """Steps until all requests have ended."""
        for _ in range(limit):
            if not self.scheduler.has_work() and not self.in_flight:
                return
            before = len(self.outputs)
            idle = not self.in_flight
            self.step(depth)
            assert not idle or len(self.outputs) > before, "work, nothing in flight, and no step: it hangs"
        raise AssertionError("it does not end")

    def assert_answers(self) -> None:
        """Every request that ended by itself has exactly the answer that it would have had alone."""
        for handle, end in self.ended.items():
            if end.reason in ("stop", "length") and handle not in self.stopped:
                tokens, reason = reference(self.device.requests[handle])
                assert (self.tokens[handle], end.reason) == (tokens, reason)


def without_eos(simulation: Simulation, prompt: list[int], max_tokens: int, **fields: object) -> int:
    return simulation.add(prompt, max_tokens, ignore_eos=True, **fields)
