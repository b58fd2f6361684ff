"""The supervisor's main loop: one thread, which turns messages, deaths, signals and time into the policy's actions.

Signal handlers do nothing but wake the loop through a pipe. Whatever happens, the end is the same: no process, no
socket and no run directory is left.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq

from mizzen.config.config import Config
from mizzen.config.resolve import describe
from mizzen.ipc.channels import address, configure, encode
from mizzen.ipc.messages import Health, Ready, SetLogLevel, ToSupervisor
from mizzen.observability.feed import QUERY_TIMEOUT_S, Feed, MetricsSender, query_metrics
from mizzen.observability.logs import set_level
from mizzen.server.auth import Keys
from mizzen.supervisor import run_dir as run_dirs
from mizzen.supervisor.actions import Action, Exit, Kill, LastWords, Log, Send, Spawn, WriteModel
from mizzen.supervisor.health import HealthServer, MetricsEndpoint
from mizzen.supervisor.listen import listen
from mizzen.supervisor.metrics import SupervisorMetrics
from mizzen.supervisor.policy import Policy
from mizzen.supervisor.processes import Processes
from mizzen.supervisor.spec import ProcessSpec, service_specs
from mizzen.supervisor.termination import write_termination_log

TICK_S = 0.1
HEALTH_INTERVAL_S = 0.5
# A process that exits by itself may have sent its reason just before: its message is waited for this long.
LAST_WORDS_S = 0.1

_decode = msgspec.msgpack.Decoder(ToSupervisor).decode
log = structlog.get_logger()


def serve(config: Config, specs: Callable[[Config, int], tuple[ProcessSpec, ...]] = service_specs) -> int:
    """Runs the service until it ends, and returns the exit code: 0 after a drain, 78 or 1 after a failure.

    Raises ConfigError if a port or the run directory cannot be had. ``specs(config, api_fd)`` names the processes.
    """
    with contextlib.ExitStack() as stack:
        wakeup = stack.enter_context(_signals())
        server = config.server
        api = listen(server.host, server.port, host_setting="MIZZEN_HOST", port_setting="MIZZEN_PORT")
        stack.enter_context(api)
        health = None
        run_dir = run_dirs.create(config.run_dir_parent)
        stack.callback(run_dirs.remove, run_dir)
        run_dirs.write_config(run_dir, config)
        processes = Processes(run_dir)
        stack.callback(processes.close)
        context: Any = zmq.Context()
        stack.callback(context.destroy, linger=0)
        if server.health_port:
            health = HealthServer(server.health_host, server.health_port, metrics=_metrics(config, context, run_dir))
            stack.callback(health.close)
            health.start()
        log.info("starting", url=f"http://{server.host}:{server.port}", run_dir=str(run_dir), config=describe(config))
        supervisor = Supervisor(config, specs(config, api.fileno()), run_dir, processes, context, health, wakeup)
        return supervisor.run()


class Supervisor:
    def __init__(
        self,
        config: Config,
        specs: tuple[ProcessSpec, ...],
        run_dir: Path,
        processes: Processes,
        context: Any,  # zmq.Context
        health: HealthServer | None,
        wakeup: socket.socket,
    ) -> None:
        self._config = config
        self._specs = {spec.name: spec for spec in specs}
        self._policy = Policy(specs, config.supervisor)
        self._run_dir = run_dir
        self._processes = processes
        self._metrics = None
        if config.metrics.enabled:
            self._metrics = SupervisorMetrics(Feed(MetricsSender(context, run_dir).send))
        self._health_server = health
        self._wakeup = wakeup
        self._control = context.socket(zmq.ROUTER)
        configure(self._control)
        self._control.set(zmq.ROUTER_HANDOVER, 1)  # a restarted process takes its name over at once
        self._control.bind(address(run_dir, "control"))
        self._poller = zmq.Poller()
        self._poller.register(self._control, zmq.POLLIN)
        self._poller.register(wakeup, zmq.POLLIN)
        self._ended: list[tuple[float, str, int]] = []  # (when to handle, name, exit code)
        self._exit_code: int | None = None
        self._published: tuple[Any, ...] = ()
        self._next_health_s = 0.0
        self._log_level = config.log.level
        self._progress_s = time.monotonic()  # when progress was last logged

    def run(self) -> int:
        self._do(self._policy.start(time.monotonic()))
        while self._exit_code is None:
            self._poller.poll(int(TICK_S * 1000))
            self._read_signals()
            self._read_messages()
            self._reap()
            self._do(self._policy.tick(time.monotonic()))
            self._publish()
            if self._metrics is not None:
                self._metrics.report(self._policy, time.monotonic())
        return self._exit_code

    # ---- events ----

    def _read_signals(self) -> None:
        try:
            numbers = self._wakeup.recv(4096)
        except BlockingIOError:
            return
        for number in numbers:
            if number == signal.SIGUSR1:
                self._toggle_debug()
            elif number != signal.SIGCHLD:  # that one only wakes: _reap looks every time
                log.info("signal", name=signal.Signals(number).name)
                self._do(self._policy.interrupt(time.monotonic()))

    def _read_messages(self) -> None:
        while True:
            try:
                name, data = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _decode(data)
            self._do(self._policy.receive(name.decode(), message, time.monotonic()))
            if isinstance(message, Ready) and self._log_level != self._config.log.level:
                self._send_log_level(name.decode())

    def _toggle_debug(self) -> None:
        """SIGUSR1: everything is logged, in every process; and again: what the settings say."""
        configured = self._config.log.level
        self._log_level = "debug" if self._log_level == configured != "debug" else configured
        set_level(self._log_level)
        log.warning("log level changed", to=self._log_level)
        for name in self._policy.running:
            self._send_log_level(name)

    def _send_log_level(self, name: str) -> None:
        self._control.send_multipart([name.encode(), encode(SetLogLevel(self._log_level))], zmq.NOBLOCK)

    def _reap(self) -> None:
        now = time.monotonic()
        for name, code in self._processes.reap():
            self._ended.append((now if code < 0 else now + LAST_WORDS_S, name, code))
        due = [entry for entry in self._ended if entry[0] <= now]
        for entry in due:
            self._ended.remove(entry)
            self._do(self._policy.reaped(entry[1], entry[2], now))

    # ---- actions ----

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(name, epoch):
                    self._spawn(name, epoch)
                case Kill(name):
                    self._processes.kill(name)
                case Send(name, message):
                    self._control.send_multipart([name.encode(), encode(message)], zmq.NOBLOCK)
                case WriteModel(model):
                    run_dirs.write_model(self._run_dir, model)
                case Log(level, event, fields):
                    getattr(log, level)(event, **fields)
                case LastWords(message, code):
                    self._last_words(message, code)
                case Exit(code):
                    self._exit_code = code

    def _spawn(self, name: str, epoch: int) -> None:
        spec = self._specs[name]
        arguments = ["--parent", str(os.getpid())]
        if spec.kind == "engine":
            arguments += ["--epoch", str(epoch)]
        try:
            pid = self._processes.spawn(spec, *arguments)
        except OSError as error:
            log.error("cannot start a process", name=name, reason=error.strerror)
            self._ended.append((time.monotonic(), name, 1))
        else:
            log.debug("started", name=name, pid=pid, epoch=epoch)

    def _last_words(self, message: str, code: int) -> None:
        log.error(message, exit_code=code)
        write_termination_log(self._config.supervisor.termination_log, message)

    def _publish(self) -> None:
        now = time.monotonic()
        health = self._policy.health(now)
        if self._health_server is not None:
            self._health_server.publish(health)
        self._log_progress(health, now)
        essence = _essence(health)
        if essence == self._published and now < self._next_health_s:
            return
        if health.ready and not (self._published and self._published[0]):
            phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self._policy.start_phases_s.items())
            log.info("serving", model=health.model.name if health.model else None, phases=phases)
        self._published, self._next_health_s = essence, now + HEALTH_INTERVAL_S
        data = encode(health)
        for name in self._policy.running:
            if self._specs[name].kind == "api":
                self._control.send_multipart([name.encode(), data], zmq.NOBLOCK)

    def _log_progress(self, health: Health, now: float) -> None:
        """A line each interval while something long goes on: a download, above all."""
        interval_s = self._config.log.interval_s
        going_on = health.fraction is not None and not health.draining
        if interval_s and going_on and now - self._progress_s >= interval_s:
            self._progress_s = now
            log.info(health.detail or health.phase, phase=health.phase, done=f"{health.fraction:.0%}")


def _metrics(config: Config, context: Any, run_dir: Path) -> MetricsEndpoint | None:
    if not config.metrics.enabled:
        return None
    keys = Keys(config.server.api_keys) if config.metrics.require_key else None
    return MetricsEndpoint(lambda: query_metrics(context, run_dir, QUERY_TIMEOUT_S), keys)


def _essence(health: Health) -> tuple[Any, ...]:
    """What, when it changes, the api workers hear of at once."""
    states = tuple(health.processes.items())
    return (health.ready, health.live, health.startup, health.phase, health.draining, health.epoch, states)


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket that becomes readable with the numbers of signals received; the handlers themselves do nothing."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    old_handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    old_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old_wakeup)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
