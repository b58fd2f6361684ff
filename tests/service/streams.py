"""Clients that hold streams open and remember how each ended: a thread and a plain socket a client, nothing retried."""

import http.client
import json
import threading
import time
from typing import Any

from service.running import Server

OPEN_TIMEOUT_S = 60.0


class Stream:
    """One streamed completion. ``outcome`` is None while it runs; then a finish reason ("length"), an error's code
    ("engine_restarted"), "refused 503" if there never was a stream, or "closed" if the connection ended without a word.
    """

    def __init__(self, server: Server, fields: dict[str, Any]) -> None:
        self.outcome: str | None = None
        self.error: dict[str, Any] = {}
        self.retry_after: str | None = None
        self.pieces = 0
        self.ended_s = 0.0
        self.local_port = 0
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"model": "test-model", "temperature": 0, "stream": True, "ignore_eos": True, **fields}
        self._body = json.dumps(body).encode()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            outcome = self._read()
        except (OSError, http.client.HTTPException):
            outcome = "closed"
        self.ended_s = time.monotonic()
        self.outcome = outcome
        self._connection.close()

    def _read(self) -> str:
        self._connection.request("POST", "/v1/completions", self._body, {"content-type": "application/json"})
        self.local_port = self._connection.sock.getsockname()[1]
        answer = self._connection.getresponse()
        if answer.status != 200:
            self.retry_after = answer.headers["retry-after"]
            self.error = json.loads(answer.read())["error"]
            return f"refused {answer.status}"
        reason = "closed"
        while line := answer.readline():
            if line == b"data: [DONE]\n":
                return reason
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                self.error = event["error"]
                return str(event["error"]["code"])
            if event["choices"]:
                self.pieces += 1
                reason = event["choices"][0]["finish_reason"] or reason
        return "closed"

    def wait(self, timeout_s: float) -> str:
        self._thread.join(max(0.0, timeout_s))
        assert self.outcome is not None, f"no ending within the time; {self.pieces} pieces so far"
        return self.outcome


class Streams:
    """``count`` streams at once, each with a prompt of its own; made only when every one has had its first text."""

    def __init__(self, server: Server, count: int, **fields: Any) -> None:
        self.all = [Stream(server, {"prompt": f"Client number {k} says", **fields}) for k in range(count)]
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while not all(stream.pieces for stream in self.all):
            ended = [f"{stream.outcome} {stream.error}" for stream in self.all if stream.outcome is not None]
            assert not ended, ended
            assert time.monotonic() < deadline, [stream.pieces for stream in self.all]
            time.sleep(0.02)

    def outcomes(self, within_s: float) -> list[str]:
        """How each ended; fails if one has not within ``within_s`` from now."""
        deadline = time.monotonic() + within_s
        return [stream.wait(deadline - time.monotonic()) for stream in self.all]
