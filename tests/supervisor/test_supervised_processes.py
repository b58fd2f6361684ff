"""The supervisor over toy processes that fail, hang and die: what clients, orchestrators and the machine see of it."""

import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_service import MODES, Service, until

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a service; at the end none may leave a process or a run directory."""
    services: list[Service] = []

    def start(modes: dict[str, str] | None = None, **options: Any) -> Service:
        services.append(Service(tmp_path_factory.mktemp("s"), modes, **options))
        return services[-1]

    yield start
    for service in services:
        service.close()


def test_all_processes_come_up_and_sigterm_ends_them_with_0(start: Start) -> None:
    service = start().wait_ready()
    assert service.health("live")[0] == service.health("startup")[0] == 200
    assert {process: "done" if process == "prepare" else "ready" for process in MODES} == service.health()[1][
        "processes"
    ]
    [run_dir] = service.run_dirs()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((run_dir / "config.json").stat().st_mode) == 0o600
    assert json.loads((run_dir / "model.json").read_text())["name"] == "toy"
    service.send(signal.SIGTERM)
    assert service.wait() == 0
    service.assert_nothing_left()
    for name in MODES:
        if name != "prepare":
            assert service.heard(name, "shutdown")
    assert not service.termination_log.exists()


def test_sigusr1_turns_debugging_on_in_every_process_and_off_again(start: Start) -> None:
    service = start().wait_ready()
    children = [name for name in MODES if name != "prepare"]

    def levels(name: str) -> list[str]:
        return [event["level"] for event in service.heard(name, "level")]

    service.send(signal.SIGUSR1)
    until(lambda: all(levels(name) == ["DEBUG"] for name in children), "debugging")
    service.kill("tokenizer-0")
    until(lambda: levels("tokenizer-0") == ["DEBUG", "DEBUG"], "debugging after a restart")
    service.send(signal.SIGUSR1)
    until(lambda: all(levels(name)[-1] == "INFO" for name in children), "the level of the settings")
    assert [line["to"] for line in service.log() if line["message"] == "log level changed"] == ["debug", "info"]
    service.wait_ready()


def test_the_api_port_is_open_and_live_is_200_while_the_engine_loads(start: Start) -> None:
    service = start({"engine-0": "slow"})
    status, body = until(
        lambda: (h := service.health())[1].get("phase") == "load" and h[1]["fraction"] and h, "the load"
    )
    assert status == 503
    assert body["detail"] == "layer"
    assert service.health("live")[0] == 200
    assert service.health("startup")[0] == 503
    socket.create_connection(("127.0.0.1", service.port), timeout=5).close()
    service.wait_ready()
    phases = [event["phase"] for event in service.heard("api-0", "health")]
    assert phases.index("load") < phases.index("serve")
    said = [(line["message"], line["phase"], line["done"]) for line in service.log() if "done" in line]
    assert said, "what takes long is seen in the log"
    assert {(message, phase) for message, phase, _ in said} == {("layer", "load")}
    assert len(said) < 10  # of 20 beats: one an interval
    assert len({done for _, _, done in said}) == len(said)


def test_a_killed_engine_is_restarted_in_place_and_its_peers_are_told(start: Start) -> None:
    service = start().wait_ready()
    api, rank = service.pid("api-0"), service.pid("engine-0")
    service.kill("engine-1")
    until(lambda: len(service.starts("engine-1")) == 2, "the restart")
    service.wait_ready()
    assert not psutil.pid_exists(rank), "the other rank was restarted too"
    assert [event["epoch"] for event in service.starts("engine-0")] == [1, 2]
    assert [event["peer"] for event in service.heard("api-0", "peer down")] == ["engine"]
    assert [event["peer"] for event in service.heard("detokenizer", "peer down")] == ["engine"]
    assert service.pid("api-0") == api
    assert service.health()[1]["restarts"] == 1


@pytest.mark.parametrize("name", ["api-0", "tokenizer-0", "detokenizer"])
def test_any_other_killed_process_is_restarted_alone(start: Start, name: str) -> None:
    service = start().wait_ready()
    engine = service.pid("engine-0")
    service.kill(name)
    until(lambda: len(service.starts(name)) == 2, "the restart")
    service.wait_ready()
    assert service.pid("engine-0") == engine
    hearer = "engine-0" if name != "tokenizer-0" else "api-0"
    assert [event["peer"] for event in service.heard(hearer, "peer down")] == [name]


@pytest.mark.slow
def test_a_stopped_process_is_noticed_and_cured(start: Start) -> None:
    service = start(heartbeat_timeout_s=3.0).wait_ready()
    service.kill("engine-0", signal.SIGSTOP)
    until(lambda: len(service.starts("engine-0")) == 2, "the restart")
    service.wait_ready()
    assert any("MIZZEN_HEARTBEAT_TIMEOUT_S" in entry.get("reason", "") for entry in service.log())


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "profile", "compile", "capture", "serve"])
def test_a_hang_in_any_phase_ends_in_giving_up(start: Start, phase: str) -> None:
    deadline = "heartbeat" if phase == "serve" else phase
    # Long enough for the healthy processes on a busy machine: load's deadline is also that of their start.
    service = start({"engine-0": f"hang:{phase}"}, max_restarts=0, **{f"{deadline}_timeout_s": 5.0})
    assert service.wait() == 1
    assert f"'{phase}' (MIZZEN_{deadline.upper()}_TIMEOUT_S)" in service.termination_log.read_text()


def test_a_hanging_download_ends_in_giving_up(start: Start) -> None:
    service = start({"prepare": "hang:download"}, max_restarts=0, download_timeout_s=1.0)
    assert service.wait() == 1
    assert "MIZZEN_DOWNLOAD_TIMEOUT_S" in service.termination_log.read_text()


@pytest.mark.slow
def test_an_engine_with_work_and_no_progress_is_restarted(start: Start) -> None:
    service = start({"engine-0": "stall"}, heartbeat_timeout_s=3.0)
    until(lambda: len(service.starts("engine-0")) == 2, "the restart")
    assert any("no progress" in entry.get("reason", "") for entry in service.log())


def test_a_boot_failure_is_retried_and_cured(start: Start) -> None:
    service = start({"engine-0": "fail-once", "tokenizer-0": "fail-once"}).wait_ready()
    assert len(service.starts("engine-0")) == len(service.starts("tokenizer-0")) == 2


def test_repeated_failure_gives_up_with_1_and_one_line(start: Start) -> None:
    service = start({"engine-0": "fail"}, max_restarts=1)
    assert service.wait() == 1
    assert len(service.starts("engine-0")) == 2
    [line] = service.termination_log.read_text().splitlines()
    assert "the toy is broken" in line
    assert [entry for entry in service.log() if entry["message"] == line and entry["exit_code"] == 1]


@pytest.mark.parametrize("name", ["prepare", "engine-0", "api-0"])
def test_a_configuration_error_is_not_retried_and_ends_with_78_and_one_line(start: Start, name: str) -> None:
    service = start({name: "config"})
    assert service.wait() == 78
    assert len(service.starts(name)) == 1
    assert service.termination_log.read_text() == "MIZZEN_MODEL: there is no folder /nowhere\n"
    assert "Traceback" not in service.stderr_path.read_text()
    assert '"exception"' not in service.stderr_path.read_text()


def test_a_silent_exit_with_78_is_a_configuration_error_too(start: Start) -> None:
    service = start({"engine-0": "exit78"})
    assert service.wait() == 78
    assert "engine-0" in service.termination_log.read_text()


def test_sigterm_lets_requests_in_flight_finish(start: Start) -> None:
    service = start({"api-0": "busy", "engine-0": "busy"}).wait_ready()
    service.send(signal.SIGTERM)
    status, _ = until(lambda: (h := service.health())[1].get("draining") and h, "the drain")
    assert status == 503
    assert service.health("live")[0] in (200, 0)
    assert service.wait() == 0
    events = [event["event"] for event in service.events("api-0") if event["event"] != "health"]
    assert events == ["start", "drain", "shutdown"]
    assert not any("drain timeout" in entry["message"] for entry in service.log())


def test_a_drain_has_a_deadline_and_a_deaf_process_is_killed(start: Start) -> None:
    service = start({"api-0": "stall", "detokenizer": "deaf"}, drain_timeout_s=1.0).wait_ready()
    service.send(signal.SIGINT)
    assert service.wait() == 0
    assert any("drain timeout" in entry["message"] for entry in service.log())
    assert service.heard("detokenizer", "shutdown")


def test_a_second_signal_does_not_wait_for_the_drain(start: Start) -> None:
    service = start({"api-0": "stall"}, drain_timeout_s=3600.0).wait_ready()
    service.send(signal.SIGINT)
    until(lambda: service.heard("api-0", "drain"), "the drain")
    service.send(signal.SIGINT)
    assert service.wait() == 0


def test_nothing_outlives_a_killed_supervisor(start: Start) -> None:
    service = start({"engine-0": "grandchild"}).wait_ready()
    grandchild = until(lambda: service.heard("engine-0", "grandchild"), "the grandchild")[0]["grandchild"]
    assert psutil.pid_exists(grandchild)
    assert len(service.family()) >= 7
    service.send(signal.SIGKILL)
    service.wait()
    service.assert_nothing_left()


def test_nothing_outlives_a_supervisor_killed_while_a_child_is_stopped(start: Start) -> None:
    service = start().wait_ready()
    service.kill("engine-0", signal.SIGSTOP)
    service.send(signal.SIGKILL)
    service.wait()
    service.assert_nothing_left()


def test_a_killed_guard_is_replaced_and_does_its_duty(start: Start) -> None:
    service = start({"engine-0": "grandchild"}).wait_ready()
    guard = until(service.guard, "the guard")
    guard.kill()
    until(lambda: (now := service.guard()) is not None and now.pid != guard.pid, "a new guard")
    assert service.ready()
    service.send(signal.SIGKILL)
    service.wait()
    service.assert_nothing_left()


def test_a_restarted_process_leaves_no_grandchild(start: Start) -> None:
    service = start({"engine-0": "grandchild"}).wait_ready()
    grandchild = until(lambda: service.heard("engine-0", "grandchild"), "the grandchild")[0]["grandchild"]
    service.kill("engine-0")
    until(lambda: not psutil.pid_exists(grandchild), "the grandchild to be gone")
    until(lambda: len(service.starts("engine-0")) == 2, "the restart")


@pytest.mark.parametrize(("taken", "setting"), [("port", "MIZZEN_PORT"), ("health_port", "MIZZEN_HEALTH_PORT")])
def test_a_taken_port_is_one_line_and_78(start: Start, taken: str, setting: str) -> None:
    first = start()
    until(lambda: first.health()[0], "the first service")
    second = start(ports={taken: getattr(first, taken)})
    assert second.wait() == 78
    [line] = second.stderr_path.read_text().splitlines()
    assert line.startswith(setting)
    assert "taken" in line


def test_children_are_told_nothing_by_the_environment(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIZZEN_API_KEYS", "secret-key")
    service = start().wait_ready()
    environment = Path(f"/proc/{service.pid('engine-0')}/environ").read_bytes()
    assert b"secret-key" not in environment
    assert "secret-key" not in service.stderr_path.read_text()
    assert os.environ["MIZZEN_API_KEYS"] == "secret-key"
