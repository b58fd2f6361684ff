"""Who runs, who is dead, what follows: a state machine without processes, sockets or clocks.

Every method takes the time and returns actions in the order in which they must happen. A group (all engine ranks, or
one other process) is restarted whole: none of it runs again before all of it is gone. A restart counts against the
group's budget; over the budget, or at a configuration error, the service ends. Only the metrics process is different:
the service is ready without it, and does not end because of it.
"""

import signal
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from mizzen.config.config import SupervisorConfig
from mizzen.errors import EXIT_CONFIG, EXIT_FAILED
from mizzen.ipc.messages import (
    Beat,
    Drain,
    EngineInfo,
    Fatal,
    Health,
    Load,
    ModelInfo,
    PeerDown,
    Phase,
    Ready,
    Shutdown,
    ToSupervisor,
)
from mizzen.supervisor.actions import Action, Exit, Kill, LastWords, Log, Send, Spawn, WriteModel
from mizzen.supervisor.spec import FIRST, Kind, ProcessSpec

SHUTDOWN_GRACE_S = 2.0  # between Shutdown and SIGKILL
MAX_BACKOFF_S = 30.0
# A beat this long after the drain began was made by a process that knows of it.
DRAIN_SETTLE_S = 0.3
# A restarted process is told from the one before by time alone: what that one still had in the socket is read first.
SETTLE_S = 0.05
FREEZE_S = 1.0  # a longer gap between ticks: this process was stopped, and what it did not read is no one's fault

State = Literal["waiting", "starting", "ready", "down", "done"]
Stage = Literal["run", "drain", "stop", "exited"]


@dataclass(slots=True)
class Process:
    spec: ProcessSpec
    state: State = "waiting"
    alive: bool = False  # spawned and not reaped
    phase: Phase = "start"
    beat: Beat | None = None
    beat_s: float = 0.0  # last sign of life
    progress_s: float = 0.0  # since when its pending work has stood still
    last_words: str = ""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def kind(self) -> Kind:
        return self.spec.kind


@dataclass(slots=True)
class Group:
    name: str
    members: list[Process] = field(default_factory=list)
    failures: deque[float] = field(default_factory=deque)  # times, within the window
    respawn_s: float | None = None
    killed_s: float | None = None  # set from the kill until all members are reaped
    started_s: float = 0.0
    restarts: int = 0

    @property
    def alive(self) -> bool:
        return any(process.alive for process in self.members)


class Policy:
    """``start`` once, then ``receive``, ``reaped``, ``interrupt`` and ``tick`` as things happen, until an Exit."""

    def __init__(self, specs: Iterable[ProcessSpec], config: SupervisorConfig) -> None:
        self._config = config
        self._processes = {spec.name: Process(spec) for spec in specs}
        self._groups: dict[str, Group] = {}
        for process in self._processes.values():
            self._groups.setdefault(process.spec.group, Group(process.spec.group)).members.append(process)
        self._deadlines: dict[Phase, tuple[float, str]] = {
            "start": (config.load_timeout_s, "MIZZEN_LOAD_TIMEOUT_S"),
            "download": (config.download_timeout_s, "MIZZEN_DOWNLOAD_TIMEOUT_S"),
            "load": (config.load_timeout_s, "MIZZEN_LOAD_TIMEOUT_S"),
            "profile": (config.profile_timeout_s, "MIZZEN_PROFILE_TIMEOUT_S"),
            "compile": (config.compile_timeout_s, "MIZZEN_COMPILE_TIMEOUT_S"),
            "capture": (config.capture_timeout_s, "MIZZEN_CAPTURE_TIMEOUT_S"),
            "serve": (config.heartbeat_timeout_s, "MIZZEN_HEARTBEAT_TIMEOUT_S"),
            "drain": (config.heartbeat_timeout_s, "MIZZEN_HEARTBEAT_TIMEOUT_S"),
        }
        self._stage: Stage = "run"
        self._stage_s = 0.0  # when the stage began
        self._stop_s = 0.0  # drain or stop: when it is over
        self._exit_code = 0
        self._epoch = 1
        self._started = False  # has served once
        self._failed = False  # gave up
        self._model: ModelInfo | None = None
        self._engine: EngineInfo | None = None
        self._phase: Phase = "start"
        self._phase_s = 0.0
        self.start_phases_s: dict[Phase, float] = {}  # the phases of the last start, or restart, and how long they took
        self.engine_load_s = 0.0  # how long the engine took last time, from start to ready
        self._tick_s: float | None = None
        self._out: list[Action] = []

    # ---- events ----

    def start(self, now: float) -> list[Action]:
        self._phase_s = self._stage_s = now
        for group in self._groups.values():
            if group.members[0].kind in FIRST:
                self._spawn(group, now)
        return self._take(now)

    def receive(self, name: str, message: ToSupervisor, now: float) -> list[Action]:
        """``message`` came from the process ``name``, which must be the one running under this name now."""
        process = self._processes.get(name)
        if process is None or not process.alive:
            return []
        # A rank that is wrongly configured takes its group along, and may be heard after those it took.
        configuration = isinstance(message, Fatal) and message.exit_code == EXIT_CONFIG
        if process.state == "down" and not configuration:
            return []
        process.beat_s = now
        if isinstance(message, Beat):
            self._beat(process, message, now)
        elif isinstance(message, Ready):
            self._ready(process, message, now)
        elif isinstance(message, Fatal):
            process.last_words = message.message
            if message.exit_code == EXIT_CONFIG:
                self._stop(EXIT_CONFIG, message.message, now)
            elif self._stage != "stop":
                self._fail(process, message.message, now)
        return self._take(now)

    def reaped(self, name: str, exit_code: int, now: float) -> list[Action]:
        """The process is gone. ``exit_code`` is negative for a signal, as in subprocess."""
        process = self._processes[name]
        process.alive = False
        if self._stage != "stop" and exit_code == EXIT_CONFIG:
            self._stop(EXIT_CONFIG, process.last_words or f"{name}: configuration error, see the log", now)
        elif self._stage != "stop" and process.state != "down":
            if process.kind == "prepare" and exit_code == 0 and self._model is not None:
                process.state = "done"
                for group in self._groups.values():
                    if group.members[0].kind not in FIRST and self._stage == "run":
                        self._spawn(group, now)
            else:
                self._fail(process, _how_it_ended(exit_code), now)
        if process.state != "done":
            process.state = "down"
        return self._take(now)

    def interrupt(self, now: float) -> list[Action]:
        """SIGTERM or SIGINT: the first drains, the second ends at once."""
        if self._stage == "run":
            self._log("info", "draining", timeout_s=self._config.drain_timeout_s)
            self._stage, self._stage_s = "drain", now
            self._stop_s = now + self._config.drain_timeout_s
            for process in self._processes.values():
                if process.kind == "api" or process.name == "engine-0":
                    self._send(process, Drain(self._stop_s))
        elif self._stage == "drain":
            self._stop(0, "", now)
            self._stop_s = now
        else:
            self._stop_s = now
        return self._take(now)

    def tick(self, now: float) -> list[Action]:
        """To be called every 0.1 s or so: deadlines and restarts that are due."""
        if self._tick_s is not None and (gap := now - self._tick_s) > FREEZE_S:
            for process in self._processes.values():
                process.beat_s = min(now, process.beat_s + gap)
                process.progress_s = min(now, process.progress_s + gap)
        self._tick_s = now
        if self._stage != "stop":
            for process in self._processes.values():
                if process.alive and process.state != "down" and (why := self._hung(process, now)):
                    self._fail(process, why, now)
        for group in self._groups.values():
            if group.killed_s is not None and not group.alive:
                group.killed_s = None
            due = group.respawn_s is not None and now >= group.respawn_s
            if due and not group.alive and self._stage == "run":
                self._spawn(group, now)
        if self._stage == "drain":
            drained = self._drained()
            if not drained and now >= self._stop_s:
                self._log("warning", "drain timeout: requests in flight are ended")
            if drained or now >= self._stop_s:
                self._stop(0, "", now)
        return self._take(now)

    # ---- queries ----

    def health(self, now: float) -> Health:
        """The snapshot that health answers come from."""
        source = self._slowest()
        beat = source.beat if source is not None else None
        engine = self._processes.get("engine-0")
        ready = self._all_ready() and self._stage == "run"
        # SIGKILL that does not kill (a process stuck in a driver) is what a restart in place cannot cure.
        stuck = any(
            group.killed_s is not None and now - group.killed_s > self._config.heartbeat_timeout_s
            for group in self._groups.values()
        )
        return Health(
            startup=self._started,
            live=not self._failed and not stuck,
            ready=ready,
            phase=self._phase,
            phase_s=now - self._phase_s,
            detail=(beat.detail if beat is not None else "") if not ready else "",
            fraction=beat.fraction if beat is not None and not ready else None,
            draining=self._stage != "run",
            epoch=self._epoch,
            model=self._model,
            engine=self._engine,
            load=(engine.beat.load if engine and engine.beat else None) or Load(),
            processes={process.name: self._shown_state(process) for process in self._processes.values()},
            restarts=sum(self.restarts.values()),
            retry_after_s=self._retry_after(now),
        )

    @property
    def running(self) -> list[str]:
        return [process.name for process in self._processes.values() if process.alive]

    @property
    def restarts(self) -> dict[str, int]:
        """By group, so far."""
        return {group.name: group.restarts for group in self._groups.values()}

    def heartbeat_ages_s(self, now: float) -> dict[str, float]:
        """Of the processes that run: time since their last sign of life."""
        return {process.name: now - process.beat_s for process in self._processes.values() if process.alive}

    # ---- transitions ----

    def _beat(self, process: Process, beat: Beat, now: float) -> None:
        last = process.beat
        if not beat.pending or last is None or not last.pending or last.progress != beat.progress:
            process.progress_s = now
        process.beat, process.phase = beat, beat.phase

    def _ready(self, process: Process, message: Ready, now: float) -> None:
        if process.kind == "prepare":
            if message.model is not None:
                self._model = message.model
                self._out.append(WriteModel(message.model))
            return
        process.state, process.phase, process.progress_s = "ready", "serve", now  # a load counts as no standstill
        if message.engine is not None:
            self._engine = message.engine
        group = self._groups[process.spec.group]
        if all(member.state == "ready" for member in group.members):
            seconds = now - group.started_s
            self._log("info", "ready", name=group.name, seconds=round(seconds, 2))
            if process.kind == "engine":
                self.engine_load_s = seconds

    def _fail(self, process: Process, why: str, now: float) -> None:
        """``process`` died or must die: its group goes, peers hear of it, a restart is planned or the service ends."""
        group = self._groups[process.spec.group]
        reason = f"{process.name} {why}" if not why.startswith(process.name) else why
        self._log("error", "process failed", name=process.name, reason=reason)
        for member in group.members:
            if member.alive:
                self._out.append(Kill(member.name))
            member.state, member.beat = "down", None
        group.killed_s = now
        self._tell_peers(process.kind, group.name)
        if process.kind == "engine":
            self._epoch += 1
            self._engine = None
        if self._stage != "run":
            return
        group.failures.append(now)
        while group.failures[0] <= now - self._config.restart_window_s:
            group.failures.popleft()
        if len(group.failures) > self._config.max_restarts and process.kind != "metrics":
            self._failed = True
            window = f"MIZZEN_MAX_RESTARTS={self._config.max_restarts} in {self._config.restart_window_s:g} s"
            self._stop(
                EXIT_FAILED, f"{group.name} failed {len(group.failures)} times ({window}); at last: {reason}", now
            )
            return
        group.restarts += 1
        group.respawn_s = now + max(SETTLE_S, _backoff(len(group.failures)))

    def _tell_peers(self, kind: Kind, group: str) -> None:
        told: dict[Kind, tuple[Kind, ...]] = {
            "engine": ("api", "detokenizer"),
            "tokenizer": ("api",),
            "detokenizer": ("api", "engine"),
            "api": ("detokenizer", "engine"),
            "prepare": (),
            "metrics": (),
        }
        for peer in self._processes.values():
            if peer.kind in told[kind] and (peer.kind != "engine" or peer.name == "engine-0"):
                self._send(peer, PeerDown(group))

    def _stop(self, exit_code: int, message: str, now: float) -> None:
        if self._stage in ("stop", "exited"):
            return
        self._stage, self._stage_s, self._stop_s = "stop", now, now + SHUTDOWN_GRACE_S
        self._exit_code = exit_code
        if message:
            self._failed = True
            self._out.append(LastWords(message, exit_code))
        for process in self._processes.values():
            self._send(process, Shutdown())

    def _spawn(self, group: Group, now: float) -> None:
        group.respawn_s, group.started_s = None, now
        for process in group.members:
            process.state, process.alive, process.phase = "starting", True, "start"
            process.beat, process.last_words = None, ""
            process.beat_s = process.progress_s = now
            self._out.append(Spawn(process.name, self._epoch))

    def _send(self, process: Process, message: Drain | PeerDown | Shutdown) -> None:
        if process.alive and process.state != "down":
            self._out.append(Send(process.name, message))

    def _log(self, level: str, event: str, **fields: object) -> None:
        self._out.append(Log(level, event, fields))

    def _take(self, now: float) -> list[Action]:
        """Closes an event: the overall phase follows the processes, and the end follows the last of them."""
        if self._all_ready():
            self._started = True
        phase = self._overall_phase()
        if phase != self._phase:
            if self._phase == "serve":
                self.start_phases_s = {}
            else:
                self.start_phases_s[self._phase] = self.start_phases_s.get(self._phase, 0.0) + now - self._phase_s
            self._phase, self._phase_s = phase, now
        if self._stage == "stop":
            if now >= self._stop_s:
                self._out += [Kill(name) for name in self.running]
                self._stop_s = now + 1.0  # again, should one have been missed
            if not self.running:
                self._stage = "exited"
                self._out.append(Exit(self._exit_code))
        out, self._out = self._out, []
        return out

    # ---- what the state means ----

    def _hung(self, process: Process, now: float) -> str:
        limit_s, setting = self._deadlines[process.phase]
        if now - process.beat_s > limit_s:
            return f"sent no heartbeat for {limit_s:g} s in phase '{process.phase}' ({setting})"
        # An api worker's progress is its clients': one that does not read, or waits its turn, is not its fault.
        pending = process.beat is not None and process.beat.pending and process.phase in ("serve", "drain")
        if pending and process.kind != "api" and now - process.progress_s > limit_s:
            return f"had work but made no progress for {limit_s:g} s ({setting})"
        return ""

    def _drained(self) -> bool:
        """No request is in flight, said by everyone after the drain began."""
        for process in self._processes.values():
            if not process.alive or (process.kind != "api" and process.name != "engine-0"):
                continue
            if process.state != "ready":
                continue  # never had a request
            if process.beat is None or process.beat.pending or process.beat_s < self._stage_s + DRAIN_SETTLE_S:
                return False
        return True

    def _all_ready(self) -> bool:
        return all(
            process.state == ("done" if process.kind == "prepare" else "ready")
            for process in self._processes.values()
            if process.kind != "metrics"
        )

    def _slowest(self) -> Process | None:
        """The process that the service waits for: what it says is shown while loading."""
        for kind in ("prepare", "engine", "tokenizer", "detokenizer", "api"):
            for process in self._processes.values():
                if process.kind == kind and process.state not in ("ready", "done"):
                    return process
        return None

    def _overall_phase(self) -> Phase:
        if self._stage != "run":
            return "drain"
        waiting = self._slowest()
        if waiting is None:
            return "serve"
        if waiting.phase == "serve" or waiting.state == "down":
            return "load"
        return waiting.phase

    def _shown_state(self, process: Process) -> str:
        return process.phase if process.state == "starting" else process.state

    def _retry_after(self, now: float) -> float:
        """Seconds: 1 when serving; else what the engine's last start lets expect."""
        if self._all_ready():
            return 1.0 if self._stage == "run" else 5.0
        group = self._groups.get("engine")
        if group is None or self.engine_load_s == 0.0:
            return 5.0
        return min(60.0, max(1.0, self.engine_load_s - (now - group.started_s if group.alive else 0.0)))


def _backoff(failures: int) -> float:
    """0, 1, 2, 4, ... seconds before the restart after the nth failure."""
    return 0.0 if failures == 1 else min(MAX_BACKOFF_S, 2.0 ** (failures - 2))


def _how_it_ended(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:  # hung ones, which the supervisor kills itself, have their reason already
        return "was killed by SIGKILL (if memory ran out: raise the limit, or lower MIZZEN_KV_CACHE_BYTES)"
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"
    return f"exited with status {exit_code}"
