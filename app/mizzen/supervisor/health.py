"""The supervisor's health port: threads of their own answer from the last snapshot, and know when it is stale.

/metrics is here too, in those threads: a metrics process that does not answer holds up nobody else.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mizzen.errors import AuthenticationFailed, RequestError, RouteNotFound
from mizzen.ipc.messages import Health
from mizzen.observability.feed import EXPOSITION_TYPE, UNAVAILABLE
from mizzen.observability.health import UNKNOWN, Probe, render
from mizzen.server.auth import Keys
from mizzen.supervisor.listen import listen

PROBES: dict[str, Probe] = {
    "/health": "ready",
    "/health/startup": "startup",
    "/health/live": "live",
    "/health/ready": "ready",
}
STALE_S = 5.0  # the main loop publishes several times a second: if it has not for this long, it hangs


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """``ask`` gives the exposition, or None if it cannot be had now. ``keys``: a request needs one of them."""

    ask: Callable[[], bytes | None]
    keys: Keys | None


class HealthServer:
    """Bound when made, serving from ``start`` to ``close``. ``publish`` replaces the snapshot."""

    def __init__(
        self, host: str, port: int, *, stale_s: float = STALE_S, metrics: MetricsEndpoint | None = None
    ) -> None:
        self._stale_s = stale_s
        self._snapshot = (UNKNOWN, time.monotonic())
        snapshot = self.snapshot

        class Handler(_Handler):
            def answer(self, probe: Probe) -> tuple[int, dict[str, Any]]:
                return render(snapshot(), probe)

        Handler.metrics = metrics
        socket = listen(host, port, host_setting="MIZZEN_HEALTH_HOST", port_setting="MIZZEN_HEALTH_PORT")
        self._server = _Server(socket.getsockname(), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = socket
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.socket.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def publish(self, health: Health) -> None:
        self._snapshot = (health, time.monotonic())

    def snapshot(self) -> Health:
        """The last one published; not live and not ready if that was too long ago."""
        health, published_s = self._snapshot
        age_s = time.monotonic() - published_s
        if age_s <= self._stale_s:
            return health
        detail = f"the supervisor has not moved for {age_s:.0f} s"
        return msgspec.structs.replace(health, live=False, ready=False, detail=detail)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that never reads must not hold up the end

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A prober that hangs up early is no event."""


class _Handler(BaseHTTPRequestHandler):
    timeout = 5.0  # seconds that a client may take to send its request
    metrics: MetricsEndpoint | None = None

    def answer(self, probe: Probe) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        probe = PROBES.get(path)
        if probe is not None:
            status, body = self.answer(probe)
            self._send(status, json.dumps(body).encode(), "application/json")
        elif path == "/metrics" and self.metrics is not None:
            self._send_metrics(self.metrics)
        else:
            paths = [*PROBES, "/metrics"] if self.metrics is not None else PROBES
            self._refuse(RouteNotFound(f"only {', '.join(paths)} are here"))

    def _send_metrics(self, metrics: MetricsEndpoint) -> None:
        if metrics.keys is not None:
            try:
                metrics.keys.check(self.headers.get("authorization", "").encode("latin-1"))
            except AuthenticationFailed as error:
                self._refuse(error)
                return
        text = metrics.ask()
        if text is None:
            self._send(503, UNAVAILABLE, "text/plain; charset=utf-8")
        else:
            self._send(200, text, EXPOSITION_TYPE)

    def _refuse(self, error: RequestError) -> None:
        self._send(error.status, json.dumps(error.wire().body()).encode(), "application/json")

    def _send(self, status: int, data: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds for ever: not logged."""
