"""What ``mizzen chat`` does with its flags: find or start a server, then talk."""

import argparse
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from mizzen.chat.client import ChatClient, ChatError
from mizzen.chat.own_engine import LOOPBACK, EngineFailed, OwnEngine, free_ports
from mizzen.chat.session import Session
from mizzen.chat.shell import history_path, interact, read_lines
from mizzen.config.resolve import api_keys, served_model_names
from mizzen.config.settings import add_flags, flags_of, load_settings, variable
from mizzen.errors import EXIT_FAILED

SERVE = (sys.executable, "-m", "mizzen.cli", "serve")


def main(argv: list[str]) -> int:
    """Runs the shell and returns its exit code. Raises ConfigError (own engine) or ChatError (no server)."""
    parser = _parser()
    args = parser.parse_args(argv)
    flags = flags_of(args)
    if args.url is not None and (extra := sorted(flags.keys() - {"model"})):
        parser.error(f"--url and --{extra[0].replace('_', '-')} exclude each other: that server has its own settings")
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a TextIOWrapper: this is a program
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    with _ending_in_order():
        try:
            if args.url is not None:
                return _talk(ChatClient(args.url, args.api_key), model=args.model)
            return _with_own_engine(flags, args.api_key)
        except EngineFailed as error:
            print(f"mizzen: {error}", file=sys.stderr)
            return error.exit_code
        except BrokenPipeError:  # such as `| head -1`: nobody is left to talk to
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mizzen chat",
        description="Talks to a model: on a running server with --url, else with an engine of its own, which takes"
        " the settings of `mizzen serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", metavar="URL", help="a running server; --model is then one of its models' names")
    parser.add_argument("--api-key", metavar="KEY", help="what that server asks for")
    add_flags(parser)
    return parser


def _with_own_engine(flags: dict[str, Any], api_key: str | None) -> int:
    settings = load_settings(flags).settings
    served_model_names(settings)  # a model must be named: said at once, not by the child
    keys = api_keys(settings)
    port, health_port = free_ports(2)
    own = {"host": LOOPBACK, "port": port, "health_host": LOOPBACK, "health_port": health_port}
    # By the environment rather than by flags: others can read a command line, and a key may be among them.
    environment = os.environ | {variable(name): str(value) for name, value in (flags | own).items()}
    with OwnEngine(SERVE, environment, drain_timeout_s=settings.drain_timeout_s) as engine:
        with _loading_line() as show:
            engine.wait_until_ready(f"http://{LOOPBACK}:{health_port}", show)
        key = api_key or (keys[0] if keys else None)
        return _talk(ChatClient(f"http://{LOOPBACK}:{port}", key, proxies=False), engine=engine)


def _talk(client: ChatClient, *, model: str | None = None, engine: OwnEngine | None = None) -> int:
    with contextlib.closing(client):
        if model is None:
            names = client.models()
            if not names:
                raise ChatError(f"{client.url} serves no model")
            model = names[0]
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        session = Session(client, model, out=sys.stdout, err=sys.stderr, interactive=interactive)
        if engine is not None:
            session.fate = engine.fate
        if not interactive:
            return read_lines(session, sys.stdin)
        session.note(f"{model} at {client.url if engine is None else 'an engine of its own'}; /help, Ctrl-D leaves")
        return interact(session, history_path())


@contextlib.contextmanager
def _loading_line() -> Iterator[Any]:
    """A function that shows a text in place of the one before; at a terminal only."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def show(text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP unwind the stack, which restores the terminal and stops the engine."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
