"""uvicorn, hardened: a peer can neither make a request endless nor keep a connection by not reading.

What uvicorn leaves open is bounded here: the size of a request's head, the time a whole request may take to arrive,
and the time that sent bytes may stay unread. The application gets ``scope["extensions"][ABORT]`` to drop a connection
at once.
"""

import asyncio
import contextlib
import gc
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mizzen.errors import InvalidRequest
from mizzen.server.responses import encode

ABORT = "mizzen.abort"
MAX_HEAD_BYTES = 64 * 1024
REQUEST_ARRIVAL_S = 60  # a request's head and body, from the first byte (or the connection) to the last
UNREAD_S = 60  # sent bytes that the peer has not acknowledged: the kernel drops the connection
KEEP_ALIVE_S = 75  # longer than the usual 60 s of load balancers, so that they close first
GRACE_S = 2  # after Shutdown, for last events to be written


class Protocol(HttpToolsProtocol):
    """One connection."""

    _head_bytes = 0
    _arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        with contextlib.suppress(OSError):  # a peer that is gone already; the next read tells
            sock: socket.socket = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http_1(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _stay_with_http_1(self, rest: bytes) -> None:
        """Java's HttpClient and ``curl --http2`` offer HTTP/2; the parser then takes the body for another protocol.

        The offer is declined, as HTTP allows: the same head without it is parsed again, with the body after it.
        """
        method: bytes = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not supported")
            return
        head = [b"%s %s HTTP/1.1\r\n" % (method, self.url)]
        head += [b"%s: %s\r\n" % header for header in self.headers if header[0] not in (b"upgrade", b"connection")]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join(head) + b"\r\n" + rest)

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]  # ours, not the ASGI list's
        if self._arrival is None:
            self._arm()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._disarm()
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser gave up: the answer has the body of every other error."""
        message = f"The request's head is over {MAX_HEAD_BYTES} bytes" if self._head_bytes > MAX_HEAD_BYTES else msg
        body = encode(InvalidRequest(message).wire().body())
        head = "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
        self.transport.write(head.encode() + b"%d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("request head too large")  # the parser turns it into its own error

    def _arm(self) -> None:
        self._arrival = self.loop.call_later(REQUEST_ARRIVAL_S, self.transport.abort)

    def _disarm(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None


class Server(uvicorn.Server):
    """Serves an ASGI app on a listening socket; the supervisor alone acts on signals."""

    def __init__(self, app: Any, on_started: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                loop="uvloop",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="error",  # a garbled request is its sender's problem, not a line in our log
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what the imports made lives for ever: no collection needs to walk it
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def close_when_done(self) -> None:
        """Each connection that is answering now is closed after its answer, not kept alive."""
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                cycle.keep_alive = False
