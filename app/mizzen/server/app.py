"""The routes. Every path out of here, however it fails, has OpenAI's body.

A request passes the gate (path, key), then its route; what can be refused is refused before a stream's 200.
"""

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mizzen import __version__
from mizzen.config.config import ServerConfig
from mizzen.errors import (
    AuthenticationFailed,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    RequestError,
    RequestFailed,
    RouteNotFound,
)
from mizzen.observability.feed import EXPOSITION_TYPE, UNAVAILABLE
from mizzen.observability.health import Probe, render
from mizzen.observability.record import CLIENT_GONE, InferenceRecord, Observer, emit_to
from mizzen.observability.requests import RequestMetrics
from mizzen.server.asgi import ErrorResponse, EventStream, JsonBytes, Streams, Watchers, read_body, refusal
from mizzen.server.auth import Keys
from mizzen.server.client import ClientGone, EngineClient
from mizzen.server.convert import Job, chat_job, completion_job
from mizzen.server.http import ABORT
from mizzen.server.protocol import parse_chat, parse_completion, schemas
from mizzen.server.record import open_record, record_of
from mizzen.server.responses import Kind, StreamEncoder, WholeAnswer, encode, make_header

OPEN_PATHS = ("/health", "/health/ready", "/health/live", "/health/startup", "/version")  # need no key

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ApiMetrics:
    """``ask`` gives the whole service's exposition, or None if it cannot be had now; it blocks."""

    requests: RequestMetrics
    ask: Callable[[], bytes | None]
    require_key: bool


class Api:
    """What the routes share."""

    def __init__(
        self, client: EngineClient, config: ServerConfig, metrics: ApiMetrics | None, trace_content: bool
    ) -> None:
        self._metrics = metrics
        self.streams = Streams()
        self._trace_content = trace_content
        self._client = client
        self._watchers = Watchers(client)
        self._config = config
        self._started = int(time.time())

    # ---- inference ----

    async def chat_completions(self, request: Request) -> Response:
        return await self._infer(request, "chat")

    async def completions(self, request: Request) -> Response:
        return await self._infer(request, "completion")

    async def _infer(self, request: Request, kind: Kind) -> Response:
        body = await read_body(request.scope, request.receive, self._config.max_body_bytes)
        health = self._client.ready_health()
        assert health.model is not None
        job: Job
        if kind == "chat":
            chat = parse_chat(body)
            self._check_model(chat.model)
            job = chat_job(chat, health.model)
        else:
            completion = parse_completion(body)
            self._check_model(completion.model)
            job = completion_job(completion, health.model)
        record = record_of(request.scope)
        record.inference = inference = InferenceRecord(
            operation="chat" if kind == "chat" else "text_completion",
            model=job.model,
            sampling=job.sampling,
            stream=job.stream,
            num_prompts=len(job.prompts),
            num_choices=job.num_choices,
            prompts=job.prompts if self._trace_content else None,
            answers=[[] for _ in range(job.num_choices)] if self._trace_content else None,
        )
        if self._metrics is not None:
            inference.pace = self._metrics.requests.pace(record, inference)
        answer = self._client.submit(job, record)
        header = make_header(kind, answer.request_id, job.model, self._fingerprint())
        inference.response_id = header.id
        if not record.named_by_client:
            record.request_id = header.id
        self._watchers.watch(answer, request.receive)
        try:
            await answer.until_accepted()
            if job.stream:
                encoder = StreamEncoder(kind, job, header)
                return EventStream(answer, encoder, self._client, self.streams)
            whole = WholeAnswer(kind, job)
            while not whole.add(await answer.next()):
                pass
            return JsonBytes(whole.body(header))
        except BaseException:
            self._client.leave(answer)  # cancelled, or a bug: the engine must not go on for nobody
            raise

    def _names(self) -> tuple[str, ...]:
        model = self._client.health().model
        return self._config.served_model_names or ((model.name,) if model else ())

    def _check_model(self, model: str) -> None:
        if not model:
            raise InvalidRequest("'model' is empty", param="model")
        if model not in self._names():
            raise ModelNotFound(model)

    def _fingerprint(self) -> str:
        """The same for the same model, weights and version."""
        model = self._client.health().model
        seed = f"{__version__} {model.architecture} {model.weights}" if model else __version__
        return "fp_" + hashlib.sha256(seed.encode()).hexdigest()[:10]

    # ---- models, version, health ----

    async def models(self) -> Response:
        return JsonBytes(encode({"object": "list", "data": [self._card(name) for name in self._served()]}))

    async def model(self, model_id: str) -> Response:
        if model_id not in self._served():
            raise ModelNotFound(model_id)
        return JsonBytes(encode(self._card(model_id)))

    def _served(self) -> tuple[str, ...]:
        """Raises ServiceNotReady while the model is not known yet."""
        if self._client.health().model is None:
            self._client.ready_health()
        return self._names()

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._started, "owned_by": "mizzen"}
        engine = self._client.health().engine
        return card | {"max_model_len": engine.max_model_len} if engine else card

    async def version(self) -> Response:
        return JsonBytes(encode({"version": __version__}))

    async def metrics(self) -> Response:
        assert self._metrics is not None
        text = await asyncio.to_thread(self._metrics.ask)
        headers = {"cache-control": "no-store"}
        if text is None:
            return Response(UNAVAILABLE, 503, headers, "text/plain")
        return Response(text, 200, headers | {"content-type": EXPOSITION_TYPE})

    async def ready(self) -> Response:
        return self._probe("ready")

    async def live(self) -> Response:
        return self._probe("live")

    async def startup(self) -> Response:
        return self._probe("startup")

    def _probe(self, which: Probe) -> Response:
        health = self._client.health()
        status, body = render(health, which)
        headers = {"cache-control": "no-store"}
        if status != 200:
            headers["retry-after"] = str(max(1, round(health.retry_after_s)))
        return JsonBytes(encode(body), status, headers)


class Gate:
    """The outermost layer: tidies the path, checks the key, keeps the record, and turns a bug into a logged 500."""

    def __init__(
        self, app: ASGIApp, client: EngineClient, keys: Keys, open_paths: Sequence[str], observers: Sequence[Observer]
    ) -> None:
        self._app = app
        self._client = client
        self._emit = emit_to(observers)
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] = tidy(scope["path"])
        record = open_record(scope, self._emit)
        started = False

        async def sender(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["x-request-id"] = record.request_id
                if self._client.draining:
                    headers["connection"] = "close"
            await send(message)

        try:
            if self._keys and path not in self._open_paths:
                record.api_key = self._authenticate(scope)
            await self._app(scope, receive, sender)
        except AuthenticationFailed as error:
            record.error = error.wire()
            await refusal(error)(scope, receive, sender)
        except Exception:
            log.exception("request failed by a bug", path=path, request_id=record.request_id)
            bug = RequestFailed("Internal error")
            record.error = bug.wire()
            if not started:
                await refusal(bug)(scope, receive, sender)
            else:
                scope.get("extensions", {}).get(ABORT, lambda: None)()
        finally:
            record.client_gone = record.client_gone or record.status in (0, CLIENT_GONE)
            record.status = record.status or CLIENT_GONE
            record.route = getattr(scope.get("route"), "path", "")
            record.http_done()

    def _authenticate(self, scope: Scope) -> int:
        """The key's number, from 1."""
        value = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return self._keys.check(value) + 1


def tidy(path: str) -> str:
    """One slash where a client wrote several, none at the end: "/v1//models/" is "/v1/models"."""
    return re.sub("/+", "/", path).rstrip("/") or "/"


async def _on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    record_of(request.scope).error = error.wire()
    return refusal(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        not_allowed = MethodNotAllowed(f"{path} does not take {method}").wire()
        record_of(request.scope).error = not_allowed
        return ErrorResponse(not_allowed, dict(error.headers or {}))
    if error.status_code == 404:
        return await _on_request_error(request, RouteNotFound(f"There is no {path}"))
    return await _on_request_error(request, RequestFailed(str(error.detail)))


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return refusal(RequestFailed("Internal error"))


def create_app(
    client: EngineClient,
    config: ServerConfig,
    observers: Sequence[Observer] = (),
    *,
    metrics: ApiMetrics | None = None,
    trace_content: bool = False,
) -> tuple[ASGIApp, Streams]:
    """The ASGI app, and its streams for the caller to sweep.

    ``observers``, and then the metrics, get each request's record, in order.
    """
    api = Api(client, config, metrics, trace_content)
    app = FastAPI(
        title="Mizzen",
        version=__version__,
        docs_url=None,  # both pages load their scripts from the internet
        redoc_url=None,
        # FastAPI's own spans know nothing of the engine; observability/tracing.py exports one trace a request.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        redirect_slashes=False,
        exception_handlers={
            RequestError: _on_request_error,
            HTTPException: _on_http_error,
            ClientGone: _on_client_gone,
            Exception: _on_bug,
        },
    )
    chat_schema, completion_schema, components = schemas()

    def add(path: str, endpoint: Any, methods: list[str], schema: dict[str, Any] | None = None) -> None:
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        app.add_api_route(
            path, endpoint, methods=methods, response_model=None, openapi_extra=extra if schema is not None else None
        )

    add("/v1/chat/completions", api.chat_completions, ["POST"], chat_schema)
    add("/v1/completions", api.completions, ["POST"], completion_schema)
    add("/v1/models", api.models, ["GET"])
    add("/v1/models/{model_id:path}", api.model, ["GET"])
    add("/version", api.version, ["GET"])
    open_paths: tuple[str, ...] = OPEN_PATHS
    if metrics is not None:
        add("/metrics", api.metrics, ["GET"])
        observers = (*observers, metrics.requests)
        open_paths = OPEN_PATHS if metrics.require_key else (*OPEN_PATHS, "/metrics")
    for path, endpoint in {
        "/health": api.ready,
        "/health/ready": api.ready,
        "/health/live": api.live,
        "/health/startup": api.startup,
    }.items():
        add(path, endpoint, ["GET"])
        app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)
    make_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_openapi()
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
    return Gate(app, client, Keys(config.api_keys), open_paths, observers), api.streams
