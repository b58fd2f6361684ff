"""One line an event on stderr, for people or as JSON, from our own loggers and from every library's."""

import logging
import logging.config
import sys
from typing import Any

import structlog

from mizzen.config.config import LogConfig, LogLevel

_QUIET = {
    "httpx": "WARNING", "httpcore": "WARNING", "filelock": "WARNING",  # a line a request at INFO
    "httpx2": "WARNING", "httpcore2": "WARNING", "modelscope_hub": "WARNING",
    "urllib3": "INFO", "opentelemetry.exporter": "ERROR",  # while a collector is down: a line a batch, not a line a try
}  # fmt: skip


def set_level(level: LogLevel) -> None:
    """Changes what is logged from now on, in this process. Libraries stay as quiet as they are."""
    logging.getLogger().setLevel(level.upper())


def configure_logging(log: LogConfig, process: str) -> None:
    """Routes structlog and the standard library's logging to stderr; each line has a ``process`` field.

    JSON lines carry a traceback as data (without the values of locals: they may be prompts or keys).
    """

    def add_process(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("process", process)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        add_process,
        structlog.processors.TimeStamper(fmt="iso", utc=log.format == "json"),
    ]
    render: list[structlog.typing.Processor]
    if log.format == "json":
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        render = [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(),
        ]
    else:
        render = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        ]
    formatter = {
        "()": structlog.stdlib.ProcessorFormatter,
        "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        "foreign_pre_chain": shared,
    }
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"structlog": formatter},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "structlog"}
            },
            "root": {"handlers": ["stderr"], "level": log.level.upper()},
            "loggers": {name: {"level": level} for name, level in _QUIET.items()},
        }
    )
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # uvicorn may have given them handlers of its own
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
