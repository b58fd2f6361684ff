"""What sampling kernels read and write by slot: parameters and known tokens live on the device, a step names slots."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotParams:
    """Sampling parameters by slot, [slots] each: columns of one float32 and one int64 table, hence of two strides."""

    temperature: Tensor  # float32; 0: greedy
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    top_k: Tensor  # int64; 0: off
    seeds: Tensor  # int64
    num_prompt_tokens: Tensor  # int64


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Whose logits they are, and where tokens go."""

    slots: Tensor  # [S] int
    seq_lens: Tensor  # [S] int: tokens known of each row, which is the index of the next one
    token_table: Tensor  # [slots, L] int32: the token goes to [slot, seq_len], where the next step reads it
    out: Tensor  # [S] int32, on the device or pinned on the host


def draw_arguments(logits: Tensor, rows: SampledRows, params: SlotParams) -> tuple[Tensor | int, ...]:
    """What all kernels that draw tokens begin with. logits [S, V]."""
    return (
        logits,
        logits.stride(0),
        logits.shape[1],
        rows.slots,
        rows.seq_lens,
        params.temperature,
        params.top_p,
        params.min_p,
        params.temperature.stride(0),
        params.seeds,
        params.num_prompt_tokens,
        params.top_k,
        params.seeds.stride(0),
    )
