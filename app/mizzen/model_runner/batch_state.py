"""Device-resident state by slot, changed only by SchedulerOutput, in the order of the steps.

``BatchState.prepare`` runs on the host and makes a step's inputs with numpy; ``BatchState.apply`` runs on the device's
stream, updates the state and returns what the model reads. The host keeps only what decides a step's shape.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mizzen.attention.base import Batch
from mizzen.model_runner.sampler import MAX_CANDIDATES, Pairs, Penalties, SamplingInputs
from mizzen.platform.base import Array, Platform
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
        self.narrow = np.zeros(max_slots, np.bool_)  # a top_k whose candidates can be gathered
        self.wide = np.zeros(max_slots, np.bool_)  # a larger top_k, or top_p alone
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
        filtered = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)
        self.narrow[slot] = filtered and 0 < params.top_k <= MAX_CANDIDATES
        self.wide[slot] = filtered and not self.narrow[slot]
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

    def sampling_columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """By slot: temperature, top_p, min_p, top_k, seed, number of prompt tokens; views of the tables."""
        floats, ints = self.floats.unbind(1), self.ints.unbind(1)
        return floats[_TEMPERATURE], floats[_TOP_P], floats[_MIN_P], ints[_TOP_K], ints[_SEED], ints[_NUM_PROMPT]


@dataclass(frozen=True, slots=True)
class DrawFlags:
    """What any of the rows that the sampler's kernels draw asks for: it decides which kernels run.

    ``narrow``: a top_k of at most MAX_CANDIDATES; ``wide``: a larger one, or top_p alone."""

    min_p: bool = False
    narrow: bool = False
    wide: bool = False


@dataclass(slots=True)
class PreparedStep:
    """A step's inputs on the host. ``arrays`` cross over to the device together; the rest decides the step's shape."""

    output: SchedulerOutput
    arrays: dict[str, Array]
    query_start: Int32  # [R + 1]
    seq_lens: Int32  # [R]
    output_index: Int64  # [S]
    all_greedy: bool
    any_min_p: bool
    max_top_k: int  # of the rows whose candidates can be gathered
    max_history: int  # the longest of the penalized rows
    logprob_rows: Int64 | None  # indices into the sampled rows
    num_logprobs: int
    changed_rows: Int64 | None  # likewise: rows whose logits are changed before the draw, which kernels cannot
    draw: DrawFlags  # of the other rows

    def changed_only(self) -> "PreparedStep":
        """What the sampler needs of ``changed_rows`` alone, but for their log-probabilities."""
        rows = self.changed_rows
        assert rows is not None
        arrays = {name: self.arrays[name][rows] for name in ("sample_slots", "sample_lens", "output_index")}
        for name in ("penalized", "bias_rows", "banned_rows"):
            if name in self.arrays:
                arrays[name] = np.searchsorted(rows, self.arrays[name])
        for name in ("narrow", "wide"):
            if name in self.arrays and len(here := np.intersect1d(self.arrays[name], rows)):
                arrays[name] = np.searchsorted(rows, here)
        for name in ("bias_tokens", "bias_values", "banned_tokens"):
            if name in self.arrays:
                arrays[name] = self.arrays[name]
        return replace(self, arrays=arrays, output_index=arrays["output_index"], logprob_rows=None)


_CHANGES = ("page_slots", "page_columns", "page_ids", "start_slots", "start_tokens", "start_floats", "start_ints")


class BatchState:
    """Owns the per-slot state of one rank. Behind the slots is one more, whose page is the pool's dummy page: rows that
    only fill a CUDA graph up name it."""

    def __init__(
        self,
        platform: Platform,
        *,
        max_slots: int,
        max_model_len: int,
        page_size: int,
        dummy_page: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._platform = platform
        self._page_size = page_size
        self._flags = HostFlags(max_slots, eos_token_ids)
        self.dummy_slot = max_slots
        self.device = DeviceState.allocate(max_slots + 1, max_model_len, page_size, platform.device)
        self.device.page_table[max_slots] = dummy_page
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
        sample_lens = seq_lens[sample_rows].astype(np.int64)
        output_index = sample_lens - flags.num_prompt[slots]
        arrays: dict[str, Array] = {
            "row_slots": output.slots,
            "slots": output.slots.astype(np.int64),
            "token_rows": token_rows,
            "positions": positions,
            "seq_lens": seq_lens,
            "query_start": query_start,
            "sample_tokens": query_start[1:][sample_rows].astype(np.int64) - 1,
            "sample_slots": slots.astype(np.int64),
            "sample_lens": sample_lens,
            "output_index": output_index,
        }
        if len(output.page_ids):
            arrays["page_slots"] = output.page_slots.astype(np.int64)
            arrays["page_columns"] = output.page_columns.astype(np.int64)
            arrays["page_ids"] = output.page_ids
        if output.started:
            arrays |= _start_arrays(output.started)
        min_p, narrow, wide = flags.min_p[slots], flags.narrow[slots], flags.wide[slots]
        for name, mask in (("narrow", narrow), ("wide", wide)):
            if (rows := _indices(mask)) is not None:
                arrays[name] = rows
        max_history = 0
        if (penalized := _indices(flags.penalties[slots])) is not None:
            arrays["penalized"], max_history = penalized, int(sample_lens[penalized].max())
        if (logprob_rows := _indices(flags.logprobs[slots] >= 0)) is not None:
            arrays["logprobs"] = logprob_rows
        self._add_pairs(arrays, slots, output_index)
        changes = [arrays[name] for name in ("penalized", "bias_rows", "banned_rows") if name in arrays]
        changed_rows = np.unique(np.concatenate(changes)) if changes else None
        drawn = np.ones(len(slots), np.bool_)
        if changed_rows is not None:
            drawn[changed_rows] = False
        return PreparedStep(
            output=output,
            arrays=arrays,
            query_start=query_start,
            seq_lens=seq_lens,
            output_index=output_index,
            all_greedy=not flags.sampled[slots].any(),
            any_min_p=bool(min_p.any()),
            max_top_k=int(flags.top_k[slots[narrow]].max()) if "narrow" in arrays else 0,
            max_history=max_history,
            logprob_rows=logprob_rows,
            num_logprobs=int(flags.logprobs[slots].max()) if logprob_rows is not None else 0,
            changed_rows=changed_rows,
            draw=DrawFlags(bool((min_p & drawn).any()), bool((narrow & drawn).any()), bool((wide & drawn).any())),
        )

    def _add_pairs(self, arrays: dict[str, Array], slots: Int32, output_index: Int64) -> None:
        """Biases, and what min_tokens bans, of the slots that sample in this step, by row."""
        if (pairs := self._pairs(self._flags.bias, slots)) is not None:
            arrays["bias_rows"], arrays["bias_tokens"], arrays["bias_values"] = pairs
        if (pairs := self._pairs(self._flags.banned, slots)) is not None:
            rows, tokens, _ = pairs
            early = output_index[rows] < self._flags.min_tokens[slots[rows]]
            if early.any():
                arrays["banned_rows"], arrays["banned_tokens"] = rows[early], tokens[early]

    def _pairs(self, pairs: SlotPairs, slots: Int32) -> tuple[Int64, Int64, npt.NDArray[np.float32]] | None:
        """Those of the pairs whose slot samples in this step, with the slot replaced by the row."""
        if not len(pairs.slots):
            return None
        self._row_of_slot[slots] = np.arange(len(slots))
        rows = self._row_of_slot[pairs.slots]
        self._row_of_slot[slots] = -1
        here = rows >= 0
        return (rows[here], pairs.tokens[here], pairs.values[here]) if here.any() else None

    # ---- on the stream ----

    def upload(self, step: PreparedStep) -> dict[str, Tensor]:
        """All of the step's arrays, in one copy."""
        return dict(zip(step.arrays, self._platform.upload(list(step.arrays.values())), strict=True))

    def upload_indices(self, rows: Int64) -> Tensor:
        return self._platform.upload([rows])[0]

    def upload_changes(self, step: PreparedStep) -> dict[str, Tensor]:
        """Only those that change the state: few steps have any."""
        names = [name for name in _CHANGES if name in step.arrays]
        tensors = self._platform.upload([step.arrays[name] for name in names]) if names else []
        return dict(zip(names, tensors, strict=True))

    def apply(self, step: PreparedStep, arrays: dict[str, Tensor]) -> None:
        """Updates the device's state: slots that start, and pages."""
        self._apply_starts(step.output.started, arrays)
        if "page_ids" in arrays:
            self.device.page_table[arrays["page_slots"], arrays["page_columns"]] = arrays["page_ids"]

    def batch(self, step: PreparedStep, arrays: dict[str, Tensor]) -> Batch:
        """What the model reads, gathered from the state."""
        state = self.device
        slots, positions = arrays["slots"], arrays["positions"]
        token_slots = slots[arrays["token_rows"]]
        pages = state.page_table[token_slots, positions // self._page_size].to(torch.int64)
        return Batch(
            token_ids=state.token_table[token_slots, positions].to(torch.int64),
            positions=positions,
            kv_slots=pages * self._page_size + positions % self._page_size,
            page_table=state.page_table,
            row_slots=arrays["row_slots"],
            seq_lens=arrays["seq_lens"],
            query_start=arrays["query_start"],
            sample_tokens=arrays["sample_tokens"],
            num_decode_rows=step.output.num_decode_rows,
            seq_lens_host=step.seq_lens.tolist(),
            query_start_host=step.query_start.tolist(),
        )

    def store(self, inputs: SamplingInputs, token_ids: Tensor) -> None:
        """Writes the sampled tokens [S] behind their rows' tokens, where the next step reads them."""
        self.device.token_table[inputs.slots, inputs.lengths] = token_ids.to(torch.int32)

    def _apply_starts(self, started: list[SlotStart], arrays: dict[str, Tensor]) -> None:
        if not started:
            return
        state, offset = self.device, 0
        for start in started:
            count = len(start.token_ids)
            state.token_table[start.slot, :count] = arrays["start_tokens"][offset : offset + count]
            offset += count
        state.floats[arrays["start_slots"]] = arrays["start_floats"]
        state.ints[arrays["start_slots"]] = arrays["start_ints"]

    def sampling_inputs(self, step: PreparedStep, arrays: dict[str, Tensor]) -> SamplingInputs:
        """What the sampler reads."""
        slots = arrays["sample_slots"]
        floats, ints = self.device.floats[slots], self.device.ints[slots]
        inputs = SamplingInputs(
            slots=slots,
            lengths=arrays["sample_lens"],
            temperature=floats[:, _TEMPERATURE],
            top_k=ints[:, _TOP_K],
            top_p=floats[:, _TOP_P],
            min_p=floats[:, _MIN_P],
            seeds=ints[:, _SEED],
            output_index=arrays["output_index"],
            all_greedy=step.all_greedy,
            narrow_rows=arrays.get("narrow"),
            max_top_k=step.max_top_k,
            wide_rows=arrays.get("wide"),
            any_min_p=step.any_min_p,
            logprob_rows=arrays.get("logprobs"),
            num_logprobs=step.num_logprobs,
        )
        if "bias_rows" in arrays:
            inputs.bias = Pairs(arrays["bias_rows"], arrays["bias_tokens"], arrays["bias_values"])
        if "banned_rows" in arrays:
            inputs.banned = Pairs(arrays["banned_rows"], arrays["banned_tokens"])
        if "penalized" in arrays:
            rows = arrays["penalized"]
            inputs.penalties = Penalties(
                rows=rows,
                history=self.device.token_table[slots[rows], : step.max_history].to(torch.int64),
                lengths=arrays["sample_lens"][rows],
                num_prompt_tokens=ints[rows, _NUM_PROMPT],
                repetition=floats[rows, _REPETITION],
                frequency=floats[rows, _FREQUENCY],
                presence=floats[rows, _PRESENCE],
            )
        return inputs


def _start_arrays(started: list[SlotStart]) -> dict[str, Array]:
    """All starts of a step: their tokens end to end, and a row of parameters each."""
    floats = np.zeros((len(started), 6), np.float32)
    ints = np.zeros((len(started), 3), np.int64)
    for row, start in enumerate(started):
        params = start.sampling
        floats[row, [_TEMPERATURE, _TOP_P, _MIN_P]] = params.temperature, params.top_p, params.min_p
        floats[row, _REPETITION] = params.repetition_penalty
        floats[row, [_FREQUENCY, _PRESENCE]] = params.frequency_penalty, params.presence_penalty
        ints[row] = max(params.top_k, 0), start.seed, start.num_prompt_tokens
    return {
        "start_slots": np.array([start.slot for start in started], np.int64),
        "start_tokens": np.concatenate([start.token_ids for start in started]),
        "start_floats": floats,
        "start_ints": ints,
    }


def _indices(mask: npt.NDArray[np.bool_]) -> Int64 | None:
    return mask.nonzero()[0] if mask.any() else None
