"""The supervisor's health port: threads of their own answer from the last snapshot, and know when it is stale."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mizzen.ipc.messages import Health
from mizzen.observability.health import UNKNOWN, Probe, render
from mizzen.supervisor.listen import listen

PROBES: dict[str, Probe] = {
    "/health": "ready",
    "/health/startup": "startup",
    "/health/live": "live",
    "/health/ready": "ready",
}
STALE_S = 5.0  # the main loop publishes several times a second: if it has not for this long, it hangs


class HealthServer:
    """Bound when made, serving from ``start`` to ``close``. ``publish`` replaces the snapshot."""

    def __init__(self, host: str, port: int, *, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._snapshot = (UNKNOWN, time.monotonic())
        snapshot = self.snapshot

        class Handler(_Handler):
            def answer(self, probe: Probe) -> tuple[int, dict[str, Any]]:
                return render(snapshot(), probe)

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

    def answer(self, probe: Probe) -> tuple[int, dict[str, Any]]:
        raise NotImplementedError

    def do_GET(self) -> None:
        probe = PROBES.get(urlsplit(self.path).path)
        if probe is None:
            message = f"only {', '.join(PROBES)} are here"
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_found"}
            status, body = 404, {"error": error}
        else:
            status, body = self.answer(probe)
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds for ever: not logged."""
