"""MIZZEN_ENGINE_CPUS pins the engine's main thread to a core, and no other thread."""

import contextlib
import os
from pathlib import Path

import pytest

from service.running import Server
from tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_only_the_engine_s_main_thread_is_pinned(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    model = make_tiny_model(tmp_path / "tiny", max_position_embeddings=512)
    server = Server(model, tmp_path, engine_cpus=core)
    with contextlib.closing(server):
        server.wait_ready()
        engine = next(pid for name, pid in server.pids().items() if name.startswith("engine"))
        others = [int(name) for name in os.listdir(f"/proc/{engine}/task") if int(name) != engine]
        assert os.sched_getaffinity(engine) == {core}
        assert others
        assert all(os.sched_getaffinity(thread) == allowed for thread in others)
