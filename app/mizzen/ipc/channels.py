"""ZeroMQ channels in the private run directory. A send never blocks: what is in flight is bounded by admission control.

The receiver binds ``ipc://RUN_DIR/NAME.sock`` and the senders connect, so that a restarted receiver is found again.
Names: "api-0", "tokenizer-0", "detokenizer", "engine", "rank-1" (PUSH/PULL) and "control" (DEALER/ROUTER).
"""

from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

encode = msgspec.msgpack.Encoder().encode


class Sender(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


class Receiver(Protocol):
    def recv(self, timeout_s: float) -> msgspec.Struct | None:
        """The next message, or None after ``timeout_s`` (0: at once)."""

    def drain(self) -> list[msgspec.Struct]:
        """All messages that have arrived, without waiting."""


def address(run_dir: Path, name: str) -> str:
    """Unix socket paths hold 107 bytes; the supervisor chooses a run directory short enough."""
    return f"ipc://{run_dir}/{name}.sock"


def configure(socket: Any) -> None:
    """No high-water mark (a send never blocks or drops), no lingering at exit, quick reconnection."""
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RECONNECT_IVL, 20)
    socket.set(zmq.RECONNECT_IVL_MAX, 200)


class ZmqSender:
    """PUSH, connected. Messages to a receiver that is down wait for its restart: receivers drop other epochs."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", run_dir: Path, name: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        configure(self._socket)
        self._socket.connect(address(run_dir, name))

    def send(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message), zmq.NOBLOCK, copy=True)

    def send_bytes(self, data: bytes) -> None:
        self._socket.send(data, zmq.NOBLOCK, copy=True)

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger_ms)


class ZmqReceiver:
    """PULL, bound. ``kinds``: the union of message structs that may arrive, or a decoder of bytes."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", run_dir: Path, name: str, kinds: Any) -> None:
        self.socket = context.socket(zmq.PULL)
        configure(self.socket)
        self.socket.bind(address(run_dir, name))
        self._decode = msgspec.msgpack.Decoder(kinds).decode

    def recv(self, timeout_s: float) -> msgspec.Struct | None:
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return self._decode(self.socket.recv())  # type: ignore[no-any-return]  # typed by ``kinds``

    def recv_bytes(self, timeout_s: float) -> bytes | None:
        """The next message as it came, for channels whose decoder is the caller's."""
        return self.socket.recv() if self.socket.poll(int(timeout_s * 1000)) else None

    def drain(self) -> list[msgspec.Struct]:
        messages: list[msgspec.Struct] = []
        while True:
            try:
                messages.append(self._decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def close(self) -> None:
        self.socket.close(0)
