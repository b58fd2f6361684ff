"""What differs between devices: the stream that runs steps in order, and how much memory there is.

Work given to a stream runs in the order given, after everything given before. ``submit`` returns at once; the
host learns a result later, from the handle.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class StepHandle(Protocol[T_co]):
    def ready(self) -> bool: ...

    def result(self, timeout_s: float | None = None) -> T_co:
        """Waits for the work. Raises TimeoutError after ``timeout_s``, or what the work raised."""


class Stream(Protocol):
    def submit(self, work: Callable[[], T]) -> StepHandle[T]: ...

    def close(self) -> None:
        """Waits for what was submitted, then releases the stream."""


class Platform(Protocol):
    @property
    def device(self) -> torch.device: ...

    def make_stream(self) -> Stream: ...

    def free_memory_bytes(self) -> int:
        """Memory that the KV cache may take, before any safety margin."""
