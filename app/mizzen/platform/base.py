"""What differs between devices: the stream that runs steps in order, how arrays cross over, how much memory there is.

Work given to a stream runs in the order given, after everything given before. ``submit`` returns at once; the host
learns a result later, from the handle.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
Outputs = Sequence[Tensor | None]
P = ParamSpec("P")
T = TypeVar("T")


class Annotate(Protocol):
    def __call__(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """The function, its calls named in profiles."""


def without_name(name: str, function: Callable[P, T]) -> Callable[P, T]:
    """An Annotate that costs nothing."""
    return function


class StepHandle(Protocol):
    def ready(self) -> bool: ...

    def result(self, timeout_s: float | None = None) -> list[Array | None]:
        """Waits for the work; its outputs on the host. Raises TimeoutError after ``timeout_s``, or what it raised."""


class Stream(Protocol):
    @property
    def busy_s(self) -> float:
        """What the device took for all work whose result was waited for, by the device's clock."""

    def submit(self, work: Callable[[], Outputs]) -> StepHandle: ...

    def close(self) -> None:
        """Waits for what was submitted, then releases the stream."""


class Platform(Protocol):
    @property
    def device(self) -> torch.device: ...

    def make_stream(self) -> Stream: ...

    def upload(self, arrays: Sequence[Array]) -> list[Tensor]:
        """The arrays as tensors on the device, in the order of the current stream. The host does not wait."""

    def free_memory_bytes(self) -> int:
        """Memory that nobody uses now."""

    def kv_budget_bytes(self, memory_fraction: float) -> int:
        """What the KV cache, and what else is allocated from now on, may take by default."""

    @property
    def graph_rows(self) -> int:
        """The largest decode-only batch that is worth a CUDA graph, and the memory that it holds; 0 without graphs."""

    @property
    def allocation_slack_bytes(self) -> int:
        """The most that a large tensor takes beyond its size."""

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Runs ``work`` to its end; the most memory that it took at a time, what it returns included, whoever allocated
        it. 0 where that is not measured."""

    def annotate(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """An Annotate, for the profiler of this device."""
