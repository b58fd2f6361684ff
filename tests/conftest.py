"""Fixtures that several folders share. This file also puts tests/ on the path, for ``from tiny import ...``."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    folder = Path(os.environ.get("TEST_MODEL") or REPOSITORY / "models" / "smollm2-135m-instruct")
    if not (folder / "config.json").exists():
        pytest.skip(f"no model in {folder}: run `make model`, or set TEST_MODEL")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI everything is installed: a skipped test is a missing tool, and fails the run."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome, report.longrepr = "failed", f"skipped in CI: {report.longrepr}"
    return report
