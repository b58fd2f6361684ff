"""An engine rank as a process. Rank 0 schedules and runs; the others run the steps that rank 0 broadcasts, in order."""

import gc
import os
import time
from collections import deque

import msgspec
import structlog

from mizzen.distributed.group import ProcessGroup, make_group
from mizzen.engine.build import Rank, Report, build_rank, build_scheduler, make_platform
from mizzen.engine.loop import IDLE_WAIT_S, RESULT_WAIT_S, EngineLoop
from mizzen.engine.meter import StepMeter
from mizzen.ipc.channels import ZmqReceiver, ZmqSender
from mizzen.ipc.messages import (
    Drain,
    EngineInbox,
    Health,
    Load,
    ModelInfo,
    PeerDown,
    Phase,
    Shutdown,
)
from mizzen.ipc.process import Child, child_process
from mizzen.model_runner.runner import RunnerHandle
from mizzen.observability.feed import Feed, MetricsSender
from mizzen.scheduler.output import SchedulerOutput, decode_step, encode_step

log = structlog.get_logger()
RANK_MESSAGE_LIMIT = 4  # steps a follower rank takes ahead of its device


class ProgressLine:
    """Logs what the engine does, every ``interval_s`` while it works; 0 is never."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s = time.monotonic()
        self._last = Load()
        self._hit_rate = 0.0  # of the newest interval in which prompts were looked up

    def update(self, load: Load) -> None:
        now = time.monotonic()
        if self._interval_s == 0 or now < self._last_s + self._interval_s:
            return
        seconds, before = now - self._last_s, self._last
        self._last_s, self._last = now, load
        if queries := load.prefix_queries - before.prefix_queries:
            self._hit_rate = (load.prefix_hits - before.prefix_hits) / queries
        if load.steps > before.steps:
            log.info(
                "engine",
                running=load.running,
                waiting=load.waiting,
                kv_used=f"{load.kv_pages_used / max(1, load.kv_pages_total):.1%}",
                prefix_hits=f"{self._hit_rate:.1%}",
                tokens_per_s=round((load.generated_tokens - before.generated_tokens) / seconds, 1),
                steps_per_s=round((load.steps - before.steps) / seconds, 1),
                preemptions=load.preemptions - before.preemptions,
            )


class _Stop(Exception):
    """The supervisor said so."""


def main() -> None:
    with child_process("mizzen.engine.process", "epoch") as child:
        rank = child.index
        try:
            built, group = _build(child, rank)
            if cpus := child.config.engine.cpus:
                # This thread alone: those that the build has started (zmq, NCCL, torch) stay where they like.
                os.sched_setaffinity(0, {cpus[rank]})
            try:
                if rank == 0:
                    _lead(child, built)
                else:
                    _follow(child, built)
            except _Stop:
                group.abandon(0)  # the other ranks stop too, each in its own time
                raise
        except _Stop:
            log.info("engine rank stops", rank=rank)


def _build(child: Child, rank: int) -> tuple[Rank, ProcessGroup]:
    config = child.config.engine
    model = msgspec.json.decode((child.run_dir / "model.json").read_bytes(), type=ModelInfo)
    report = _reporter(child)
    report("load", 0.0, "meeting the other ranks" if config.tensor_parallel_size > 1 else "")
    platform = make_platform(config, rank)
    group = make_group(
        rank,
        config.tensor_parallel_size,
        child.run_dir / f"ranks-{child.options['epoch']}",
        device=platform.device,
        timeout_s=child.config.supervisor.load_timeout_s,
        all_reduce=config.all_reduce,
        nvlink_multicast=config.nvlink_multicast,
    )
    started_s = time.monotonic()
    built = build_rank(config, model, platform, group, report)
    seconds = round(time.monotonic() - started_s, 2)
    memory = {f"{name}_gib": round(size / 2**30, 2) for name, size in built.memory_bytes.items()}
    log.info("engine rank built", rank=rank, seconds=seconds, pages=built.info.num_pages, **memory)
    gc.collect()
    gc.freeze()  # what was built lives for good: later collections need not look at it
    return built, group


def _reporter(child: Child) -> Report:
    def report(phase: Phase, fraction: float, detail: str) -> None:
        child.control.beat(phase, fraction=fraction, detail=detail, pending=True)
        for message in child.control.poll():
            if isinstance(message, Shutdown):
                raise _Stop

    return report


def _lead(child: Child, built: Rank) -> None:
    config = child.config.engine
    senders = [ZmqSender(child.context, child.run_dir, f"rank-{r}") for r in range(1, config.tensor_parallel_size)]

    def broadcast(output: SchedulerOutput) -> None:
        data = encode_step(output)
        for sender in senders:
            sender.send_bytes(data)

    progress = ProgressLine(child.config.log.interval_s)
    meter = None
    if child.config.metrics.enabled:
        meter = StepMeter(Feed(MetricsSender(child.context, child.run_dir).send), built.runner)

    def beat() -> None:
        if child.control.beat_due():
            load = loop.load()
            child.control.beat("serve", pending=loop.has_work(), progress=loop.steps, load=load)
            progress.update(load)
            if meter is not None:
                meter.report(load)
        for message in child.control.poll():
            match message:
                case Shutdown():
                    raise _Stop
                case PeerDown(name="detokenizer"):
                    loop.abort_all("The detokenizer was restarted; send the request again.")
                case PeerDown(name=name) if name.startswith("api-"):
                    loop.abort_api(int(name.removeprefix("api-")))
                case PeerDown() | Drain() | Health():
                    pass  # nothing that the engine holds depends on them

    loop = EngineLoop(
        build_scheduler(config, built),
        built.runner,
        ZmqReceiver(child.context, child.run_dir, "engine", EngineInbox),
        ZmqSender(child.context, child.run_dir, "detokenizer"),
        depth=config.overlap_depth,
        epoch=child.options["epoch"],
        seed=config.seed,
        broadcast=broadcast if senders else None,
        on_wait=beat,
        meter=meter,
        annotate=built.annotate,
    )
    child.control.ready(engine=built.info)
    while True:
        loop.step(IDLE_WAIT_S)
        beat()


def _follow(child: Child, built: Rank) -> None:
    """Rank 1 and up: the same steps in the same order; results are waited for, so that a failure is seen."""
    inbox = ZmqReceiver(child.context, child.run_dir, child.name.replace("engine", "rank"), None)
    in_flight: deque[RunnerHandle] = deque()
    steps = 0
    child.control.ready()
    while True:
        child.control.beat("serve", pending=bool(in_flight), progress=steps)
        for message in child.control.poll():
            if isinstance(message, Shutdown):
                raise _Stop
        if in_flight and (in_flight[0].ready() or len(in_flight) >= RANK_MESSAGE_LIMIT):
            try:
                in_flight[0].result(RESULT_WAIT_S)
            except TimeoutError:
                continue
            in_flight.popleft()
            steps += 1
            continue
        data = inbox.recv_bytes(0.001 if in_flight else IDLE_WAIT_S)
        if data is not None:
            in_flight.append(built.runner.enqueue(decode_step(data)))


if __name__ == "__main__":
    main()
