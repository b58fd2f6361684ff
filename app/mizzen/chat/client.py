"""A streaming client of the chat completions API. Leaving an answer early closes its connection, which aborts it."""

import json
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx

from mizzen.chat.sse import events
from mizzen.errors import MizzenError

# An answer may take as long as it takes: the server has its own limit, the user has Ctrl-C.
_TIMEOUT = httpx.Timeout(10.0, read=None)


class ChatError(MizzenError):
    """A request failed; the message is one line for the user."""


class ChatClient:
    """Talks to the server at ``url`` (with or without /v1). ``proxies``: obey HTTP_PROXY and the like."""

    def __init__(self, url: str, api_key: str | None = None, *, proxies: bool = True) -> None:
        self.url = normalized(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=proxies)
        except (httpx.InvalidURL, UnicodeEncodeError, ValueError) as error:
            raise ChatError(f"{url} or the key cannot be used: {_one_line(str(error))}") from error

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names from /v1/models. Raises ChatError."""
        try:
            response = self._http.get("/v1/models", timeout=10.0)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatError(_unreachable(self.url, error)) from error
        if response.status_code != httpx.codes.OK:
            raise ChatError(_refusal(response))
        try:
            return [str(model["id"]) for model in response.json()["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{self.url}/v1/models does not answer as OpenAI's API does") from error

    def answer(self, model: str, messages: list[dict[str, str]], parameters: dict[str, Any]) -> "Answer":
        body = {
            "model": model,
            "messages": messages,
            **parameters,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Answer(self._http, self.url, body)


class Answer:
    """One streamed answer: a context manager, and an iterator of its pieces of text. Raises ChatError."""

    def __init__(self, http: httpx.Client, url: str, body: dict[str, Any]) -> None:
        self._http, self._url, self._body = http, url, body
        self._response: httpx.Response | None = None
        self.finish_reason: str | None = None
        self.completion_tokens: int | None = None  # from usage, once the stream has ended
        self.first_s: float | None = None  # seconds from the request to the first piece
        self.last_s = 0.0  # seconds from the request to the last piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._response is not None:
            self._response.close()

    def __iter__(self) -> Iterator[str]:
        started_s = time.monotonic()
        try:
            request = self._http.build_request("POST", "/v1/chat/completions", json=self._body)
            self._response = self._http.send(request, stream=True)
            if self._response.status_code != httpx.codes.OK:
                self._response.read()
                raise ChatError(_refusal(self._response))
            kind = self._response.headers.get("content-type", "nothing")
            if not kind.startswith("text/event-stream"):
                raise ChatError(f"{self._url} answers with {kind}, not with a stream: is it an OpenAI-compatible API?")
            for event in events(self._response.iter_bytes()):
                if event == "[DONE]":
                    return
                piece = self._read(event)
                if piece:
                    self.last_s = time.monotonic() - started_s
                    self.first_s = self.last_s if self.first_s is None else self.first_s
                    yield piece
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if self.first_s is None:
                raise ChatError(_unreachable(self._url, error)) from error
            raise ChatError(f"the connection broke: {_one_line(str(error)) or type(error).__name__}") from error
        if self.finish_reason is None:
            raise ChatError("the connection was closed before the answer ended")

    def _read(self, event: str) -> str:
        """Takes one chunk in; returns its text."""
        try:
            chunk = json.loads(event)
            if error := chunk.get("error"):
                raise ChatError(_one_line(error.get("message") if isinstance(error, dict) else str(error)))
            if usage := chunk.get("usage"):
                self.completion_tokens = int(usage["completion_tokens"])
            choices = chunk.get("choices")
            if not choices:
                return ""
            self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
            return str((choices[0].get("delta") or {}).get("content") or "")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ChatError(f"the server sent an event that cannot be read: {_one_line(event)}") from error


def normalized(url: str) -> str:
    """The server's root: a scheme if there is none, and no /v1 at the end."""
    url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    return url if "://" in url else f"http://{url}"


def _unreachable(url: str, error: Exception) -> str:
    return f"{url} cannot be reached: {_one_line(str(error)) or type(error).__name__}"


def _refusal(response: httpx.Response) -> str:
    """One line from an error response, whatever its body is."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):  # a proxy's page, say
        message = response.text or response.reason_phrase
    retry_after = response.headers.get("retry-after")
    again = f" (try again in {retry_after} s)" if retry_after else ""
    return f"HTTP {response.status_code}: {_one_line(message)}{again}"


def _one_line(text: Any, limit: int = 300) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
