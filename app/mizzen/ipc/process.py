"""What every child process of the supervisor has in common: its configuration, its control channel, its death.

A child is started as ``python -m MODULE --run-dir DIR --name NAME --parent PID``. It ignores SIGINT and SIGTERM (the
supervisor alone acts on signals and tells its children over the control channel) and dies with its parent.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from mizzen.config.config import Config
from mizzen.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, MizzenError
from mizzen.ipc.channels import address, configure, encode
from mizzen.ipc.messages import (
    Beat,
    EngineInfo,
    Fatal,
    FromSupervisor,
    Load,
    ModelInfo,
    Phase,
    Ready,
    SetLogLevel,
    ToSupervisor,
)
from mizzen.observability.logs import configure_logging, set_level

BEAT_INTERVAL_S = 0.25
_PR_SET_PDEATHSIG = 1
_decode = msgspec.msgpack.Decoder(FromSupervisor).decode


class ControlClient:
    """The child's end of the control channel. Not thread-safe: one thread owns it."""

    def __init__(self, context: "zmq.Context[Any]", run_dir: Path, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        configure(self.socket)
        self.socket.set(zmq.IDENTITY, name.encode())
        self.socket.connect(address(run_dir, "control"))
        self._next_beat_s = 0.0
        self._phase: Phase = "start"

    def send(self, message: ToSupervisor) -> None:
        self.socket.send(encode(message), zmq.NOBLOCK)

    def beat(
        self,
        phase: Phase,
        *,
        pending: bool = False,
        progress: int = 0,
        fraction: float | None = None,
        detail: str = "",
        load: Load | None = None,
    ) -> None:
        """Says that the main loop is alive; at most every BEAT_INTERVAL_S, at once when the phase changes."""
        now = time.monotonic()
        if now < self._next_beat_s and phase == self._phase:
            return
        self._next_beat_s, self._phase = now + BEAT_INTERVAL_S, phase
        self.send(Beat(phase, fraction, detail, pending, progress, load))

    def beat_due(self) -> bool:
        return time.monotonic() >= self._next_beat_s

    def ready(self, *, engine: EngineInfo | None = None, model: ModelInfo | None = None) -> None:
        self.send(Ready(engine, model))

    def poll(self) -> list[FromSupervisor]:
        """What has arrived, without what is the same for every process: the log level."""
        messages: list[FromSupervisor] = []
        while True:
            try:
                message: FromSupervisor = _decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return messages
            if isinstance(message, SetLogLevel):
                set_level(message.level)
            else:
                messages.append(message)

    def close(self, linger_ms: int = 1000) -> None:
        """Waits up to ``linger_ms`` for what was sent to leave: a Fatal must arrive."""
        self.socket.close(linger_ms)


class Child(msgspec.Struct):
    """What a child's main function gets."""

    name: str
    run_dir: Path
    config: Config
    context: Any  # zmq.Context
    control: ControlClient
    options: dict[str, int]  # the integer options that its main function declared

    @property
    def index(self) -> int:
        """The number at the end of the name: 1 for "tokenizer-1"; 0 if there is none."""
        _, _, digits = self.name.rpartition("-")
        return int(digits) if digits.isdigit() else 0


@contextlib.contextmanager
def child_process(module: str, *options: str) -> Iterator[Child]:
    """Sets the process up, and turns what ends it into a Fatal message and an exit code: 78 or 1, one line each.

    ``options`` are names of further integer options, such as "fd" for ``--fd N``.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--parent", type=int, required=True)
    for option in options:
        parser.add_argument(f"--{option}", type=int, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != args.parent:  # it died before prctl took effect
        os._exit(EXIT_FAILED)
    config = msgspec.json.decode((args.run_dir / "config.json").read_bytes(), type=Config)
    configure_logging(config.log, process=args.name)
    context: Any = zmq.Context()
    control = ControlClient(context, args.run_dir, args.name)
    log = structlog.get_logger()
    code = 0
    try:
        yield Child(args.name, args.run_dir, config, context, control, {name: getattr(args, name) for name in options})
    except ConfigError as error:
        code = EXIT_CONFIG
        control.send(Fatal(code, str(error)))
    except MizzenError as error:  # raised on purpose: its line says it all
        code = EXIT_FAILED
        control.send(Fatal(code, f"{args.name}: {error}"))
    except SystemExit:
        raise
    except BaseException as error:  # the last frame of the process: reported, then it ends
        code = EXIT_FAILED
        log.exception("process failed")
        control.send(Fatal(code, f"{args.name}: {type(error).__name__}: {error}"))
    control.close()
    sys.stdout.flush()
    sys.stderr.flush()
    context.destroy(linger=1000)
    os._exit(code)  # worker threads blocked in a device call must not keep a failed process alive
