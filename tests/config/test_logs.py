"""What a line of the log looks like, whoever wrote it."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from mizzen.config.config import LogConfig
from mizzen.observability.logs import configure_logging


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def configure(form: str, level: str = "info") -> None:
    configure_logging(LogConfig(level=level, format=form, interval_s=1.0), process="engine-0")  # type: ignore[arg-type]


def test_every_json_line_has_the_process_whoever_logs(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    structlog.get_logger().info("ours", request_id="r1", tokens=3)
    logging.getLogger("some.library").warning("a library's %s", "word", extra={"port": 1})
    ours, theirs = map(json.loads, capsys.readouterr().err.splitlines())
    assert (ours["message"], ours["request_id"], ours["tokens"], ours["level"]) == ("ours", "r1", 3, "info")
    assert (theirs["message"], theirs["level"], theirs["port"]) == ("a library's word", "warning", 1)
    assert ours["process"] == theirs["process"] == "engine-0"
    assert ours["timestamp"].endswith("Z")


def test_a_traceback_is_one_json_line_without_the_values_of_locals(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")

    def fail() -> None:
        prompt = "a secret " + "prompt"
        raise ValueError(len(prompt))

    try:
        fail()
    except ValueError:
        structlog.get_logger().exception("failed")
    [line] = capsys.readouterr().err.splitlines()
    [exception] = json.loads(line)["exception"]
    assert exception["exc_type"] == "ValueError"
    assert [frame["name"] for frame in exception["frames"]][-1] == "fail"
    assert "secret prompt" not in line


def test_console_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure("console")
    structlog.get_logger().info("ready", seconds=1.5)
    [line] = capsys.readouterr().err.splitlines()
    assert "ready" in line
    assert "seconds=1.5" in line
    assert "process=engine-0" in line


@pytest.mark.parametrize("form", ["console", "json"])
def test_the_level_filters_ours_and_theirs(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure(form, "warning")
    structlog.get_logger().info("quiet")
    logging.getLogger("anything").info("quiet")
    logging.getLogger("httpx").info("quiet")
    structlog.get_logger().warning("loud")
    [line] = capsys.readouterr().err.splitlines()
    assert "loud" in line


def test_python_warnings_become_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json")
    logging.getLogger("py.warnings").warning("deprecated")
    assert json.loads(capsys.readouterr().err)["message"] == "deprecated"
