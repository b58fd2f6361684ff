"""The file from which an orchestrator reads why the service ended (Kubernetes: /dev/termination-log)."""

from pathlib import Path

import structlog

log = structlog.get_logger()


def write_termination_log(path: str | None, message: str) -> None:
    """Writes ``message`` to MIZZEN_TERMINATION_LOG, if that is set; a failure to is only logged."""
    if path is None:
        return
    try:
        Path(path).write_text(message + "\n", encoding="utf-8")
    except OSError as error:
        log.warning("MIZZEN_TERMINATION_LOG cannot be written", path=path, reason=error.strerror)
