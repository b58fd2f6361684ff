"""A child that misbehaves on demand: ``python toy.py MODE --run-dir ... --name ... --parent ...``.

Modes: ok; prepare (tells a model and exits); fail (raises at boot); config (a configuration error); exit78 (says
nothing, exits 78); slow (loads for a while, with beats); hang:PHASE (one beat of that phase, then nothing);
stall (ready, then pending work without progress); busy (ready, pending until told to drain for 1 s);
deaf (ready, ignores Shutdown); fail-once (as fail, but ok when its marker file exists); grandchild (ok, with a
child of its own).
Each message it receives is appended to RUN_DIR/../NAME.log, a JSON line each, and so is its start.
"""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from mizzen.errors import ConfigError
from mizzen.ipc.messages import Drain, EngineInfo, Health, Load, ModelInfo, PeerDown, Shutdown
from mizzen.ipc.process import Child, child_process

MODEL = ModelInfo("/nowhere", "/nowhere", "toy", "ToyForCausalLM", 100, 64, (0,))


def record(child: Child, **fields: object) -> None:
    with open(child.run_dir.parent / f"{child.name}.log", "a", encoding="utf-8") as file:
        file.write(json.dumps({"pid": os.getpid(), **fields}) + "\n")


def behave(child: Child, mode: str) -> None:
    record(child, event="start", epoch=child.options.get("epoch"))
    mode, _, argument = mode.partition(":")
    if mode == "fail":
        raise RuntimeError("the toy is broken")
    if mode == "fail-once":
        marker = child.run_dir.parent / f"{child.name}.failed"
        if not marker.exists():
            marker.touch()
            raise RuntimeError("the toy is broken, once")
    if mode == "config":
        raise ConfigError("there is no folder /nowhere", setting="MIZZEN_MODEL")
    if mode == "exit78":
        os._exit(78)
    if mode == "hang":
        child.control.beat(argument)  # type: ignore[arg-type]
        time.sleep(60)
    if mode == "slow":
        for percent in range(0, 100, 5):
            child.control.beat("load", fraction=percent / 100, detail="layer")
            time.sleep(0.1)
    if mode == "prepare":
        child.control.beat("download")
        child.control.ready(model=MODEL)
        return
    if mode == "grandchild":
        nap = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(child.run_dir)])
        record(child, event="grandchild", grandchild=nap.pid)
    child.control.ready(engine=EngineInfo(64, 4, 10, 16, 1) if child.name == "engine-0" else None)
    serve(child, mode)


def serve(child: Child, mode: str) -> None:
    progress = 0
    pending = mode in ("stall", "busy")
    finish_s = float("inf")
    level = logging.getLogger().level
    while True:
        child.control.socket.poll(50)
        messages = child.control.poll()
        if level != (level := logging.getLogger().level):
            record(child, event="level", level=logging.getLevelName(level))
        for message in messages:
            if isinstance(message, PeerDown):
                record(child, event="peer down", peer=message.name)
            elif isinstance(message, Health):
                record(child, event="health", ready=message.ready, phase=message.phase, epoch=message.epoch)
            elif isinstance(message, Drain):
                record(child, event="drain")
                finish_s = time.monotonic() + 1.0
            elif isinstance(message, Shutdown):
                record(child, event="shutdown")
                if mode != "deaf":
                    return
        if mode == "busy":
            progress += 1
            pending = time.monotonic() < finish_s
        child.control.beat("serve", pending=pending, progress=progress, load=Load(running=int(pending)))


def main() -> None:
    mode = sys.argv.pop(1)
    options = [option for option in ("fd", "epoch") if f"--{option}" in sys.argv]
    with child_process(str(Path(__file__)), *options) as child:
        behave(child, mode)


if __name__ == "__main__":
    main()
