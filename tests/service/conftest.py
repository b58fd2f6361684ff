"""One server on the real model for all tests that do not break it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.running import Server


@pytest.fixture(scope="session")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(smollm2, tmp_path_factory.mktemp("server"), api_workers=1, max_model_len=2048)
    try:
        running.wait_ready()
        yield running
        assert running.process.poll() is None, running.log()
    finally:
        running.close()
