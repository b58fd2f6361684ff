"""Every error that Mizzen raises on purpose, as one tree. A request's error carries its HTTP status, type and code.

MizzenError
├── ConfigError                        exit 78, never retried: names the setting to change
├── EngineDead                         the engine (or its device) failed: the process group is restarted
└── RequestError                       one request is refused or ended; nothing else is touched
    ├── InvalidRequest          400    invalid_request_error, names the field
    │   ├── UnsupportedField    400    unsupported_value
    │   └── RequestTooLong      400    context_length_exceeded
    ├── AuthenticationFailed    401    invalid_api_key
    ├── ModelNotFound           404    model_not_found
    ├── RouteNotFound           404    not_found
    ├── MethodNotAllowed        405    method_not_allowed
    ├── BodyTooLarge            413    request_too_large
    ├── QueueFull               429    rate_limit_exceeded, Retry-After
    ├── RequestFailed           500    internal_error
    ├── ServiceNotReady         503    service_not_ready, Retry-After (loading, restarting or draining)
    ├── EngineRestarted         503    engine_restarted, Retry-After (the request was in flight when a process died)
    └── RequestTimedOut         504    request_timeout
"""

import msgspec

EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: an orchestrator must not expect a retry to help
EXIT_FAILED = 1


class WireError(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request's error as it travels between processes."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error body: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class MizzenError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(MizzenError):
    """A setting, or what it names, is wrong. ``setting`` is the variable to change, such as ``MIZZEN_MODEL``."""

    def __init__(self, message: str, *, setting: str) -> None:
        self.setting = setting
        super().__init__(message if setting in message else f"{setting}: {message}")


class EngineDead(MizzenError):
    """The engine cannot go on."""


class RequestError(MizzenError):
    """One request is refused or ended."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def wire(self) -> WireError:
        return WireError(self.status, self.message, self.type, self.code, self.param, self.retry_after_s)


class InvalidRequest(RequestError):
    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnsupportedField(InvalidRequest):
    code = "unsupported_value"

    def __init__(self, field: str, why: str = "is not supported") -> None:
        super().__init__(f"'{field}' {why}", param=field)


class RequestTooLong(InvalidRequest):
    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int, *, param: str, at_least: bool = False) -> None:
        count = f"at least {num_tokens}" if at_least else str(num_tokens)
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the prompt has {count} tokens"
            " and at least one is needed for the answer. Shorten the prompt.",
            param=param,
        )


class AuthenticationFailed(RequestError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class ModelNotFound(RequestError):
    status, type, code = 404, "invalid_request_error", "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model}' does not exist", param="model")


class RouteNotFound(RequestError):
    status, type, code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(RequestError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTooLarge(RequestError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class QueueFull(RequestError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class RequestFailed(RequestError):
    status, type, code = 500, "server_error", "internal_error"


class ServiceNotReady(RequestError):
    status, type, code = 503, "server_error", "service_not_ready"


class EngineRestarted(RequestError):
    status, type, code = 503, "server_error", "engine_restarted"


class RequestTimedOut(RequestError):
    status, type, code = 504, "server_error", "request_timeout"
