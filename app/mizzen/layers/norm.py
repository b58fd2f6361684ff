"""RMSNorm. Source: Zhang and Sennrich, arXiv:1910.07467."""

from collections.abc import Iterator

from torch import Tensor, nn

from mizzen.layers.base import LayerContext, WeightSlice, whole


class RMSNorm(nn.Module):
    def __init__(self, name: str, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.kernels = context.kernels
        self.weight = context.parameter(size)

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> the same
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x [T, size] to residual [T, size] in place; returns the norm of the sum."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def weights(self, prefix: str) -> Iterator[WeightSlice]:
        yield whole(f"{prefix}{self.name}.weight", self.weight)
