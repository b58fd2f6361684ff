"""What a step does, in full: rank 0 makes it, every rank's runner state is a pure function of these."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from mizzen.sampling_params import SamplingParams

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class SlotStart(msgspec.Struct):
    """A request takes a slot: admitted for the first time, or resumed after a preemption.

    The first ``num_prompt_tokens`` of ``token_ids`` are the prompt, the rest was generated before a preemption.
    """

    slot: int
    handle: int
    token_ids: Int32
    num_prompt_tokens: int
    num_computed_tokens: int  # already in the KV cache: prefix hits
    sampling: SamplingParams
    seed: int  # resolved: never None, the same on every rank


class SchedulerOutput(msgspec.Struct):
    """One step. Rows are ordered: decode rows (one scheduled token, all tokens known to the device) first.

    A row computes the tokens [num_computed, num_computed + num_scheduled) of its slot, at those positions. If it
    ``samples``, the sampled token is the slot's token at position num_computed + num_scheduled. The device has it at
    once; the host learns it with the step's result. ``page_*`` are appended entries of the slots' page tables:
    ``page_table[page_slots[i], page_columns[i]] = page_ids[i]``, to be applied before the step runs.
    """

    step: int
    slots: Int32  # [R]
    num_computed: Int32  # [R]
    num_scheduled: Int32  # [R]
    samples: Bool  # [R]
    num_decode_rows: int
    started: list[SlotStart]
    page_slots: Int32  # [P]
    page_columns: Int32  # [P]
    page_ids: Int32  # [P]

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled.sum())


class SampledTokens(msgspec.Struct):
    """A step's result on the host: row k is the k-th row of the step that samples."""

    token_ids: Int32  # [S]
    # Only rows whose request asked for logprobs: their indices into token_ids, then [K], [K, width], [K, width]
    logprob_rows: Int32 | None = None
    chosen_logprobs: npt.NDArray[np.float32] | None = None
    top_token_ids: Int32 | None = None
    top_logprobs: npt.NDArray[np.float32] | None = None


_DTYPES = {1: np.int32, 2: np.bool_}
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_CODES[value.dtype], value.tobytes())
    raise TypeError(f"cannot encode {type(value)}")


def _decode_ext(code: int, data: memoryview) -> Any:
    return np.frombuffer(data, dtype=_DTYPES[code])


def _decode(kind: type, value: Any) -> Any:
    return value  # the extension hook has made the array


encode_step = msgspec.msgpack.Encoder(enc_hook=_encode).encode
decode_step = msgspec.msgpack.Decoder(SchedulerOutput, dec_hook=_decode, ext_hook=_decode_ext).decode
