"""FlashInfer's paged attention: planned once a step from lengths that the host knows, page tables read on the device.

A plan is worked out on the host, in a pinned buffer, and copied to the device at the head of the step. FlashInfer makes
that copy behind torch's back, so a buffer is not written again before the step that read it has begun. Decode steps
in CUDA graphs have a wrapper for each size, all over the same buffers; the plan is renewed before each replay.
Prefill takes FlashInfer's FA3 kernels on sm90, FA2 elsewhere. On sm100 TensorRT-LLM's kernels take the place of both
(``mizzen.attention.trtllm``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from flashinfer.decode import fast_decode_plan
from torch import Tensor

from mizzen.attention.base import AttentionBackend, Batch, DecodeGraph, GraphSupport, KVTensors
from mizzen.errors import ConfigError
from mizzen.kernels.triton.page_indices import page_indices

WORKSPACE_BYTES = 256 << 20  # what FlashInfer splits long rows into; twice what it asks for at least
INT_WORKSPACE_BYTES = 8 << 20  # a plan
PLANS_IN_FLIGHT = 3  # pinned buffers: with fewer, the host would wait for the device at overlap depth 1

# From so many rows on tensor cores are faster, even with 2 query heads a KV head (shared/device/README.md: 48 against
# 54 us at 32 rows, 174 against 137 at 128).
TENSOR_CORE_ROWS = 64
CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 8})  # query heads a KV head that the kernel without tensor cores is made for

Int32 = npt.NDArray[np.int32]


def make_prefill(
    kv: KVTensors, *, num_heads: int, max_rows: int, max_tokens: int, device: torch.device
) -> AttentionBackend:
    """Raises ConfigError for what FlashInfer does not do."""
    major = _check(kv, device)
    if major == 10:
        from mizzen.attention.trtllm import TrtllmPrefill

        return TrtllmPrefill(kv, device=device)
    return FlashInferPrefill(kv, num_heads=num_heads, device=device, kernels="fa3" if major == 9 else "fa2")


def make_decode(
    kv: KVTensors, *, num_heads: int, max_rows: int, max_tokens: int, device: torch.device
) -> AttentionBackend:
    """Raises ConfigError for what FlashInfer does not do."""
    if _check(kv, device) == 10:
        from mizzen.attention.trtllm import TrtllmDecode

        return TrtllmDecode(kv, device=device)
    return FlashInferDecode(kv, num_heads=num_heads, max_rows=max_rows, device=device)


def _check(kv: KVTensors, device: torch.device) -> int:
    """The major compute capability."""
    dtype, head_dim = kv.k[0].dtype, kv.k[0].shape[-1]
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim not in (64, 128, 256):
        raise ConfigError(
            "attention backend 'flashinfer' needs a CUDA GPU, 16-bit floats and a head size of 64, 128 or 256, "
            f"not {device.type}, {dtype} and {head_dim}",
            setting="MIZZEN_ATTENTION_BACKEND",
        )
    return torch.cuda.get_device_capability(device)[0]


class FlashInferPrefill(AttentionBackend):
    """Rows of any number of tokens. ``kernels``: "fa2" or "fa3"."""

    graph_support = GraphSupport.NONE

    def __init__(self, kv: KVTensors, *, num_heads: int, device: torch.device, kernels: str) -> None:
        self.kv = kv
        self._shape = _Shape(kv, num_heads)
        self._plans = _PlanBuffers(WORKSPACE_BYTES, device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(self._plans.workspace, "NHD", backend=kernels)

    def plan(self, batch: Batch) -> None:
        pages = _HostPages(np.array(batch.seq_lens_host, np.int32), self._shape.page_size)
        indices = _gather_indices(batch, pages, self._shape.page_size)
        query_start = torch.from_numpy(np.array(batch.query_start_host, np.int32)).pin_memory()
        with self._plans.lent_to(self._wrapper):
            self._wrapper.plan(
                query_start,
                pages.indptr.pin_memory(),
                indices,
                pages.last_page_len.pin_memory(),
                self._shape.num_heads,
                self._shape.kv_heads,
                self._shape.head_dim,
                self._shape.page_size,
                causal=True,
                q_data_type=self._shape.dtype,
                kv_data_type=self._shape.dtype,
                seq_lens=pages.seq_lens.pin_memory(),
                max_token_per_sequence=int(np.diff(batch.query_start_host).max()),  # else it loops over a tensor
            )

    def forward(self, q: Tensor, layer: int) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, (self.kv.k[layer], self.kv.v[layer]), out=out)
        return out.flatten(1)


class FlashInferDecode(AttentionBackend):
    """Rows of one token each."""

    graph_support = GraphSupport.DECODE

    def __init__(self, kv: KVTensors, *, num_heads: int, max_rows: int, device: torch.device) -> None:
        self.kv = kv
        self._shape = _Shape(kv, num_heads)
        self._plans = _PlanBuffers(self._shape.decode_workspace_bytes(max_rows), device)
        self._wrappers: dict[bool, Any] = {}  # by use of tensor cores
        self._active: Any = None  # the wrapper of this step
        self._graph_indices = torch.empty(0, dtype=torch.int32, device=device)  # of all graphs, one runs at a time

    def plan(self, batch: Batch) -> None:
        pages = _HostPages(np.array(batch.seq_lens_host, np.int32), self._shape.page_size)
        tensor_cores = self._shape.wants_tensor_cores(len(pages.seq_lens))
        wrapper = self._wrappers.get(tensor_cores)
        if wrapper is None:
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                self._plans.workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
            )
            self._wrappers[tensor_cores] = wrapper
        self.plan_wrapper(wrapper, pages, _gather_indices(batch, pages, self._shape.page_size))
        self._active = wrapper

    def plan_wrapper(self, wrapper: Any, pages: "_HostPages", indices: Tensor) -> None:
        with self._plans.lent_to(wrapper):
            wrapper.plan(
                pages.indptr.pin_memory(),
                indices,
                pages.last_page_len.pin_memory(),
                self._shape.num_heads,
                self._shape.kv_heads,
                self._shape.head_dim,
                self._shape.page_size,
                q_data_type=self._shape.dtype,
                kv_data_type=self._shape.dtype,
                seq_lens=pages.seq_lens,
            )

    def forward(self, q: Tensor, layer: int) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._active.run(q, (self.kv.k[layer], self.kv.v[layer]), out=out)
        return out.flatten(1)

    def decode_graph(self, batch: Batch) -> DecodeGraph:
        most = len(batch.row_slots) * batch.page_table.shape[1]
        if len(self._graph_indices) < most:  # once, as graphs are captured from large to small
            self._graph_indices = torch.zeros(most, dtype=torch.int32, device=batch.row_slots.device)
        return _FlashInferDecodeGraph(self, self._shape, self._plans, self._graph_indices, len(batch.row_slots))

    def use(self, wrapper: Any) -> None:
        self._active = wrapper


class _FlashInferDecodeGraph(DecodeGraph):
    """A wrapper whose buffers the captured step itself fills; the host only renews what its blocks do."""

    def __init__(
        self, backend: FlashInferDecode, shape: "_Shape", plans: "_PlanBuffers", indices: Tensor, rows: int
    ) -> None:
        self._backend = backend
        self._shape = shape
        self._plans = plans
        self._indices = indices
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=indices.device)
        self._last_page_len = torch.ones(rows, dtype=torch.int32, device=indices.device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            plans.workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=shape.wants_tensor_cores(rows),
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
            backend="fa2",
        )
        self._is_planned = False

    def plan_on_device(self, batch: Batch) -> None:
        page_indices(
            batch.page_table,
            batch.row_slots,
            batch.seq_lens,
            self._shape.page_size,
            self._indptr,
            self._indices,
            self._last_page_len,
        )
        self._backend.use(self._wrapper)

    def plan_on_host(self, seq_lens: Int32) -> None:
        pages = _HostPages(seq_lens, self._shape.page_size)
        if not self._is_planned:  # the whole plan once: it also chooses the kernel
            self._backend.plan_wrapper(self._wrapper, pages, self._indices[: len(seq_lens)])
            self._is_planned = True
            return
        with self._plans.lent_to(self._wrapper):
            fast_decode_plan(  # without copies to the buffers, and without a loop over the rows
                self._wrapper,
                pages.indptr,
                self._indices,
                pages.last_page_len,
                self._shape.num_heads,
                self._shape.kv_heads,
                self._shape.head_dim,
                self._shape.page_size,
                q_data_type=self._shape.dtype,
                kv_data_type=self._shape.dtype,
            )


class _Shape:
    """What all plans are told of the model."""

    def __init__(self, kv: KVTensors, num_heads: int) -> None:
        _, self.page_size, self.kv_heads, self.head_dim = kv.k[0].shape
        self.dtype = kv.k[0].dtype
        self.num_heads = num_heads
        self._group = num_heads // self.kv_heads

    def wants_tensor_cores(self, rows: int) -> bool:
        return rows >= TENSOR_CORE_ROWS or self._group not in CUDA_CORE_GROUPS

    def decode_workspace_bytes(self, max_rows: int) -> int:
        """In a graph, each row's tile of query heads, 16 or 64, may keep a float32 output of its own, and its sums."""
        tile = 16 if self._group <= 16 else 64
        rows = max_rows + -(-max_rows * self._group // tile)
        return max(WORKSPACE_BYTES, self.num_heads * rows * tile * (self.head_dim + 1) * 4 + (1 << 20))


class _HostPages:
    """Lengths in FlashInfer's form: pages before each row, tokens in its last page. Pinned by who has them copied, from
    torch's pool, which knows when a copy is done."""

    def __init__(self, seq_lens: Int32, page_size: int) -> None:
        counts = -(-seq_lens // page_size)
        indptr = np.zeros(len(seq_lens) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        self.total = int(indptr[-1])
        self.indptr = torch.from_numpy(indptr)
        self.last_page_len = torch.from_numpy(seq_lens - (counts - 1) * page_size)
        self.seq_lens = torch.from_numpy(seq_lens)


def _gather_indices(batch: Batch, pages: _HostPages, page_size: int) -> Tensor:
    device = batch.row_slots.device
    rows = len(batch.row_slots)
    indices, indptr, last_page_len = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (pages.total, rows + 1, rows)
    )
    page_indices(batch.page_table, batch.row_slots, batch.seq_lens, page_size, indptr, indices, last_page_len)
    return indices


class _PlanBuffers:
    """What wrappers on one stream can share: the workspace, the plan on the device, and the pinned buffers that plans
    are copied from. A pinned buffer is lent again when the device has taken its last plan."""

    def __init__(self, workspace_bytes: int, device: torch.device) -> None:
        self.workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        self._plan = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pinned = [
            (torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True), torch.Event("cuda"))
            for _ in range(PLANS_IN_FLIGHT)
        ]

    @contextmanager
    def lent_to(self, wrapper: Any) -> Iterator[None]:
        """While a wrapper plans. What it planned holds until another wrapper of these buffers plans."""
        buffer, taken = self._pinned.pop(0)
        taken.synchronize()
        # reset_workspace_buffer would do, but allocates a pinned buffer at each call
        wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer = self._plan, buffer
        try:
            yield
        finally:
            taken.record()
            self._pinned.append((buffer, taken))
