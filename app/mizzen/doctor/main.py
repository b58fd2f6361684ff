"""Gathers facts, runs every check, prints a table or JSON. Exit code 0: nothing failed; 1: something did; 78: settings.

It changes nothing, needs no free GPU memory, and may run beside a Mizzen that serves.
"""

import argparse
import contextlib
import http.client
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping

import msgspec

from mizzen.config.config import Config
from mizzen.config.resolve import resolve
from mizzen.config.settings import add_flags, flags_of, load_settings
from mizzen.doctor import checks
from mizzen.doctor.checks import Check, Status, check_folders, check_keys, driver_for
from mizzen.doctor.facts import Facts, Folder, gather, look_at
from mizzen.doctor.model import check_fit, check_model
from mizzen.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError
from mizzen.supervisor.listen import listen

ON_HOST: tuple[Callable[[Config, Facts], Check], ...] = (
    checks.check_driver,
    checks.check_torch,
    checks.check_gpus,
    checks.check_links,
    checks.check_nccl,
    checks.check_shm,
    checks.check_cpu,
    checks.check_limits,
    checks.check_compiler,
)
MARKS: dict[Status, str] = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skip": "-"}
PROBE_TIMEOUT_S = 2.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="mizzen doctor",
        description="Checks whether this host can serve the model with these settings, before anything is loaded.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_flags(parser)
    args = parser.parse_args(arguments)
    found, exit_code = diagnose(flags_of(args))
    print(as_json(found) if args.json else as_table(found))
    return exit_code


def diagnose(flags: dict[str, object]) -> tuple[list[Check], int]:
    """All checks. With wrong settings only those, for the others need them, and what a missing GPU may be due to."""
    try:
        config = resolve(load_settings(flags).settings)
    except ConfigError as error:
        lines = str(error).splitlines()
        found = [
            Check("settings", "fail", line, "`mizzen serve --help` and README.md list all settings") for line in lines
        ]
        if error.setting in ("MIZZEN_DEVICE", "MIZZEN_TENSOR_PARALLEL_SIZE"):
            found.append(driver_for("cuda", gather(os.environ)))
        return found, EXIT_CONFIG
    found = run_checks(config, gather(os.environ))
    return found, EXIT_FAILED if any(check.status == "fail" for check in found) else 0


def run_checks(config: Config, facts: Facts) -> list[Check]:
    ranks = config.engine.tensor_parallel_size
    found = [Check("settings", "ok", f"device {config.engine.device}, {ranks} {'rank' if ranks == 1 else 'ranks'}")]
    found += [check(config, facts) for check in ON_HOST]
    found += check_folders(folders(config, facts.environment))
    ports, running = check_ports(config)
    found += [*ports, check_keys(config)]
    model, arch = check_model(config)
    found.append(model)
    if arch is not None and running:
        found.append(Check("fit", "ok", "a Mizzen is there, so the memory that is free does not count"))
    elif arch is not None:
        found.append(check_fit(config, facts, arch))
    return found


def folders(config: Config, environment: Mapping[str, str]) -> list[tuple[str, Folder]]:
    """Whatever is written: to each its use."""
    source = config.engine.model.source
    home = {"huggingface": "HF_HOME", "modelscope": "MODELSCOPE_CACHE"}[source]
    hub = environment.get(home) or f"{environment.get('XDG_CACHE_HOME') or '~/.cache'}/{source}"
    wanted = [("cache: mizzen", config.engine.model.cache_dir), ("cache: models", hub)]
    if config.engine.device == "cuda":
        wanted.append(("cache: kernels", environment.get("TRITON_CACHE_DIR") or "~/.triton"))
    found = [(name, look_at(path)) for name, path in wanted]
    try:
        sockets = look_at(config.run_dir_parent or tempfile.gettempdir())
    except FileNotFoundError:
        sockets = Folder("/tmp", writable=False, free_bytes=0)
    # Sockets take no space: only whether they can be made counts.
    return [*found, ("run folder", Folder(sockets.path, sockets.writable, max(sockets.free_bytes, checks.DISK_BYTES)))]


def check_ports(config: Config) -> tuple[list[Check], bool]:
    """And whether a Mizzen runs here already."""
    server = config.server
    wanted = [("MIZZEN_PORT", "MIZZEN_HOST", server.host, server.port)]
    if server.health_port:
        wanted.append(("MIZZEN_HEALTH_PORT", "MIZZEN_HEALTH_HOST", server.health_host, server.health_port))
    found, running = [], False
    for setting, host_setting, host, port in wanted:
        name = "port" if setting == "MIZZEN_PORT" else "health port"
        try:
            listen(host, port, host_setting=host_setting, port_setting=setting).close()
        except ConfigError as error:
            if phase := running_phase(host, port):
                running = True
                found.append(Check(name, "ok", f"{host}:{port}: a Mizzen is there, in phase {phase}"))
            else:
                found.append(Check(name, "fail", str(error), f"end what listens there, or set {setting}"))
        else:
            found.append(Check(name, "ok", f"{host}:{port} is free"))
    return found, running


def running_phase(host: str, port: int) -> str | None:
    """What a Mizzen that listens there says it is doing."""
    nearby = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(nearby, port, timeout=PROBE_TIMEOUT_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health/live")
            phase = json.load(connection.getresponse())["phase"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):  # something else listens there
            return None
    return str(phase)


def as_json(found: list[Check]) -> str:
    report = {"ok": all(check.status != "fail" for check in found), "checks": msgspec.to_builtins(found)}
    return json.dumps(report, indent=2)


def as_table(found: list[Check]) -> str:
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{MARKS[check.status]:4}  {check.name:{width}}  {check.detail}")
        if check.advice and check.status in ("warn", "fail"):
            lines.append(f"{'':4}  {'':{width}}  -> {check.advice}")
    counts = {status: sum(check.status == status for check in found) for status in ("fail", "warn")}
    failed = f"{counts['fail']} failed" if counts["fail"] else "nothing failed"
    lines.append(f"{failed}, {counts['warn']} to look at" if counts["warn"] else failed)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
