"""Channels inside one process: what tests and the offline engine use in place of ZeroMQ. Not a mock: a real FIFO."""

import queue

import msgspec


class InprocChannel:
    """A FIFO of messages; both ends of a channel. Satisfies Sender and Receiver."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[msgspec.Struct] = queue.SimpleQueue()

    def send(self, message: msgspec.Struct) -> None:
        self._queue.put(message)

    def recv(self, timeout_s: float) -> msgspec.Struct | None:
        try:
            return self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    def drain(self) -> list[msgspec.Struct]:
        messages: list[msgspec.Struct] = []
        while (message := self.recv(0.0)) is not None:
            messages.append(message)
        return messages
