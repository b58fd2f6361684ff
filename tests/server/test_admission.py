"""Who is let in: keys, readiness, draining and the bound on work in progress."""

import threading
from typing import Any

import httpx
import pytest
from api_service import MakeService, Service
from fake_backend import ENGINE, healthy

from mizzen.errors import InvalidRequest, QueueFull
from mizzen.ipc.messages import Drain
from mizzen.observability.health import render
from mizzen.server.admission import Admission

HEALTH = ("/health", "/health/ready", "/health/live", "/health/startup")


@pytest.fixture
def guarded(make_service: MakeService) -> Service:
    return make_service(api_keys=("first-key", "clé-2"))


@pytest.mark.parametrize("header", [None, "", "first-key", "Basic first-key", "Bearer", "Bearer wrong"])
def test_without_the_right_key_models_and_inference_are_closed(guarded: Service, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for path in ("/v1/models", "/v1//models", "/v1/models/tiny", "/v1/chat/completions", "/nothing", "/openapi.json"):
        response = httpx.request("POST" if "chat" in path else "GET", guarded.url + path, headers=headers)
        assert response.status_code == 401, path
        error = response.json()["error"]
        assert error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_each_key_opens_and_health_and_version_need_none(guarded: Service) -> None:
    for key in ("first-key", "clé-2"):
        headers = {"authorization": f"Bearer {key}".encode()}
        assert httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{guarded.url}/v1/models", headers={"authorization": b"bearer " + key.encode()}).is_success
    for path in (*HEALTH, "/version"):
        assert guarded.get(path).status_code == 200


def test_before_the_first_snapshot_nothing_is_served_but_liveness(make_service: MakeService) -> None:
    service = make_service(ready=False)
    assert [service.get(path).status_code for path in HEALTH] == [503, 503, 200, 503]
    for response in (service.chat(), service.get("/v1/models")):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "service_not_ready"
        assert int(response.headers["retry-after"]) >= 1
    assert service.get("/version").status_code == 200


def test_while_loading_the_phase_is_told(make_service: MakeService) -> None:
    service = make_service(ready=False)
    service.become(
        startup=False, ready=False, phase="load", phase_s=12.0, fraction=0.4, detail="layer 12 of 30",
        retry_after_s=7.2, engine=None,
    )  # fmt: skip
    body = service.get("/health/ready").json()
    assert (body["phase"], body["fraction"], body["detail"]) == ("load", 0.4, "layer 12 of 30")
    assert body["phase_s"] >= 12.0
    response = service.chat()
    assert response.status_code == 503
    assert "load for 12 s, 40%: layer 12 of 30" in response.json()["error"]["message"]
    assert response.headers["retry-after"] == "8"
    # The model is known already, so it can be listed.
    assert service.get("/v1/models").json()["data"][0]["id"] == "tiny"


@pytest.mark.parametrize("startup", [True, False])
@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("ready", [True, False])
def test_each_probe_answers_from_its_own_field(
    make_service: MakeService, startup: bool, live: bool, ready: bool
) -> None:
    health = healthy(startup=startup, live=live, ready=ready)
    for which, expected in (("startup", startup), ("live", live), ("ready", ready)):
        status, body = render(health, which)  # type: ignore[arg-type]
        assert (status == 200) is expected
        assert (body["status"] == "ok") is expected
        assert (body["startup"], body["live"], body["ready"]) == (startup, live, ready)


def test_health_on_the_api_port_is_the_rendered_snapshot(service: Service) -> None:
    for path, which in zip(HEALTH, ("ready", "ready", "live", "startup"), strict=True):
        response = service.get(path)
        status, body = render(healthy(), which)  # type: ignore[arg-type]
        assert response.status_code == status
        assert response.json() | {"phase_s": 0} == body | {"phase_s": 0}
        assert service.http.head(path).status_code == status


def test_a_snapshot_that_is_too_old_is_not_ready(make_service: MakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mizzen.server.client.STALE_S", 0.3)
    service = make_service()
    service.backend.wait(lambda: service.get("/health").status_code == 503)
    assert "has not spoken" in service.get("/health").json()["detail"]
    assert service.chat().status_code == 200  # the engine itself may well be fine
    service.backend.tell(healthy())
    service.backend.wait(lambda: service.get("/health").status_code == 200)


def test_draining_lets_streams_finish_and_nothing_new_in(make_service: MakeService) -> None:
    service = make_service(backend={"step_s": 0.05})
    with httpx.stream(
        "POST",
        f"{service.url}/v1/completions",
        json={"model": "tiny", "prompt": "x", "stream": True},
        timeout=15,
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        service.backend.tell(Drain(deadline_s=1e9))
        service.backend.wait(lambda: service.get("/health/ready").json()["draining"])
        refused = service.chat()
        assert refused.status_code == 503
        assert "draining" in refused.json()["error"]["message"]
        assert refused.headers["connection"] == "close"
        assert service.get("/health/live").status_code == 200
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    service.backend.wait(lambda: service.backend.beats[-1].phase == "drain")


def test_beyond_the_bound_requests_get_429_and_a_time_to_come_back(make_service: MakeService) -> None:
    service = make_service(backend={"stall_after": 1}, max_queued_requests=2)  # and 8 running
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(service.chat(n=5).status_code)) for _ in range(2)]
    for thread in threads:
        thread.start()
    service.backend.wait(lambda: service.backend.open_choices == 10)
    for stream in (False, True):
        response = service.chat(stream=stream)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
    assert service.get("/health/ready").status_code == 200  # full is not broken
    service.backend.stall_after = None
    for thread in threads:
        thread.join(15)
    assert statuses == [200, 200]
    assert service.chat().status_code == 200


def test_the_engine_s_own_bound_counts_if_it_is_smaller(make_service: MakeService) -> None:
    service = make_service(max_queued_requests=0, ready=False)
    engine: Any = type(ENGINE)(512, 3, 64, 16, 1 << 20)
    service.become(engine=engine)
    assert service.chat(n=3).status_code == 200
    assert service.chat(n=4).status_code == 400


def test_retry_after_follows_the_rate_of_completions() -> None:
    admission = Admission()
    admission.admit(10, 10, 0.0)
    with pytest.raises(QueueFull) as early:
        admission.admit(4, 10, 0.0)
    assert early.value.retry_after_s == 1.0  # nothing is known yet
    for second in range(1, 6):
        admission.release(1, second * 2.0)  # one every two seconds
    admission.admit(5, 10, 10.0)
    with pytest.raises(QueueFull) as caught:
        admission.admit(4, 10, 10.0)
    assert caught.value.retry_after_s == pytest.approx(4 / (5 / 8))
    with pytest.raises(InvalidRequest):
        admission.admit(11, 10, 10.0)
    assert admission.in_flight == 10


def test_beats_tell_of_work_and_progress(make_service: MakeService) -> None:
    service = make_service(backend={"stall_after": 1})
    backend = service.backend
    backend.wait(lambda: backend.beats and backend.beats[-1].phase == "serve")
    assert not backend.beats[-1].pending
    before = backend.beats[-1].progress
    thread = threading.Thread(target=service.chat)
    thread.start()
    backend.wait(lambda: backend.beats[-1].pending and backend.beats[-1].progress > before)
    backend.stall_after = None
    thread.join(15)
    backend.wait(lambda: not backend.beats[-1].pending)
