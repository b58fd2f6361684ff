"""The CPU image, built once for all tests of it, as a person would build it."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from containers.docker_host import IMAGE, REPOSITORY, Container, docker

BUILD_TIMEOUT_S = 900


@pytest.fixture(scope="session")
def image() -> str:
    docker("version")
    build = ["make", "image-cpu", f"CPU_IMAGE={IMAGE}"]
    done = subprocess.run(
        build, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return IMAGE


Start = Callable[..., Container]


@pytest.fixture
def start(image: str) -> Iterator[Start]:
    """Starts containers that are removed when the test is over."""
    with ExitStack() as stack:

        def start(*options: str, **settings: Any) -> Container:
            container = Container(*options, **settings)
            stack.callback(container.remove)
            return container

        yield start
