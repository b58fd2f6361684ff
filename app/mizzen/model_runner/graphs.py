"""CUDA graphs of whole steps: one for each number of tokens on a ladder, decode-only and mixed, samplers apart.

A graph reads its step from a buffer of its own, which one copy from the host fills; everything else is on the device by
slot. A step is padded to the next size: rows that only fill up have no tokens (mixed) or name the dummy slot (decode),
tokens that only fill up belong to a row of the dummy slot, and sampled rows that only fill up write to its tokens.

Behind each step's graph runs one of the sampler's, by what the step's rows ask for. Rows whose logits are changed first
(penalties, biases, bans) are drawn by torch, after the others: the sampler's twin changes and draws those rows alone.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, DecodeGraph, GraphSupport
from mizzen.kernels.triton.prepare import prepare_decode
from mizzen.kernels.triton.slots import SampledRows, SlotParams
from mizzen.model_runner.batch_state import BatchState, DrawFlags, Int64, PreparedStep
from mizzen.model_runner.kernel_sampler import kernel_sampler
from mizzen.model_runner.runner import CausalModel, EagerExecutor
from mizzen.model_runner.sampler import Sampled
from mizzen.platform.base import Annotate, without_name
from mizzen.scheduler.output import Int32


def decode_ladder(limit: int) -> list[int]:
    """Batch sizes: steps of 8 above 8, so that padding costs little where steps are long."""
    sizes = [1, 2, 4, *range(8, limit + 1, 8)]
    return [size for size in sizes if size < limit] + [limit]


def mixed_ladder(limit: int) -> list[int]:
    """Token counts: steps of 64 up to 512, then four sizes to each doubling: what is padded is computed, too. The
    largest is the limit itself, a budget's full step."""
    sizes, size = [], 64
    while size < limit:
        sizes.append(size)
        size += max(64, (1 << size.bit_length() - 1) // 4)
    return [*sizes, limit] if limit else []


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """``decode_rows``: the largest decode-only batch with a graph; ``mixed_tokens``: likewise of tokens in mixed steps
    (0: none); ``rows``: the most rows of any step."""

    decode_rows: int
    mixed_tokens: int
    rows: int


class _Layout:
    """Named parts of one int32 buffer, as numpy on the host and as tensors on the device."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.total = sum(sizes.values())
        self._bounds: dict[str, tuple[int, int]] = {}
        start = 0
        for name, size in sizes.items():
            self._bounds[name] = (start, start + size)
            start += size

    def host(self, buffer: Int32, name: str) -> Int32:
        start, stop = self._bounds[name]
        return buffer[start:stop]

    def device(self, buffer: Tensor, name: str) -> Tensor:
        start, stop = self._bounds[name]
        return buffer[start:stop]


@dataclass(slots=True)
class _Graph:
    layout: _Layout
    inputs: Tensor  # [layout.total] int32, on the device
    forward: torch.cuda.CUDAGraph
    samplers: dict[DrawFlags, torch.cuda.CUDAGraph]
    logits: Tensor  # [S, vocab]
    tokens: Tensor  # [S] int32
    held: tuple[Tensor, ...]  # what the graph reads and writes besides: memory that must not serve anything else
    planning: DecodeGraph | None = None  # where attention is planned on the host as well
    replays: int = 0


class GraphExecutor:
    """Replays a graph where the step fits one, else runs it eagerly."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        state: BatchState,
        eager: EagerExecutor,
        *,
        page_size: int,
        limits: GraphLimits,
        annotate: Annotate = without_name,
    ) -> None:
        self._model = model
        self._sampler = kernel_sampler(model.shard)
        self._draw = annotate("sampler", self._sampler.draw)
        self._attention = attention
        self._state = state
        self._eager = eager
        self._page_size = page_size
        self._limits = limits
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._decode: dict[int, _Graph] = {}
        self._mixed: dict[int, _Graph] = {}
        support = attention.graph_support
        self._decode_sizes = (
            decode_ladder(limits.decode_rows) if limits.decode_rows and support != GraphSupport.NONE else []
        )
        self._mixed_sizes = mixed_ladder(limits.mixed_tokens) if support == GraphSupport.ALL else []
        self._logits: Tensor | None = None  # [rows, vocab] for all graphs: a step's are used before the next begins

    def capture(self, progress: Callable[[float, str], None]) -> None:
        """From large to small, so that one pool of memory serves all. Each is run once before: kernels compile then."""
        pool = torch.cuda.graph_pool_handle()
        jobs: list[tuple[str, int]] = [("mixed", size) for size in reversed(self._mixed_sizes)]
        jobs += [("decode", size) for size in reversed(self._decode_sizes)]
        with torch.inference_mode():
            for done, (kind, size) in enumerate(jobs):
                progress(done / len(jobs), f"{kind} step of {size} tokens")
                if kind == "mixed":
                    self._mixed[size] = self._capture_mixed(size, pool)
                else:
                    self._decode[size] = self._capture_decode(size, pool)
        progress(1.0, "")

    # ---- running ----

    @property
    def steps(self) -> Mapping[str, int]:
        graphs = {"decode_graph": self._decode, "mixed_graph": self._mixed}
        return {name: sum(graph.replays for graph in of.values()) for name, of in graphs.items()} | self._eager.steps

    def run(self, step: PreparedStep) -> Sampled:
        graph = self._fill_graph(step)
        if graph is None:
            return self._eager.run(step)
        count = len(step.output_index)
        graph.forward.replay()
        graph.replays += 1
        logits, tokens = graph.logits[:count], graph.tokens[:count]
        if step.changed_rows is None or len(step.changed_rows) < count:
            graph.samplers[self._sampler.variant(step.draw)].replay()
        if step.changed_rows is not None:
            self._draw_changed(step, step.changed_rows, logits, tokens)
        if step.logprob_rows is None:
            return Sampled(tokens)
        rows = self._state.upload_indices(step.logprob_rows)
        return Sampled(tokens, *self._sampler.logprobs(logits, rows, tokens, step.num_logprobs))

    def _draw_changed(self, step: PreparedStep, rows: Int64, logits: Tensor, tokens: Tensor) -> None:
        """Draws the rows whose logits are changed, over what the graph drew for them."""
        part = step.changed_only()
        arrays = self._state.upload(part)
        indices = self._state.upload_indices(rows)
        inputs = self._state.sampling_inputs(part, arrays)
        sampled = self._sampler.sample(logits[indices], inputs)
        self._state.store(inputs, sampled.token_ids)
        tokens[indices] = sampled.token_ids.to(torch.int32)

    def _fill_graph(self, step: PreparedStep) -> _Graph | None:
        """The graph that this step fits, its inputs under way and the state up to date; None if there is none."""
        output = step.output
        tokens = int(step.query_start[-1])
        if output.num_decode_rows == output.num_rows:
            size = _next_size(self._decode_sizes, tokens)
            graph, fill = self._decode.get(size), self._fill_decode
        else:
            size = _next_size(self._mixed_sizes, tokens) if len(step.output_index) else 0
            graph, fill = self._mixed.get(size), self._fill_mixed
            if output.num_rows - output.num_decode_rows > _prefill_rows(size):
                graph = None
        if graph is None:
            return None
        self._state.apply(step, self._state.upload_changes(step))
        host = torch.empty(graph.layout.total, dtype=torch.int32, pin_memory=True)
        fill(step, graph.layout, host.numpy())
        graph.inputs.copy_(host, non_blocking=True)
        if graph.planning is not None:
            graph.planning.plan_on_host(graph.layout.host(host.numpy(), "seq_lens"))
        return graph

    def _fill_decode(self, step: PreparedStep, layout: _Layout, buffer: Int32) -> None:
        rows = step.output.num_rows
        slots, seq_lens = layout.host(buffer, "row_slots"), layout.host(buffer, "seq_lens")
        slots[:rows], slots[rows:] = step.output.slots, self._state.dummy_slot
        seq_lens[:rows], seq_lens[rows:] = step.seq_lens, 1

    def _fill_mixed(self, step: PreparedStep, layout: _Layout, buffer: Int32) -> None:
        def fill(name: str, values: Int32, rest: int) -> None:
            part = layout.host(buffer, name)
            part[: len(values)], part[len(values) :] = values, rest

        arrays, dummy = step.arrays, self._state.dummy_slot
        tokens, rows = int(step.query_start[-1]), self._limits.rows
        fill("row_slots", step.output.slots, dummy)
        fill("seq_lens", step.seq_lens, 0)
        fill("query_start", step.query_start, tokens)
        fill("token_rows", arrays["token_rows"].astype(np.int32), rows)
        fill("positions", arrays["positions"].astype(np.int32), 0)
        fill("sample_tokens", arrays["sample_tokens"].astype(np.int32), 0)
        fill("sample_slots", arrays["sample_slots"].astype(np.int32), dummy)
        fill("sample_lens", arrays["sample_lens"].astype(np.int32), 1)

    # ---- capturing ----

    def _capture_decode(self, size: int, pool: Any) -> _Graph:
        layout = _Layout({"row_slots": size, "seq_lens": size})
        host = np.empty(layout.total, np.int32)
        layout.host(host, "row_slots")[:], layout.host(host, "seq_lens")[:] = self._state.dummy_slot, 1
        inputs = torch.from_numpy(host).cuda()
        slots, seq_lens = layout.device(inputs, "row_slots"), layout.device(inputs, "seq_lens")
        state = self._state.device
        token_ids, positions, kv_slots = (torch.empty(size, dtype=torch.int64, device="cuda") for _ in range(3))
        query_start = torch.arange(size + 1, dtype=torch.int32, device="cuda")
        batch = Batch(
            token_ids=token_ids,
            positions=positions,
            kv_slots=kv_slots,
            page_table=state.page_table,
            row_slots=slots,
            seq_lens=seq_lens,
            query_start=query_start,
            sample_tokens=query_start[:size],
            num_decode_rows=size,
            seq_lens_host=[],
            query_start_host=[],
        )
        planning = None
        if self._attention.graph_support == GraphSupport.DECODE:
            planning = self._attention.decode_graph(batch)
            planning.plan_on_host(layout.host(host, "seq_lens"))
        plan = self._attention.plan if planning is None else planning.plan_on_device

        def forward(logits: Tensor | None) -> Tensor:
            prepare_decode(
                slots, seq_lens, state.token_table, state.page_table, self._page_size, token_ids, positions, kv_slots
            )
            plan(batch)
            return self._model.local_logits(self._model.forward(batch, self._attention), logits)

        held = (token_ids, positions, kv_slots, query_start)
        graph = self._capture(layout, inputs, forward, slots, seq_lens, held, pool)
        graph.planning = planning
        return graph

    def _capture_mixed(self, size: int, pool: Any) -> _Graph:
        rows, samples = self._limits.rows, min(size, self._limits.rows)
        sizes = {
            "row_slots": rows + 1,
            "seq_lens": rows,
            "query_start": rows + 1,
            "token_rows": size,
            "positions": size,
        }
        layout = _Layout({**sizes, "sample_tokens": samples, "sample_slots": samples, "sample_lens": samples})
        host = np.zeros(layout.total, np.int32)
        layout.host(host, "row_slots")[:] = layout.host(host, "sample_slots")[:] = self._state.dummy_slot
        layout.host(host, "sample_lens")[:], layout.host(host, "token_rows")[:] = 1, rows
        inputs = torch.from_numpy(host).cuda()
        part = {name: layout.device(inputs, name) for name in (*sizes, "sample_tokens", "sample_slots", "sample_lens")}
        state = self._state.device

        def forward(logits: Tensor | None) -> Tensor:
            positions = part["positions"].to(torch.int64)
            token_slots = part["row_slots"][part["token_rows"]]
            pages = state.page_table[token_slots, positions // self._page_size].to(torch.int64)
            batch = Batch(
                token_ids=state.token_table[token_slots, positions].to(torch.int64),
                positions=positions,
                kv_slots=pages * self._page_size + positions % self._page_size,
                page_table=state.page_table,
                row_slots=part["row_slots"][:rows],
                seq_lens=part["seq_lens"],
                query_start=part["query_start"],
                sample_tokens=part["sample_tokens"],
                # which rows they are is decided on the device: what counts is that no more are left for prefill
                num_decode_rows=rows - min(rows, _prefill_rows(size)),
                seq_lens_host=[],
                query_start_host=[],
            )
            self._attention.plan(batch)
            hidden = self._model.forward(batch, self._attention)
            return self._model.local_logits(hidden[batch.sample_tokens], logits)

        return self._capture(layout, inputs, forward, part["sample_slots"], part["sample_lens"], (), pool)

    def _capture(
        self,
        layout: _Layout,
        inputs: Tensor,
        forward: Callable[[Tensor | None], Tensor],
        slots: Tensor,
        lengths: Tensor,
        held: tuple[Tensor, ...],
        pool: Any,
    ) -> _Graph:
        state = self._state
        tokens = torch.empty(len(slots), dtype=torch.int32, device="cuda")
        rows = SampledRows(slots, lengths, state.device.token_table, tokens)
        params = SlotParams(*state.device.sampling_columns())

        if self._logits is None:
            self._logits = forward(None).new_empty((self._limits.rows, self._model.shard.width))
        logits = self._logits[: len(slots)]
        forward(logits)
        for flags in self._sampler.variants:
            self._draw(logits, rows, params, flags)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what this run used is the pool's to have
        forward_graph = torch.cuda.CUDAGraph()
        with self._recording(forward_graph, pool):
            forward(logits)
        samplers = {flags: torch.cuda.CUDAGraph() for flags in self._sampler.variants}
        for flags, graph in samplers.items():
            with self._recording(graph, pool):
                self._draw(logits, rows, params, flags)
        return _Graph(layout, inputs, forward_graph, samplers, logits, tokens, held)

    @contextlib.contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        """As torch.cuda.graph, which besides empties the allocator's cache: seconds, for hundreds of graphs."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool)
            yield
            graph.capture_end()


def _prefill_rows(size: int) -> int:
    """The most prefill rows of a mixed graph: attention's grid has room for as many. More are rare, and run eagerly."""
    return max(16, size // 64)


def _next_size(sizes: Sequence[int], wanted: int) -> int:
    """The smallest size that holds it, 0 if there is none."""
    return next((size for size in sizes if size >= wanted), 0)
