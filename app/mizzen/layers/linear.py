"""Linear layers in Megatron's split: columns (outputs) first, then rows (inputs), one all-reduce a pair.

Source of the split: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mizzen.layers.base import LayerContext, WeightSlice, whole


@dataclass(frozen=True, slots=True)
class ColumnPart:
    """One checkpoint tensor of a merged layer: ``size`` output features, of which this rank holds [start, stop)."""

    name: str
    size: int
    start: int
    stop: int

    @classmethod
    def split(cls, name: str, size: int, context: LayerContext) -> "ColumnPart":
        """An even share for each rank."""
        share = size // context.group.size
        return cls(name, size, context.group.rank * share, (context.group.rank + 1) * share)


class ColumnLinear(nn.Module):
    """Several projections of one input, merged into one matrix, each split by output features."""

    def __init__(self, in_features: int, parts: tuple[ColumnPart, ...], *, bias: bool, context: LayerContext) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.in_features = in_features
        self.parts = parts
        out_features = sum(part.stop - part.start for part in parts)
        self.weight = context.parameter(out_features, in_features)
        self.bias = context.parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out / size], or parts of it [S, T, ...]
        return self.kernels.linear(x, self.weight) if self.bias is None else F.linear(x, self.weight, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """Of two projections, silu(first) * second: [T, in] -> [T, out / (2 * size)]."""
        if self.bias is None:
            return self.kernels.gated_linear(x, self.weight)
        return self.kernels.silu_mul(F.linear(x, self.weight, self.bias))

    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        row = 0
        for part in self.parts:
            end = row + part.stop - part.start
            name = f"{prefix}{part.name}."
            yield WeightSlice(
                f"{name}weight", (part.size, self.in_features), self.weight[row:end], 0, part.start, part.stop
            )
            if self.bias is not None:
                yield WeightSlice(f"{name}bias", (part.size,), self.bias[row:end], 0, part.start, part.stop)
            row = end


class RowLinear(nn.Module):
    """A projection split by input features: each rank's product is a term of the sum."""

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool, context: LayerContext) -> None:
        super().__init__()
        self.name = name
        self.kernels = context.kernels
        self.in_features = in_features
        self.group = context.group
        self.share = in_features // context.group.size
        self.weight = context.parameter(out_features, self.share)
        self.bias = context.parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [T, in / size] -> [T, out], or parts of it [S, T, out]
        if self.group.size == 1 and self.bias is None:
            return self.kernels.linear(x, self.weight)
        bias = self.bias if self.group.rank == 0 else None  # it must enter the sum once
        out = self.group.sum_buffer(x.shape[0], self.weight.shape[0], x.dtype)
        if out is None:
            out = F.linear(x, self.weight, bias)
        elif bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(bias, x, self.weight.t(), out=out)
        return self.group.all_reduce(out)

    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        out_features = self.weight.shape[0]
        start = self.group.rank * self.share
        yield WeightSlice(
            f"{prefix}{self.name}.weight", (out_features, self.in_features), self.weight, 1, start, start + self.share
        )
        if self.bias is not None:
            yield whole(f"{prefix}{self.name}.bias", self.bias)
