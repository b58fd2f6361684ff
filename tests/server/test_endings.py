"""Every accepted request ends exactly once, whatever dies; what nobody waits for is aborted."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from api_service import MakeService, Service

from mizzen.errors import RequestFailed
from mizzen.ipc.messages import Delta, Deltas, PeerDown

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
WHOLE = BODY.replace(b"true", b"false")


class Call:
    """A request made in a thread; ``text`` and ``status`` once it is done."""

    def __init__(self, call: Callable[[], httpx.Response]) -> None:
        self._response: httpx.Response | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._response = self._call()

    def result(self) -> httpx.Response:
        self._thread.join(15)
        assert not self._thread.is_alive(), "the client hangs"
        assert self._response is not None
        return self._response


def post_raw(service: Service, body: bytes, *, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(15)
    sock.connect(("127.0.0.1", service.port))
    sock.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
    return sock


def last_event(response: httpx.Response) -> dict[str, Any]:
    """The last event of a stream that failed: no [DONE] makes it look complete."""
    assert "[DONE]" not in response.text
    event: dict[str, Any] = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    return event


def idle(service: Service) -> bool:
    return service.in_flight == 0


@pytest.mark.parametrize("body", [BODY, WHOLE], ids=["stream", "whole"])
def test_a_client_that_leaves_has_its_request_aborted_through_its_tokenizer(
    make_service: MakeService, body: bytes
) -> None:
    service = make_service(tokenizers=2, backend={"stall_after": 2})
    backend = service.backend
    first, second = post_raw(service, body), post_raw(service, body)
    backend.wait(lambda: len(backend.requests) == 2)
    if body is BODY:
        assert first.recv(100)
    first.close()
    second.close()
    backend.wait(lambda: len(backend.aborts) == 2)
    assert {name for name, _ in backend.aborts} == {"tokenizer-0", "tokenizer-1"}
    assert {abort.request_id for _, abort in backend.aborts} == {request.request_id for request in backend.requests}
    backend.wait(lambda: idle(service))
    backend.wait(lambda: backend.open_choices == 0)


def test_a_client_that_leaves_before_it_is_accepted_has_its_request_aborted(make_service: MakeService) -> None:
    service = make_service(backend={"hold": True})
    sock = post_raw(service, BODY)
    service.backend.wait_request()
    sock.close()
    service.backend.wait(lambda: service.backend.aborts)
    service.backend.wait(lambda: idle(service))


def test_three_hundred_dropped_connections_leave_nothing_behind(make_service: MakeService) -> None:
    service = make_service(backend={"step_s": 0.01}, max_queued_requests=400)
    for number in range(300):
        sock = post_raw(service, BODY)
        if number % 3:
            assert sock.recv(10)
        sock.close()
    service.backend.wait(lambda: idle(service), 20)
    service.backend.wait(lambda: service.backend.open_choices == 0)
    assert service.chat().status_code == 200


def test_a_client_that_never_reads_is_dropped_after_its_deadline(make_service: MakeService) -> None:
    words = ("x" * 100_000,) * 400
    service = make_service(backend={"words": words}, request_timeout_s=0.5)
    sock = post_raw(service, BODY, receive_buffer=4096)
    assert service.process is not None
    connections = service.process.server.server_state.connections
    service.backend.wait(lambda: service.backend.requests and not connections)
    assert idle(service)
    sock.close()
    assert service.chat(max_tokens=1).status_code == 200


def test_an_engine_that_misses_a_deadline_is_overruled(make_service: MakeService) -> None:
    service = make_service(backend={"stall_after": 1}, request_timeout_s=0.2)
    calls = [Call(lambda: service.chat()), Call(lambda: service.chat(stream=True))]
    whole, stream = (call.result() for call in calls)
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "request_timeout"
    assert last_event(stream)["error"]["code"] == "request_timeout"
    service.backend.wait(lambda: [abort.reason for _, abort in service.backend.aborts] == ["timeout", "timeout"])
    request = service.backend.requests[0]
    assert request.deadline_s is not None
    assert request.deadline_s == pytest.approx(request.arrival_s + 0.2)


@pytest.mark.parametrize("peer", ["engine", "detokenizer"])
def test_a_dead_engine_ends_every_request_and_lets_none_in(make_service: MakeService, peer: str) -> None:
    service = make_service(backend={"stall_after": 1})
    calls = [Call(lambda: service.chat()), Call(lambda: service.chat(stream=True))]
    assert service.process is not None
    answers = service.process.client._answers
    service.backend.wait(lambda: [answer.accepted for answer in list(answers.values())] == [True, True])
    service.backend.tell(PeerDown(peer))
    whole, stream = (call.result() for call in calls)
    assert whole.status_code == 503
    assert whole.json()["error"]["code"] == "engine_restarted"
    assert int(whole.headers["retry-after"]) >= 1
    assert last_event(stream)["error"]["code"] == "engine_restarted"
    assert service.chat().json()["error"]["code"] == "service_not_ready"
    service.backend.stall_after = None
    service.become(epoch=4)
    assert service.chat().status_code == 200
    assert service.backend.requests[-1].epoch == 4


def test_a_dead_tokenizer_ends_only_what_it_had_not_passed_on(make_service: MakeService) -> None:
    service = make_service(tokenizers=2, backend={"hold": True})
    backend = service.backend
    lost, passed, other = (Call(lambda: service.chat(stream=True)) for _ in range(3))
    backend.wait(lambda: len(backend.requests) == 3)
    process = service.process
    assert process is not None
    by_tokenizer = {answer.request_id: answer.tokenizer for answer in process.client._answers.values()}
    on_first = [request for request in backend.requests if by_tokenizer[request.request_id] == 0]
    on_second = [request for request in backend.requests if by_tokenizer[request.request_id] == 1]
    assert (len(on_first), len(on_second)) == (2, 1)
    backend.accept(on_first[1])
    backend.wait(lambda: sum(answer.accepted for answer in process.client._answers.values()) == 1)
    backend.tell(PeerDown("tokenizer-0"))
    backend.wait(lambda: service.in_flight == 2)
    # Its request may have reached the engine: the abort goes there, not to the dead.
    backend.wait(lambda: backend.aborts)
    assert [(name, abort.request_id) for name, abort in backend.aborts] == [("engine", on_first[0].request_id)]
    for request in (on_first[1], *on_second):
        backend.accept(request)
        backend.finish(request)
    results = [call.result() for call in (lost, passed, other)]
    assert sorted(result.status_code for result in results) == [200, 200, 503]
    # New requests avoid it until the supervisor says that it is back.
    backend.hold = False
    service.chat()
    assert [process.client._choose_tokenizer() for _ in range(3)] == [1, 1, 1]
    service.become(processes={"tokenizer-0": "ready", "tokenizer-1": "ready"})
    assert {process.client._choose_tokenizer() for _ in range(2)} == {0, 1}


def test_an_error_in_mid_stream_is_an_event_and_the_end(make_service: MakeService) -> None:
    service = make_service(backend={"stall_after": 1})
    call = Call(lambda: service.chat(stream=True, n=2))
    request = service.backend.wait_request()  # its acceptance is on the way, ahead of what is said now
    error = RequestFailed("the device is on fire").wire()
    service.backend.finish(request, 1, reason="error", error=error)
    response = call.result()
    assert response.status_code == 200
    assert last_event(response) == error.body()
    # The other choice of the request must not run on.
    service.backend.wait(lambda: service.backend.aborts)
    service.backend.wait(lambda: idle(service))


def test_the_openai_client_raises_an_error_of_a_stream(make_service: MakeService) -> None:
    service = make_service(backend={"stall_after": 1})
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True)
        assert next(iter(stream)).choices[0].delta.role == "assistant"
        service.backend.finish(service.backend.requests[0], reason="error", error=RequestFailed("boom").wire())
        with pytest.raises(openai.APIError, match="boom"):
            list(stream)


def test_a_second_terminal_and_late_words_are_dropped(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mizzen.server.client._REPEAT_ABORT_S", 1000.0)
    service = make_service(backend={"hold": True})
    call = Call(lambda: service.chat())
    request = service.backend.wait_request()
    # The detokenizer's word may overtake the tokenizer's.
    service.backend.say(Deltas([Delta(request.request_id, 0, "once", 1)]))
    service.backend.finish(request)
    service.backend.finish(request)
    service.backend.say(Deltas([Delta(request.request_id, 0, "late", 1)]))
    service.backend.accept(request)
    assert call.result().json()["choices"][0]["message"]["content"] == "once"
    assert idle(service)
    # Words for a request that is over are answered with an abort, straight to the engine, once.
    service.backend.wait(lambda: service.backend.aborts)
    service.backend.say(Deltas([Delta(request.request_id, 0, "later", 1)]))
    assert service.get("/health").status_code == 200
    assert [name for name, _ in service.backend.aborts] == ["engine"]


def test_shutdown_ends_streams_with_an_error_event(make_service: MakeService) -> None:
    service = make_service(backend={"stall_after": 1})
    call = Call(lambda: httpx.post(service.url + CHAT, content=BODY, timeout=15))
    assert service.process is not None
    answers = service.process.client._answers
    service.backend.wait(lambda: [answer.accepted for answer in list(answers.values())] == [True])
    service.stop()
    assert last_event(call.result())["error"]["code"] == "service_not_ready"


STARTS = [b"", b"POST / HTTP/1.1\r\nhost", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"]


@pytest.mark.parametrize("start", STARTS, ids=["nothing", "half a head", "half a body"])
def test_a_request_that_never_arrives_is_dropped(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr("mizzen.server.http.REQUEST_ARRIVAL_S", 0.2)
    service = make_service()
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as sock:
        sock.sendall(start)
        try:
            assert sock.recv(10) == b""
        except ConnectionResetError:  # as good as closed
            return


def test_a_request_that_arrived_may_take_longer(make_service: MakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen.server.http.REQUEST_ARRIVAL_S", 0.2)
    service = make_service(backend={"step_s": 0.1})
    assert service.chat(stream=True).text.endswith("data: [DONE]\n\n")


def test_without_a_deadline_the_kernel_drops_a_client_that_never_reads(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mizzen.server.http.UNREAD_S", 1)
    service = make_service(backend={"words": ("x" * 100_000,) * 400}, request_timeout_s=0)
    sock = post_raw(service, BODY, receive_buffer=4096)
    assert service.process is not None
    connections = service.process.server.server_state.connections
    service.backend.wait(lambda: service.backend.requests and not connections, 20)
    sock.close()
    assert service.backend.requests[0].deadline_s is None


def test_an_offer_of_http_2_is_ignored(service: Service) -> None:
    # What Java's HttpClient and `curl --http2` send first.
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=10) as sock:
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % (CHAT.encode(), len(WHOLE))
        sock.sendall(head + upgrade + b"\r\n" + WHOLE)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
