"""Runs a supervisor over toys: ``python run_toys.py JSON``, with ``modes`` by process name, and settings."""

import json
import sys
from pathlib import Path

import msgspec

from mizzen.config.config import Config
from mizzen.config.resolve import resolve
from mizzen.config.settings import Settings
from mizzen.errors import ConfigError
from mizzen.observability.logs import configure_logging
from mizzen.supervisor.main import serve
from mizzen.supervisor.spec import Kind, ProcessSpec

TOY = str(Path(__file__).with_name("toy.py"))
KINDS: dict[str, Kind] = {
    "api": "api",
    "prepare": "prepare",
    "tokenizer": "tokenizer",
    "detokenizer": "detokenizer",
    "engine": "engine",
}


def toy_specs(modes: dict[str, str], api_fd: int) -> tuple[ProcessSpec, ...]:
    specs = []
    for name, mode in modes.items():
        kind = KINDS[name.rpartition("-")[0] or name]
        group = "engine" if kind == "engine" else name
        fds: tuple[int, ...] = ()
        command: tuple[str, ...] = (sys.executable, TOY, mode)
        if kind == "api":
            command, fds = (*command, "--fd", str(api_fd)), (api_fd,)
        specs.append(ProcessSpec(name, kind, group, command, fds))
    return tuple(specs)


def main() -> int:
    order = json.loads(sys.argv[1])
    config: Config = resolve(Settings(_env_file=None, model="toy", run_dir=order["run_dir"], **order["settings"]))
    config = msgspec.structs.replace(
        config, supervisor=msgspec.structs.replace(config.supervisor, **order["supervisor"])
    )
    configure_logging(config.log, process="supervisor")
    try:
        return serve(config, lambda _, api_fd: toy_specs(order["modes"], api_fd))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 78


if __name__ == "__main__":
    sys.exit(main())
