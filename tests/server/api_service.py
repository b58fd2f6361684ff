"""The real app under the real uvicorn on a loopback port, in a thread; what is behind it is faked (fake_backend.py)."""

import asyncio
import contextlib
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop
import zmq
from fake_backend import FakeBackend, healthy

from mizzen.config.config import (
    CacheConfig,
    Config,
    EngineConfig,
    LogConfig,
    ModelConfigSource,
    SchedulerConfig,
    ServerConfig,
    SupervisorConfig,
)
from mizzen.ipc.messages import Shutdown
from mizzen.ipc.process import Child, ControlClient
from mizzen.server.main import ApiProcess


def make_config(*, tokenizers: int = 1, **server: Any) -> Config:
    """A valid configuration; ``server`` changes fields of its ServerConfig."""
    defaults: dict[str, Any] = {
        "host": "127.0.0.1", "port": 0, "health_host": "127.0.0.1", "health_port": 0, "api_workers": 1,
        "served_model_names": ("tiny", "org/alias"), "api_keys": (), "max_body_bytes": 1_000_000,
        "request_timeout_s": 60.0, "max_queued_requests": 8, "chat_template": None,
    }  # fmt: skip
    return Config(
        server=ServerConfig(**(defaults | server)),
        supervisor=SupervisorConfig(5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 3, 60.0, None),
        engine=EngineConfig(
            device="cpu", tensor_parallel_size=1, overlap_depth=1, attention_backend="sdpa", threads=1, seed=0,
            cache=CacheConfig(16, "radix", "on-demand", 0.5, None),
            scheduler=SchedulerConfig("fcfs", 8, 256, None),
            model=ModelConfigSource("tiny", None, "auto", "auto", "/tmp"),
        ),
        log=LogConfig("warning", "console", 10.0),
        tokenizer_workers=tokenizers,
        run_dir_parent=None,
    )  # fmt: skip


class Service:
    """A running api process (in a thread) and its fake backend."""

    def __init__(self, config: Config, backend: FakeBackend) -> None:
        self.backend = backend
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.error: BaseException | None = None
        self.process: ApiProcess | None = None
        self._config = config
        self._thread = threading.Thread(target=self._run, name="api")
        self._thread.start()
        backend.wait(lambda: backend.ready)

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        control = ControlClient(context, self.backend.run_dir, "api-0")
        child = Child("api-0", self.backend.run_dir, self._config, context, control, {})

        async def main() -> None:
            self.process = ApiProcess(child)
            await self.process.serve(self.sock)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(main())
        except BaseException as error:  # noqa: BLE001  # handed to the test's thread
            self.error = error
        control.close(0)
        context.destroy(0)

    @property
    def in_flight(self) -> int:
        assert self.process is not None
        return self.process.client.in_flight

    def become(self, **changes: Any) -> None:
        """Tells the api a health snapshot, and waits until it says the same."""
        health = healthy(**changes)
        self.backend.tell(health)
        assert self.process is not None
        known = self.process.client
        self.backend.wait(lambda: msgspec.structs.replace(known.health(), phase_s=health.phase_s) == health)

    def post(self, path: str = "/v1/chat/completions", **request: Any) -> httpx.Response:
        return self.http.post(path, json=request)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def chat(self, **request: Any) -> httpx.Response:
        return self.post(**({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | request))

    def complete(self, **request: Any) -> httpx.Response:
        return self.post("/v1/completions", **({"model": "tiny", "prompt": "Hi"} | request))

    def stop(self) -> None:
        self.http.close()
        self.backend.tell(Shutdown())
        self._thread.join(10)
        assert not self._thread.is_alive()
        assert self.error is None


def start_service(
    stack: contextlib.ExitStack,
    *,
    tokenizers: int = 1,
    backend: dict[str, Any] | None = None,
    ready: bool = True,
    **server: Any,
) -> Service:
    """Starts a service that ends with ``stack``. ``backend`` changes its FakeBackend, ``server`` its ServerConfig."""
    run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mz-")))
    fake = FakeBackend(run_dir, tokenizers, **(backend or {}))
    stack.callback(fake.close)
    service = Service(make_config(tokenizers=tokenizers, **server), fake)
    stack.callback(service.stop)
    if ready:
        service.become()
    return service


MakeService = Callable[..., Service]
