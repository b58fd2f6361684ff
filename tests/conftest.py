"""Fixtures that several folders share. This file also puts tests/ on the path, for ``from tiny import ...``."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    folder = Path(os.environ.get("MIZZEN_TEST_MODEL") or REPOSITORY / "models" / "smollm2-135m-instruct")
    if not (folder / "config.json").exists():
        pytest.skip(f"no model in {folder}: run `make model`, or set MIZZEN_TEST_MODEL")
    return folder
