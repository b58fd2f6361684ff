"""Fixtures that start the api process; see api_service.py and fake_backend.py."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
from api_service import MakeService, Service, start_service


@pytest.fixture
def make_service() -> Iterator[MakeService]:
    """Starts services that end with the test; takes what ``start_service`` takes."""
    with contextlib.ExitStack() as stack:
        yield functools.partial(start_service, stack)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service that a module's tests share: each must leave it as it was."""
    with contextlib.ExitStack() as stack:
        yield start_service(stack)
