"""Ranks 1 and up as child processes of the offline engine, whose own process is rank 0. They die with it."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mizzen.config.config import Config
from mizzen.errors import EXIT_CONFIG, ConfigError, EngineDead
from mizzen.ipc.channels import ZmqSender, address, configure, encode
from mizzen.ipc.messages import Fatal, ModelInfo, Shutdown, ToSupervisor
from mizzen.scheduler.output import SchedulerOutput, encode_step

EPOCH = 1
EXIT_WAIT_S = 5.0
LAST_WORDS_S = 2.0  # a rank's message that says why it ends may come after its end is felt
_decode = msgspec.msgpack.Decoder(ToSupervisor).decode


class LocalRanks:
    """Starts the other ranks, sends them the steps, and notices when one is gone."""

    def __init__(self, config: Config, model: ModelInfo) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="mizzen-"))  # mode 0700
        (self.run_dir / "config.json").write_bytes(msgspec.json.encode(config))
        (self.run_dir / "model.json").write_bytes(msgspec.json.encode(model))
        self._context: zmq.Context[Any] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        configure(self._control)
        self._control.bind(address(self.run_dir, "control"))
        ranks = range(1, config.engine.tensor_parallel_size)
        self._senders = [ZmqSender(self._context, self.run_dir, f"rank-{rank}") for rank in ranks]
        self._processes = [self._start(rank) for rank in ranks]

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        options = {"run-dir": self.run_dir, "name": f"engine-{rank}", "parent": os.getpid(), "epoch": EPOCH}
        arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return subprocess.Popen([sys.executable, "-m", "mizzen.engine.process", *arguments], stdin=subprocess.DEVNULL)

    def broadcast(self, output: SchedulerOutput) -> None:
        self.check()
        data = encode_step(output)
        for sender in self._senders:
            sender.send_bytes(data)

    def check(self) -> None:
        """Raises ConfigError or EngineDead if a rank said so, or is gone."""
        with contextlib.suppress(zmq.Again):
            while True:
                _, data = self._control.recv_multipart(zmq.NOBLOCK)
                message = _decode(data)
                if isinstance(message, Fatal):
                    if message.exit_code == EXIT_CONFIG:
                        raise ConfigError(message.message, setting=message.message.partition(":")[0])
                    raise EngineDead(message.message)
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                raise EngineDead(f"engine rank {rank} ended with exit code {process.returncode}")

    def explain(self) -> None:
        """Raises what ``check`` does if a rank is gone or about to be; else returns after LAST_WORDS_S."""
        deadline_s = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < deadline_s:
            self.check()
            time.sleep(0.02)

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def close(self) -> None:
        for rank in range(1, len(self._processes) + 1):
            with contextlib.suppress(zmq.ZMQError):  # it never connected
                self._control.send_multipart([f"engine-{rank}".encode(), encode(Shutdown())], zmq.NOBLOCK)
        deadline_s = time.monotonic() + EXIT_WAIT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self.run_dir, ignore_errors=True)
