"""Ranks as threads that take turns: one runs until it waits for the others, so that what they run need not be safe for
threads, Triton's interpreter for one. Counts what they exchange."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass
class Exchange:
    """What the ranks of one group share."""

    size: int
    baton: threading.Lock = field(default_factory=threading.Lock)
    parts: list[Tensor | None] = field(default_factory=list)
    calls: int = 0
    sent_bytes: int = 0  # by one rank

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)
        self.parts = [None] * self.size

    def swap(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.parts[rank] = tensor.clone()
        if rank == 0:
            self.calls += 1
            self.sent_bytes += tensor.nbytes
        self.baton.release()
        self.barrier.wait(timeout=60)
        parts = [part for part in self.parts if part is not None]
        self.barrier.wait(timeout=60)
        self.baton.acquire()
        return parts


class ThreadGroup:
    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank, self.size, self._exchange = rank, exchange.size, exchange

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return torch.cat(self._exchange.swap(self.rank, tensor), dim)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._exchange.swap(self.rank, tensor)).sum(0, dtype=tensor.dtype))


def run_ranks(size: int, work: Callable[[ThreadGroup], T]) -> tuple[list[T], Exchange]:
    """``work`` of each rank, and what they exchanged."""
    exchange = Exchange(size)
    results: list[T | BaseException | None] = [None] * size

    def run(rank: int) -> None:
        with exchange.baton:
            try:
                results[rank] = work(ThreadGroup(rank, exchange))
            except BaseException as error:  # noqa: BLE001  # raised again in the test's thread
                results[rank] = error
                exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results, exchange  # type: ignore[return-value]  # no errors are left
