"""The api as the supervisor starts it: a process of its own on an inherited listening socket."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from api_service import make_config
from fake_backend import FakeBackend, healthy

from mizzen.ipc.messages import Shutdown

BODY = {"model": "tiny", "prompt": "Hi"}


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    with tempfile.TemporaryDirectory(prefix="mz-") as folder:
        fake = FakeBackend(Path(folder))
        (fake.run_dir / "config.json").write_bytes(msgspec.json.encode(make_config()))
        yield fake
        fake.close()


def start(backend: FakeBackend, sock: socket.socket, count: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "mizzen.server.main", "--run-dir", str(backend.run_dir), "--name", "api-0"]
    process = subprocess.Popen(
        [*command, "--parent", str(os.getpid()), "--fd", str(sock.fileno())], pass_fds=(sock.fileno(),)
    )
    backend.wait(lambda: backend.ready == count, 20)
    backend.tell(healthy())
    return process


def test_the_port_survives_a_killed_api_and_shutdown_ends_it(backend: FakeBackend) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        process = start(backend, sock, 1)
        try:
            backend.wait(lambda: httpx.get(f"{url}/health").status_code == 200)
            assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
            # Signals are the supervisor's business: a terminal's Ctrl-C reaches all processes of its group.
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            assert httpx.get(f"{url}/version").status_code == 200
            process.kill()
            process.wait(10)
            waiting: list[int] = []
            thread = threading.Thread(
                target=lambda: waiting.append(httpx.get(f"{url}/version", timeout=20).status_code)
            )
            thread.start()
            process = start(backend, sock, 2)
            thread.join(20)
            assert waiting == [200]  # it waited in the listening socket
            backend.tell(Shutdown())
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait(10)


def test_the_api_does_not_import_torch() -> None:
    code = "import sys, mizzen.server.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
