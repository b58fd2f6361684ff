"""The supervisor's decisions, on a clock that the test moves."""

import msgspec
import pytest

from mizzen.config.config import SupervisorConfig
from mizzen.ipc.messages import Beat, Drain, EngineInfo, Fatal, Health, Load, ModelInfo, PeerDown, Ready, Shutdown
from mizzen.supervisor.actions import Action, Exit, Kill, LastWords, Send, Spawn, WriteModel
from mizzen.supervisor.policy import Policy
from mizzen.supervisor.spec import Kind, ProcessSpec

CONFIG = SupervisorConfig(
    drain_timeout_s=30.0,
    heartbeat_timeout_s=10.0,
    download_timeout_s=20.0,
    load_timeout_s=30.0,
    profile_timeout_s=40.0,
    compile_timeout_s=50.0,
    capture_timeout_s=60.0,
    max_restarts=2,
    restart_window_s=100.0,
    termination_log=None,
)
MODEL = ModelInfo("/m", "/m", "m", "M", 10, 10, (0,))
ENGINE = EngineInfo(10, 4, 8, 16, 1)
KINDS: dict[str, Kind] = {
    "api-0": "api",
    "api-1": "api",
    "prepare": "prepare",
    "metrics": "metrics",
    "tokenizer-0": "tokenizer",
    "detokenizer": "detokenizer",
    "engine-0": "engine",
    "engine-1": "engine",
}
LATER = ["tokenizer-0", "detokenizer", "engine-0", "engine-1"]


class Simulation:
    """A policy with processes that do what they are told: a spawned one lives, a killed one is reaped at once."""

    def __init__(self, config: SupervisorConfig = CONFIG) -> None:
        specs = [ProcessSpec(name, kind, "engine" if kind == "engine" else name, ()) for name, kind in KINDS.items()]
        self.policy = Policy(specs, config)
        self.now = 1000.0
        self.log: list[Action] = []
        self.alive: set[str] = set()
        self.immortal: set[str] = set()
        self.silent: set[str] = set()
        self.progress = 0
        self.pending: set[str] = set()
        self.perform(self.policy.start(self.now))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            self.log.append(action)
            if isinstance(action, Spawn):
                assert action.name not in self.alive, "spawned twice"
                self.alive.add(action.name)
            elif isinstance(action, Kill) and action.name in self.alive - self.immortal:
                self.die(action.name, -9)

    def die(self, name: str, code: int) -> None:
        self.alive.discard(name)
        self.perform(self.policy.reaped(name, code, self.now))

    def receive(self, name: str, message: Beat | Ready | Fatal) -> None:
        self.perform(self.policy.receive(name, message, self.now))

    def run(self, seconds: float, *, beats: bool = True) -> None:
        """Ticks ten times a second; all that live, but for ``silent``, send a heartbeat."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.progress += 1
            for name in sorted(self.alive - self.silent) if beats else []:
                pending = name in self.pending
                self.receive(name, Beat("serve", pending=pending, progress=self.progress))
            self.perform(self.policy.tick(self.now))

    def serve(self) -> "Simulation":
        self.receive("prepare", Ready(model=MODEL))
        self.die("prepare", 0)
        self.ready(*(self.alive))
        assert self.health.ready
        self.run(1.0)
        self.take()
        return self

    def ready(self, *names: str) -> None:
        for name in sorted(names):
            self.receive(name, Ready(engine=ENGINE if name == "engine-0" else None))

    def take(self) -> list[Action]:
        log, self.log = self.log, []
        return [action for action in log if type(action).__name__ != "Log"]

    def interrupt(self) -> None:
        self.perform(self.policy.interrupt(self.now))

    @property
    def health(self) -> Health:
        return self.policy.health(self.now)

    @property
    def exit_code(self) -> int | None:
        return next((action.code for action in self.log if isinstance(action, Exit)), None)


def told(actions: list[Action]) -> set[tuple[str, str]]:
    return {(a.name, a.message.name) for a in actions if isinstance(a, Send) and isinstance(a.message, PeerDown)}


def spawned(actions: list[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Spawn)]


def test_the_api_starts_with_the_download_and_the_rest_after_it() -> None:
    service = Simulation()
    assert spawned(service.take()) == ["api-0", "api-1", "prepare", "metrics"]
    service.receive("prepare", Ready(model=MODEL))
    assert service.take() == [WriteModel(MODEL)]
    service.die("prepare", 0)
    assert spawned(service.take()) == LATER


def test_ready_needs_every_process() -> None:
    service = Simulation()
    service.receive("prepare", Ready(model=MODEL))
    service.die("prepare", 0)
    for name in ["api-0", "api-1", *LATER]:
        assert not service.health.ready
        assert not service.health.startup
        service.ready(name)
    assert service.health.ready
    assert service.health.startup
    assert service.health.phase == "serve"
    assert service.health.engine == ENGINE
    assert service.health.model == MODEL


def test_health_tells_the_loading_phase_and_its_seconds() -> None:
    service = Simulation()
    service.receive("prepare", Beat("download", fraction=0.5, detail="file 1"))
    service.now += 3.0
    health = service.health
    assert (health.phase, health.phase_s, health.fraction, health.detail) == ("download", 3.0, 0.5, "file 1")
    service.receive("prepare", Ready(model=MODEL))
    service.die("prepare", 0)
    service.receive("engine-0", Beat("capture", fraction=0.1))
    assert (service.health.phase, service.health.phase_s) == ("capture", 0.0)
    assert service.health.live


def test_the_phases_of_a_start_add_up_and_a_restart_counts_anew() -> None:
    service = Simulation()
    begin_s = service.now
    service.now += 2.0
    service.receive("prepare", Beat("download"))
    service.now += 3.0
    service.receive("prepare", Ready(model=MODEL))
    service.die("prepare", 0)
    for phase, seconds in (("start", 4.0), ("load", 5.0), ("capture", 6.0)):
        service.receive("engine-0", Beat(phase))  # type: ignore[arg-type]
        service.now += seconds
    service.ready(*LATER, "api-0", "api-1")
    assert service.policy.start_phases_s == {"start": 6.0, "download": 3.0, "load": 5.0, "capture": 6.0}
    assert sum(service.policy.start_phases_s.values()) == service.now - begin_s
    service.die("engine-0", 1)
    service.run(1.0, beats=False)
    service.receive("engine-0", Beat("capture"))
    service.now += 7.0
    service.ready("engine-0", "engine-1")
    assert service.health.ready
    assert service.policy.start_phases_s["capture"] == 7.0
    assert "download" not in service.policy.start_phases_s


@pytest.mark.parametrize("code", [-9, 0, 1])
def test_one_dead_rank_takes_the_engine_down_and_it_is_restarted_under_a_new_epoch(code: int) -> None:
    service = Simulation().serve()
    service.die("engine-1", code)
    actions = service.take()
    assert Kill("engine-0") in actions
    assert told(actions) == {("api-0", "engine"), ("api-1", "engine"), ("detokenizer", "engine")}
    assert service.health.live
    assert not service.health.ready
    assert service.health.epoch == 2
    service.run(0.2)
    assert service.take() == [Spawn("engine-0", 2), Spawn("engine-1", 2)]
    service.ready("engine-0", "engine-1")
    assert service.health.ready
    assert service.health.restarts == 1


def test_the_engine_is_not_restarted_before_all_its_ranks_are_gone() -> None:
    service = Simulation().serve()
    service.immortal.add("engine-0")
    service.die("engine-1", -9)
    service.run(5.0)
    assert spawned(service.take()) == []
    assert service.health.live
    service.run(6.0)
    assert not service.health.live, "a rank that not even SIGKILL ends cannot be cured in place"
    service.die("engine-0", -9)
    service.run(0.2)
    assert spawned(service.take()) == ["engine-0", "engine-1"]
    assert service.health.live


@pytest.mark.parametrize(
    ("name", "peers"),
    [
        ("tokenizer-0", {"api-0", "api-1"}),
        ("detokenizer", {"api-0", "api-1", "engine-0"}),
        ("api-1", {"engine-0", "detokenizer"}),
    ],
)
def test_the_death_of_one_process_is_told_to_its_peers_and_cured_alone(name: str, peers: set[str]) -> None:
    service = Simulation().serve()
    service.die(name, -11)
    service.run(0.3)
    actions = service.take()
    assert told(actions) == {(peer, name) for peer in peers}
    assert spawned(actions) == [name]
    assert service.health.epoch == 1


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [("download", 20), ("load", 30), ("profile", 40), ("compile", 50), ("capture", 60), ("serve", 10), ("start", 30)],
)
def test_each_phase_has_its_own_heartbeat_deadline(phase: str, limit_s: float) -> None:
    service = Simulation().serve()
    service.silent.add("detokenizer")
    service.receive("detokenizer", Beat(phase))  # type: ignore[arg-type]
    service.run(limit_s - 0.2)
    assert Kill("detokenizer") not in service.take()
    service.run(0.5)
    assert Kill("detokenizer") in service.take()


def test_a_ready_process_has_the_deadline_of_serving_though_it_sent_no_heartbeat_yet() -> None:
    service = Simulation()
    service.receive("prepare", Ready(model=MODEL))
    service.die("prepare", 0)
    service.ready("detokenizer")
    service.silent.add("detokenizer")
    service.run(10.2)
    assert Kill("detokenizer") in service.take()


def test_pending_work_without_progress_is_a_hang_though_heartbeats_come() -> None:
    service = Simulation().serve()
    service.silent.add("engine-0")
    for _ in range(98):
        service.receive("engine-0", Beat("serve", pending=True, progress=7))
        service.run(0.1)
    assert service.take() == []
    for _ in range(5):
        service.receive("engine-0", Beat("serve", pending=True, progress=7))
        service.run(0.1)
    assert Kill("engine-0") in service.take()


def test_a_load_longer_than_the_deadline_of_serving_is_no_standstill_when_it_ends() -> None:
    service = Simulation().serve()
    service.die("engine-0", 1)
    service.silent |= {"engine-0", "engine-1"}  # they speak for themselves
    service.run(5.0)
    for _ in range(120):  # a minute of loading, whose beats say that there is work
        for name in service.silent:
            service.receive(name, Beat("compile", pending=True))
        service.run(0.5)
    service.ready(*service.silent)
    service.take()
    service.run(0.3)  # the supervisor looks before the first beat of serving
    assert service.health.ready
    assert not service.take()


def test_saturation_and_idleness_are_no_hang() -> None:
    service = Simulation().serve()
    service.pending.add("engine-0")  # always pending, always moving
    service.silent.add("engine-1")
    for _ in range(600):
        service.receive("engine-1", Beat("serve", pending=False, progress=7))
        service.run(0.1)
    assert service.take() == []
    assert service.health.live


def test_an_api_worker_whose_clients_wait_is_not_hung() -> None:
    service = Simulation().serve()
    service.silent.add("api-0")
    for _ in range(600):
        service.receive("api-0", Beat("serve", pending=True, progress=7))
        service.run(0.1)
    assert service.take() == []


def test_time_in_which_the_supervisor_itself_was_stopped_does_not_count() -> None:
    service = Simulation().serve()
    service.now += 500.0
    service.perform(service.policy.tick(service.now))
    assert service.take() == []
    service.run(11.0, beats=False)
    assert [action for action in service.take() if isinstance(action, Kill)]


def test_restarts_back_off_and_over_the_budget_the_service_gives_up() -> None:
    service = Simulation().serve()
    for delay_s in (0.0, 1.0):
        service.die("engine-0", -9)
        if delay_s:
            service.run(delay_s - 0.1)
            assert spawned(service.take()) == []
        service.run(0.3)
        assert spawned(service.take()) == ["engine-0", "engine-1"]
    assert service.health.live
    service.die("engine-0", -9)
    actions = service.take()
    [words] = [action for action in actions if isinstance(action, LastWords)]
    assert words.exit_code == 1
    assert "engine-0 was killed by SIGKILL" in words.message
    assert "MIZZEN_MAX_RESTARTS" in words.message
    assert not service.health.live
    service.run(3.0)
    assert service.exit_code == 1
    assert not service.alive


def test_failures_outside_the_window_are_forgotten() -> None:
    service = Simulation().serve()
    for _ in range(6):
        service.die("engine-0", -9)
        service.run(60.0)
    assert service.exit_code is None
    assert service.health.restarts == 6


def test_each_group_has_its_own_budget() -> None:
    service = Simulation().serve()
    for name in ("engine-0", "api-0", "tokenizer-0", "detokenizer", "api-1") * 2:
        service.die(name, -9)
        service.run(1.2)
    assert service.exit_code is None


@pytest.mark.parametrize("says", [True, False])
def test_a_configuration_error_is_never_retried(says: bool) -> None:
    service = Simulation()
    if says:
        service.receive("prepare", Fatal(78, "MIZZEN_MODEL: there is no folder /m"))
    service.die("prepare", 78)
    [words] = [action for action in service.take() if isinstance(action, LastWords)]
    assert words.exit_code == 78
    assert ("MIZZEN_MODEL" in words.message) == says
    service.run(3.0)
    assert service.exit_code == 78
    assert spawned(service.take()) == []


def test_a_failed_download_is_tried_again() -> None:
    service = Simulation()
    service.take()
    service.receive("prepare", Fatal(1, "prepare: no network"))
    service.run(0.3)
    assert spawned(service.take()) == ["prepare"]


def test_messages_of_a_process_that_was_killed_are_not_heard() -> None:
    service = Simulation().serve()
    service.immortal |= {"engine-0", "engine-1"}
    service.receive("engine-1", Fatal(1, "engine-1: out of memory"))
    service.ready("engine-0", "engine-1")
    service.receive("engine-0", Fatal(1, "too late"))
    assert not service.health.ready
    assert service.exit_code is None


@pytest.mark.parametrize("says", [True, False])
def test_a_configuration_error_of_one_rank_counts_though_another_s_failure_was_heard_first(says: bool) -> None:
    service = Simulation().serve()
    service.immortal |= {"engine-0", "engine-1"}
    service.receive("engine-1", Fatal(1, "engine-1: the ranks lost each other"))
    if says:
        service.receive("engine-0", Fatal(78, "MIZZEN_MEMORY_FRACTION is too small"))
    service.immortal.clear()
    service.die("engine-0", 78)
    service.die("engine-1", 1)
    service.run(3.0)
    assert service.exit_code == 78


def test_a_drain_waits_for_requests_in_flight_and_ends_with_0() -> None:
    service = Simulation().serve()
    service.pending |= {"api-1", "engine-0"}
    service.interrupt()
    sent = [action for action in service.take() if isinstance(action, Send)]
    assert {(action.name, type(action.message)) for action in sent} == {
        (name, Drain) for name in ("api-0", "api-1", "engine-0")
    }
    assert service.health.draining
    assert not service.health.ready
    assert service.health.live
    service.run(10.0)
    assert service.take() == []
    service.pending.clear()
    service.run(0.5)
    assert [action for action in service.log if isinstance(action, Send) and isinstance(action.message, Shutdown)]
    service.run(2.1)
    assert service.exit_code == 0
    assert not service.alive


def test_a_drain_ends_at_its_deadline() -> None:
    service = Simulation().serve()
    service.pending.add("api-0")
    service.interrupt()
    service.run(29.0)
    assert service.exit_code is None
    service.run(3.5)
    assert service.exit_code == 0


def test_a_process_that_dies_in_a_drain_is_told_of_but_not_restarted() -> None:
    service = Simulation().serve()
    service.pending.add("api-0")
    service.interrupt()
    service.take()
    service.die("engine-0", -9)
    service.run(5.0)
    actions = service.take()
    assert ("api-0", "engine") in told(actions)
    assert spawned(actions) == []
    service.pending.clear()
    service.run(3.0)
    assert service.exit_code == 0


def test_a_second_signal_ends_at_once() -> None:
    service = Simulation().serve()
    service.pending.add("api-0")
    service.interrupt()
    service.interrupt()
    assert service.exit_code == 0
    assert not service.alive


def test_a_signal_while_loading_ends_without_waiting_for_the_load() -> None:
    service = Simulation()
    service.receive("prepare", Ready(model=MODEL))
    service.die("prepare", 0)
    service.ready("api-0", "api-1")
    service.interrupt()
    service.run(3.0)
    assert service.exit_code == 0


def test_the_load_of_a_dead_engine_is_not_shown() -> None:
    service = Simulation().serve()
    service.receive("engine-0", Beat("serve", load=Load(running=3)))
    assert service.health.load.running == 3
    service.die("engine-0", -9)
    assert service.health.load.running == 0
    assert service.health.engine is None


def test_no_restarts_allowed_means_the_first_death_ends_the_service() -> None:
    service = Simulation(msgspec.structs.replace(CONFIG, max_restarts=0)).serve()
    service.die("tokenizer-0", -9)
    service.run(3.0)
    assert service.exit_code == 1


# ---- the metrics process ----


def test_the_service_is_ready_without_the_metrics_process() -> None:
    simulation = Simulation().serve()
    simulation.die("metrics", -9)
    assert simulation.health.ready
    assert told(simulation.take()) == set()
    simulation.run(1.0)
    assert "metrics" in simulation.alive
    assert simulation.health.restarts == simulation.policy.restarts["metrics"] == 1


def test_a_metrics_process_that_always_fails_does_not_end_the_service() -> None:
    simulation = Simulation().serve()
    for _ in range(CONFIG.max_restarts + 5):
        simulation.die("metrics", 1)
        simulation.run(31.0)  # longer than any backoff
        assert "metrics" in simulation.alive
    assert simulation.health.ready
    assert simulation.exit_code is None
