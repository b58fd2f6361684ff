"""Fixtures that start the api process; see api_service.py and fake_backend.py."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_service import MakeService, Service, make_config
from fake_backend import FakeBackend


@pytest.fixture
def make_service() -> Iterator[MakeService]:
    """Starts services: keywords of the backend's are ``backend``, the others are ServerConfig's."""
    with contextlib.ExitStack() as stack:

        def make(
            *, tokenizers: int = 1, backend: dict[str, Any] | None = None, ready: bool = True, **server: Any
        ) -> Any:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mz-")))
            fake = FakeBackend(run_dir, tokenizers, **(backend or {}))
            stack.callback(fake.close)
            service = Service(make_config(tokenizers=tokenizers, **server), fake)
            stack.callback(service.stop)
            if ready:
                service.become()
            return service

        yield make


@pytest.fixture
def service(make_service: MakeService) -> Service:
    return make_service()
