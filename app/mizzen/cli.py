"""The ``mizzen`` command. Starts fast: each verb imports what it needs. A wrong setting is one line, exit code 78."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mizzen
from mizzen.config.settings import add_flags, flags_of, load_settings, termination_log
from mizzen.errors import EXIT_CONFIG, EXIT_FAILED, ConfigError, MizzenError


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments[:1] == ["chat"]:  # it has flags of its own
            from mizzen.chat import main as chat

            return chat(arguments[1:])
        if arguments[:1] == ["top"]:
            from mizzen.top import main as top

            return top(arguments[1:])
        if arguments[:1] == ["doctor"]:
            from mizzen.doctor.main import main as doctor

            return doctor(arguments[1:])
        args = _parser().parse_args(arguments)
        return int(args.run(args))
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"mizzen: {line}", file=sys.stderr)
        return EXIT_CONFIG
    except MizzenError as error:
        print(f"mizzen: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _serve(args: argparse.Namespace) -> int:
    from mizzen.supervisor.termination import write_termination_log

    try:
        return _serve_settings(flags_of(args))
    except ConfigError as error:
        write_termination_log(termination_log(flags_of(args)), str(error))
        raise


def _serve_settings(flags: dict[str, Any]) -> int:
    import structlog

    from mizzen.config.resolve import resolve
    from mizzen.observability.logs import configure_logging
    from mizzen.supervisor.main import serve

    loaded = load_settings(flags)
    config = resolve(loaded.settings)
    configure_logging(config.log, process="supervisor")
    if loaded.service_links:
        structlog.get_logger().warning(
            "variables that Kubernetes makes for Services are ignored (set enableServiceLinks: false)",
            names=list(loaded.service_links),
        )
    return serve(config)


def _settings(args: argparse.Namespace) -> int:
    if args.reference:
        from mizzen.config.reference import render

        print(render(), end="")
        return 0
    import json

    from mizzen.config.resolve import describe, resolve

    print(json.dumps(describe(resolve(load_settings(flags_of(args)).settings)), indent=2))
    return 0


def _download(args: argparse.Namespace) -> int:
    from mizzen.config.resolve import resolve
    from mizzen.models.prepare import prepare_model

    # PID 1 of an init container: without a handler the kernel would drop it, and a deleted pod wait for its SIGKILL.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    shown = ""

    def progress(fraction: float, detail: str) -> None:
        nonlocal shown
        line = f"{detail}, {fraction:.0%}"
        if line != shown:
            print(line, file=sys.stderr, flush=True)
            shown = line

    print(prepare_model(resolve(load_settings(flags_of(args)).settings).engine.model, progress).path)
    return 0


def _sleep(args: argparse.Namespace) -> int:
    time.sleep(args.seconds)
    return 0


def _convert(args: argparse.Namespace) -> int:
    from mizzen.models.gguf_folder import convert_gguf

    convert_gguf(args.source, args.destination)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mizzen", description="An OpenAI-compatible LLM server.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mizzen {mizzen.__version__}")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = verbs.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model. Each flag is also an environment variable: --page-size is MIZZEN_PAGE_SIZE.",
        allow_abbrev=False,
    )
    add_flags(serve)
    serve.set_defaults(run=_serve)

    verbs.add_parser("chat", help="talk to a model in the terminal", add_help=False)
    verbs.add_parser("top", help="watch a server in the terminal", add_help=False)
    verbs.add_parser("doctor", help="check whether this host can serve the model", add_help=False)

    settings = verbs.add_parser("settings", help="print the resolved configuration", allow_abbrev=False)
    settings.add_argument("--reference", action="store_true", help="print the table of all settings (Markdown)")
    add_flags(settings)
    settings.set_defaults(run=_settings)

    download = verbs.add_parser(
        "download", help="get the model and check that it can be served, without serving it", allow_abbrev=False
    )
    add_flags(download)
    download.set_defaults(run=_download)

    sleep = verbs.add_parser("sleep", help="wait: preStop of Kubernetes before 1.30", allow_abbrev=False)
    sleep.add_argument("seconds", type=float, metavar="SECONDS")
    sleep.set_defaults(run=_sleep)

    convert = verbs.add_parser("convert", help="make a model folder of a GGUF file", allow_abbrev=False)
    convert.add_argument("source", type=Path, metavar="SRC.gguf")
    convert.add_argument("destination", type=Path, metavar="DEST")
    convert.set_defaults(run=_convert)
    return parser


if __name__ == "__main__":
    sys.exit(main())
