"""The api process: HTTP in, messages out. Its loop beats; a loop that is stuck stops beating.

``python -m mizzen.server.main --fd N``: the supervisor owns the listening socket, so that the port is open from the
first moment and connections wait in it while this process restarts.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
import uvloop

from mizzen import __version__
from mizzen.errors import ServiceNotReady
from mizzen.ipc.channels import ZmqReceiver, ZmqSender
from mizzen.ipc.messages import ApiInbox, Drain, Shutdown
from mizzen.ipc.process import BEAT_INTERVAL_S, Child, child_process
from mizzen.observability.access import AccessLog
from mizzen.observability.feed import QUERY_TIMEOUT_S, Feed, MetricsSender, query_metrics
from mizzen.observability.record import Observer
from mizzen.observability.requests import RequestMetrics
from mizzen.server.app import ApiMetrics, create_app
from mizzen.server.client import EngineClient
from mizzen.server.http import Server

if TYPE_CHECKING:
    from mizzen.observability.otlp import Telemetry

log = structlog.get_logger()


class ApiProcess:
    """One api worker: the channels, the engine client, the HTTP server and the heartbeat, in one event loop."""

    def __init__(self, child: Child) -> None:
        config = child.config
        self._child = child
        self._inbox = ZmqReceiver(child.context, child.run_dir, child.name, ApiInbox)
        self._tokenizers = [
            ZmqSender(child.context, child.run_dir, f"tokenizer-{j}") for j in range(config.tokenizer_workers)
        ]
        self._engine = ZmqSender(child.context, child.run_dir, "engine")
        self.client = EngineClient(
            api=child.index,
            workers=config.server.api_workers,
            tokenizers=self._tokenizers,
            engine=self._engine,
            max_running=config.engine.scheduler.max_running_requests,
            max_queued=config.server.max_queued_requests,
            timeout_s=config.server.request_timeout_s,
        )
        self._metrics_sender = MetricsSender(child.context, child.run_dir) if config.metrics.enabled else None
        self._metrics, metrics = None, None
        if self._metrics_sender is not None:
            self._metrics = RequestMetrics(Feed(self._metrics_sender.send), config.server.api_keys)
            metrics = ApiMetrics(
                self._metrics,
                lambda: query_metrics(child.context, child.run_dir, QUERY_TIMEOUT_S),
                config.metrics.require_key,
            )
        self._telemetry: Telemetry | None = None
        if config.telemetry.traces is not None or config.telemetry.metrics is not None:
            from mizzen.observability import otlp  # OpenTelemetry's SDK: loaded only to export

            self._telemetry = otlp.Telemetry(config.telemetry, child.name, __version__)
        observers: list[Observer] = [self._telemetry] if self._telemetry is not None else []
        if config.log.access:
            observers.append(AccessLog())
        app, self._streams = create_app(
            self.client, config.server, observers, metrics=metrics, trace_content=config.telemetry.content
        )
        self.server = Server(app, on_started=child.control.ready)

    async def serve(self, sock: socket.socket) -> None:
        """Until Shutdown."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._inbox.socket.fileno(), self._guarded(self._read_inbox))
        loop.add_reader(self._child.control.socket.fileno(), self._guarded(self._read_control))
        heart = loop.create_task(self._beat())
        heart.add_done_callback(self._on_heart_end)
        try:
            await self.server.serve(sockets=[sock])
        finally:
            heart.cancel()
            self.client.close()
            loop.remove_reader(self._inbox.socket.fileno())
            loop.remove_reader(self._child.control.socket.fileno())
            self._inbox.close()
            for sender in (self._engine, *self._tokenizers):
                sender.close()
            if self._metrics_sender is not None:
                self._metrics_sender.close()
            if self._telemetry is not None:
                self._telemetry.close()
        if not heart.cancelled() and heart.done() and (error := heart.exception()):
            raise error

    def _guarded(self, read: Callable[[], None]) -> Callable[[], None]:
        """ZeroMQ's descriptor signals only changes: what arrives while we read must be read too."""

        def run() -> None:
            try:
                read()
            except Exception:  # one message that cannot be handled must not cost the others
                log.exception("message could not be handled")

        return run

    def _read_inbox(self) -> None:
        for message in self._inbox.drain():
            self.client.handle(message)

    def _read_control(self) -> None:
        for message in self._child.control.poll():
            if isinstance(message, Shutdown):
                self.client.end_all(ServiceNotReady("The service is shutting down", retry_after_s=1.0))
                self.server.should_exit = True
                continue
            self.client.handle_control(message)
            if isinstance(message, Drain):
                self.server.close_when_done()

    async def _beat(self) -> None:
        read_inbox, read_control = self._guarded(self._read_inbox), self._guarded(self._read_control)
        while True:
            phase: Any = "drain" if self.client.draining else "serve" if self.server.started else "start"
            self._child.control.beat(phase, pending=self.client.in_flight > 0, progress=self.client.messages)
            # A send can swallow the signal of a message that arrived meanwhile: look for it.
            read_control()
            read_inbox()
            self.client.sweep()
            self._streams.sweep()
            if self._metrics is not None:
                self._metrics.flush()
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _on_heart_end(self, heart: "asyncio.Task[None]") -> None:
        if not heart.cancelled():
            self.server.should_exit = True  # without a heart the supervisor would kill us: end with the reason


def main() -> None:
    with child_process("mizzen.server.main", "fd") as child:
        sock = socket.socket(fileno=child.options["fd"])
        uvloop.run(ApiProcess(child).serve(sock))


if __name__ == "__main__":
    main()
