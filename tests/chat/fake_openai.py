"""A small OpenAI-compatible server of which the question chooses the behaviour. As a script it stands in for the
supervisor: it serves on MIZZEN_PORT and MIZZEN_HEALTH_PORT, loads for a moment, and ends at SIGTERM."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0, *, api_key: str | None = None, loading_calls: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.api_key = api_key
        self.loading_calls = loading_calls
        self.requests: list[dict[str, Any]] = []
        self.streaming = threading.Event()  # a "slow" answer has begun
        self.disconnected = threading.Event()  # and its client has gone

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes is no news."""


@contextlib.contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path.startswith("/health"):
            self.server.loading_calls -= 1
            ready = self.server.loading_calls < 0
            body = {"ready": ready, "phase": "load", "phase_s": 2.0, "fraction": 0.4, "detail": "layer 12 of 30"}
            self._json(200 if ready else 503, body)
        elif self._allowed():
            self._json(200, {"object": "list", "data": [{"id": "fake-model"}, {"id": "alias"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._allowed():
            return
        self.server.requests.append(body)
        question = body["messages"][-1]["content"]
        match question:
            case "refuse":
                self._json(400, {"error": {"message": "temperature\nmust be at most 2", "type": "x", "code": "y"}})
            case "busy":
                self._json(503, {"error": {"message": "loading"}}, {"Retry-After": "7"})
            case "plain refusal":
                self._send(502, "text/html", b"<h1>Bad\ngateway</h1>")
            case "page":
                self._send(200, "text/html", b"<h1>hello</h1>")
            case "die":
                os._exit(3)
            case _:
                self._stream(question)

    def _stream(self, question: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        self._chunk({"role": "assistant", "content": ""})
        if question == "slow":
            self._tick_until_disconnected()
            return
        if question == "silent":
            self._wait_until_disconnected()
            return
        for word in question.split(" "):
            self._chunk({"content": f"<{word}>"})
        if question == "cut":
            return
        if question == "garbage":
            self.wfile.write(b"data: {nonsense\n\n")
            return
        if question == "break":
            self.wfile.write(b'data: {"error": {"message": "the engine restarted", "code": "engine_restarted"}}\n\n')
            return
        self._chunk({}, finish_reason="stop")
        usage = {"prompt_tokens": 5, "completion_tokens": len(question.split(" ")), "total_tokens": 9}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _tick_until_disconnected(self) -> None:
        try:
            while True:
                self._chunk({"content": "tick "})
                self.server.streaming.set()
                time.sleep(0.01)
        except OSError:
            self.server.disconnected.set()

    def _wait_until_disconnected(self) -> None:
        self.server.streaming.set()
        with contextlib.suppress(ConnectionResetError):  # closed with unread data
            assert self.connection.recv(1) == b""
        self.server.disconnected.set()

    def _chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> None:
        chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}
        self.wfile.write(b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n")

    def _allowed(self) -> bool:
        key = self.server.api_key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._json(401, {"error": {"message": "the API key is wrong"}})
        return False

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", json.dumps(body).encode(), headers)

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def main() -> None:
    if "--fail" in sys.argv:
        print("MIZZEN_MODEL: there is no such folder", file=sys.stderr)
        sys.exit(78)
    api = FakeServer(int(os.environ["MIZZEN_PORT"]), api_key=os.environ.get("MIZZEN_API_KEYS"))
    health = FakeServer(
        int(os.environ["MIZZEN_HEALTH_PORT"]), loading_calls=10**9 if "--load-forever" in sys.argv else 3
    )
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    # Like the supervisor, it has a handler for SIGINT: only a signal that never arrives leaves it alone.
    signal.signal(signal.SIGINT, lambda *_: os._exit(99))
    with running(api), running(health):
        print("pid", os.getpid(), flush=True)
        deadline = time.monotonic() + 60  # whatever a test does, it does not stay
        while not ended.wait(0.02) and time.monotonic() < deadline:
            pass


if __name__ == "__main__":
    main()
