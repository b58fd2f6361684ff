"""Device-resident state by slot, changed only by SchedulerOutput, in the order of the steps.

``BatchState.prepare`` runs on the host and makes a step's inputs with numpy; ``BatchState.apply`` runs on the device's
stream, updates the state and returns what the model reads. The host keeps only what decides a step's shape.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mizzen.attention.base import Batch
from mizzen.model_runner.sampler import MAX_CANDIDATES, Pairs, Penalties, SamplingInputs
from mizzen.sampling_params import SamplingParams
from mizzen.scheduler.output import Int32, SchedulerOutput, SlotStart

Int64 = npt.NDArray[np.int64]

# Per-slot sampling parameters: one row of float32 and one of int64 each, so that a start uploads two small rows.
_TEMPERATURE, _TOP_P, _MIN_P, _REPETITION, _FREQUENCY, _PRESENCE = range(6)
_TOP_K, _SEED, _NUM_PROMPT = range(3)


@dataclass(slots=True)
class SlotPairs:
    """(slot, token, value) triples of all running requests; rebuilt when a slot starts, never in a plain step."""

    slots: Int64
    tokens: Int64
    values: npt.NDArray[np.float32]

    @classmethod
    def empty(cls) -> "SlotPairs":
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))

    def replace(self, slot: int, tokens: list[int], values: list[float]) -> "SlotPairs":
        keep = self.slots != slot
        if keep.all() and not tokens:
            return self
        return SlotPairs(
            np.concatenate([self.slots[keep], np.full(len(tokens), slot, np.int64)]),
            np.concatenate([self.tokens[keep], np.array(tokens, np.int64)]),
            np.concatenate([self.values[keep], np.array(values, np.float32)]),
        )


class HostFlags:
    """What the host must know of each slot to choose a step's path, as arrays indexed by slot."""

    def __init__(self, max_slots: int, eos_token_ids: tuple[int, ...]) -> None:
        self._eos = eos_token_ids
        self.sampled = np.zeros(max_slots, np.bool_)  # temperature over 0
        self.filtered = np.zeros(max_slots, np.bool_)  # top_k or top_p
        self.top_k = np.zeros(max_slots, np.int32)
        self.min_p = np.zeros(max_slots, np.bool_)
        self.penalties = np.zeros(max_slots, np.bool_)
        self.logprobs = np.full(max_slots, -1, np.int32)
        self.num_prompt = np.zeros(max_slots, np.int32)
        self.min_tokens = np.zeros(max_slots, np.int32)
        self.bias = SlotPairs.empty()
        self.banned = SlotPairs.empty()  # end tokens, until min_tokens

    def start(self, start: SlotStart) -> None:
        slot, params = start.slot, start.sampling
        self.sampled[slot] = params.temperature > 0
        self.filtered[slot] = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)
        self.top_k[slot] = max(params.top_k, 0)
        self.min_p[slot] = params.temperature > 0 and params.min_p > 0
        self.penalties[slot] = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt[slot] = start.num_prompt_tokens
        self.min_tokens[slot] = min(params.min_tokens, 2**31 - 1)
        bias = params.logit_bias or {}
        self.bias = self.bias.replace(slot, list(bias), list(bias.values()))
        banned = self._banned_before_min_tokens(params)
        self.banned = self.banned.replace(slot, banned, [0.0] * len(banned))

    def _banned_before_min_tokens(self, params: SamplingParams) -> list[int]:
        if params.min_tokens == 0:
            return []
        return sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._eos)})


@dataclass(slots=True)
class DeviceState:
    """The tensors by slot. Only the stream's work touches them."""

    token_table: Tensor  # [slots, max_model_len + 1] int32: every known token, sampled ones included
    page_table: Tensor  # [slots, max_pages] int32
    floats: Tensor  # [slots, 6] float32
    ints: Tensor  # [slots, 3] int64

    @classmethod
    def allocate(cls, max_slots: int, max_model_len: int, page_size: int, device: torch.device) -> "DeviceState":
        max_pages = -(-max_model_len // page_size)
        return cls(
            torch.zeros((max_slots, max_model_len + 1), dtype=torch.int32, device=device),
            torch.zeros((max_slots, max_pages), dtype=torch.int32, device=device),
            torch.zeros((max_slots, 6), dtype=torch.float32, device=device),
            torch.zeros((max_slots, 3), dtype=torch.int64, device=device),
        )


@dataclass(slots=True)
class PreparedStep:
    """A step's inputs on the host, ready to be applied on the stream."""

    output: SchedulerOutput
    token_rows: Int64  # [T]: each token's row
    positions: Int64  # [T]
    query_start: Int32  # [R + 1]
    seq_lens: Int32  # [R]
    sample_rows: Int64  # [S]: rows that sample
    output_index: Int64  # [S]
    all_greedy: bool
    any_min_p: bool
    filtered: Int64 | None  # indices into the sampled rows, likewise below
    max_top_k: int
    penalized: Int64 | None
    logprobs: Int64 | None
    num_logprobs: int
    bias: tuple[Int64, Int64, npt.NDArray[np.float32]] | None
    banned: tuple[Int64, Int64] | None


class BatchState:
    """Owns the per-slot state of one rank."""

    def __init__(
        self,
        *,
        max_slots: int,
        max_model_len: int,
        page_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._page_size = page_size
        self._device = device
        self._flags = HostFlags(max_slots, eos_token_ids)
        self._state = DeviceState.allocate(max_slots, max_model_len, page_size, device)
        self._row_of_slot = np.full(max_slots, -1, np.int64)

    # ---- on the host ----

    def prepare(self, output: SchedulerOutput) -> PreparedStep:
        """The step's arrays; work is proportional to numpy calls, not to requests."""
        flags = self._flags
        for start in output.started:
            flags.start(start)
        num_rows, num_decode = output.num_rows, output.num_decode_rows
        query_start = np.zeros(num_rows + 1, np.int32)
        np.cumsum(output.num_scheduled, out=query_start[1:])
        if num_decode == num_rows:
            token_rows = np.arange(num_rows, dtype=np.int64)
            positions = output.num_computed.astype(np.int64)
        else:
            token_rows = np.repeat(np.arange(num_rows, dtype=np.int64), output.num_scheduled)
            offset = output.num_computed - query_start[:-1]
            positions = np.arange(query_start[-1], dtype=np.int64) + offset[token_rows]
        seq_lens = output.num_computed + output.num_scheduled
        sample_rows = output.samples.nonzero()[0]
        slots = output.slots[sample_rows]
        filtered = _indices(flags.filtered[slots])
        top_k = flags.top_k[slots[filtered]] if filtered is not None else None
        narrow = top_k is not None and top_k.min() > 0 and top_k.max() <= MAX_CANDIDATES
        logprobs = _indices(flags.logprobs[slots] >= 0)
        output_index = seq_lens[sample_rows].astype(np.int64) - flags.num_prompt[slots]
        return PreparedStep(
            output=output,
            token_rows=token_rows,
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            sample_rows=sample_rows,
            output_index=output_index,
            all_greedy=not flags.sampled[slots].any(),
            any_min_p=bool(flags.min_p[slots].any()),
            filtered=filtered,
            max_top_k=int(top_k.max()) if narrow and top_k is not None else 0,
            penalized=_indices(flags.penalties[slots]),
            logprobs=logprobs,
            num_logprobs=int(flags.logprobs[slots].max()) if logprobs is not None else 0,
            bias=self._pairs(flags.bias, slots),
            banned=self._banned_pairs(slots, output_index),
        )

    def _pairs(self, pairs: SlotPairs, slots: Int32) -> tuple[Int64, Int64, npt.NDArray[np.float32]] | None:
        """Those of the pairs whose slot samples in this step, with the slot replaced by the row."""
        if not len(pairs.slots):
            return None
        self._row_of_slot[slots] = np.arange(len(slots))
        rows = self._row_of_slot[pairs.slots]
        self._row_of_slot[slots] = -1
        here = rows >= 0
        return (rows[here], pairs.tokens[here], pairs.values[here]) if here.any() else None

    def _banned_pairs(self, slots: Int32, output_index: Int64) -> tuple[Int64, Int64] | None:
        pairs = self._pairs(self._flags.banned, slots)
        if pairs is None:
            return None
        rows, tokens, _ = pairs
        early = output_index[rows] < self._flags.min_tokens[slots[rows]]
        return (rows[early], tokens[early]) if early.any() else None

    # ---- on the stream ----

    def apply(self, step: PreparedStep) -> tuple[Batch, SamplingInputs]:
        """Updates the device's state and gathers what the model and the sampler read."""
        state, output = self._state, step.output
        for start in output.started:
            self._apply_start(start)
        if len(output.page_ids):
            state.page_table[self._index(output.page_slots), self._index(output.page_columns)] = self._tensor(
                output.page_ids
            )
        slots = self._index(output.slots)
        token_rows, positions = self._tensor(step.token_rows), self._tensor(step.positions)
        token_slots = slots[token_rows]
        pages = state.page_table[token_slots, positions // self._page_size].to(torch.int64)
        longest = -(-int(step.seq_lens.max()) // self._page_size)
        batch = Batch(
            token_ids=state.token_table[token_slots, positions].to(torch.int64),
            positions=positions,
            kv_slots=pages * self._page_size + positions % self._page_size,
            page_table=state.page_table[slots, :longest],
            seq_lens=self._tensor(step.seq_lens),
            query_start=self._tensor(step.query_start),
            sample_tokens=self._tensor(step.query_start[1:][step.sample_rows].astype(np.int64) - 1),
            num_decode_rows=output.num_decode_rows,
            seq_lens_host=step.seq_lens.tolist(),
            query_start_host=step.query_start.tolist(),
        )
        return batch, self._sampling_inputs(step, slots[self._tensor(step.sample_rows)])

    def store(self, step: PreparedStep, token_ids: Tensor) -> None:
        """Writes the sampled tokens [S] behind their rows' tokens, where the next step reads them."""
        rows = step.sample_rows
        slots, columns = self._index(step.output.slots[rows]), self._index(step.seq_lens[rows])
        self._state.token_table[slots, columns] = token_ids.to(torch.int32)

    def _apply_start(self, start: SlotStart) -> None:
        state, params = self._state, start.sampling
        state.token_table[start.slot, : len(start.token_ids)] = self._tensor(start.token_ids)
        floats = [0.0] * 6
        floats[_TEMPERATURE], floats[_TOP_P], floats[_MIN_P] = params.temperature, params.top_p, params.min_p
        floats[_REPETITION] = params.repetition_penalty
        floats[_FREQUENCY], floats[_PRESENCE] = params.frequency_penalty, params.presence_penalty
        ints = [0] * 3
        ints[_TOP_K], ints[_SEED], ints[_NUM_PROMPT] = max(params.top_k, 0), start.seed, start.num_prompt_tokens
        state.floats[start.slot] = torch.tensor(floats, dtype=torch.float32)
        state.ints[start.slot] = torch.tensor(ints, dtype=torch.int64)

    def _sampling_inputs(self, step: PreparedStep, slots: Tensor) -> SamplingInputs:
        floats, ints = self._state.floats[slots], self._state.ints[slots]
        inputs = SamplingInputs(
            temperature=floats[:, _TEMPERATURE],
            top_k=ints[:, _TOP_K],
            top_p=floats[:, _TOP_P],
            min_p=floats[:, _MIN_P],
            seeds=ints[:, _SEED],
            output_index=self._tensor(step.output_index),
            all_greedy=step.all_greedy,
            max_top_k=step.max_top_k,
            any_min_p=step.any_min_p,
            num_logprobs=step.num_logprobs,
        )
        if step.filtered is not None:
            inputs.filtered_rows = self._tensor(step.filtered)
        if step.logprobs is not None:
            inputs.logprob_rows = self._tensor(step.logprobs)
        if step.bias is not None:
            rows, tokens, values = step.bias
            inputs.bias = Pairs(self._tensor(rows), self._tensor(tokens), self._tensor(values))
        if step.banned is not None:
            inputs.banned = Pairs(self._tensor(step.banned[0]), self._tensor(step.banned[1]))
        if step.penalized is not None:
            penalized = self._tensor(step.penalized)
            lengths = step.seq_lens[step.sample_rows][step.penalized].astype(np.int64)
            inputs.penalties = Penalties(
                rows=penalized,
                history=self._state.token_table[slots[penalized], : int(lengths.max())].to(torch.int64),
                lengths=self._tensor(lengths),
                num_prompt_tokens=ints[penalized, _NUM_PROMPT],
                repetition=floats[penalized, _REPETITION],
                frequency=floats[penalized, _FREQUENCY],
                presence=floats[penalized, _PRESENCE],
            )
        return inputs

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        if not array.flags.writeable:  # decoded from another rank's message
            array = array.copy()
        return torch.from_numpy(array).to(self._device)

    def _index(self, array: Int32) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _indices(mask: npt.NDArray[np.bool_]) -> Int64 | None:
    return mask.nonzero()[0] if mask.any() else None
