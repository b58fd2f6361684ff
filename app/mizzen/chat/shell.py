"""Where the lines come from: a person at a terminal (prompt_toolkit), or a pipe."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mizzen.chat.session import Session

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import Output

EXIT_FAILED = 1


def read_lines(session: Session, lines: TextIO) -> int:
    """Answers each line of a pipe; a backslash at a line's end joins the next. 1 if anything failed, else 0."""
    code = 0
    for text in _joined(lines):
        outcome = session.handle(text)
        if outcome == "quit":
            break
        if outcome != "ok":
            code = EXIT_FAILED
        if outcome == "gone":
            break
    return code


def _joined(lines: TextIO) -> Iterator[str]:
    text = ""
    for line in lines:
        text += line.removesuffix("\n")
        if text.endswith("\\"):
            text = text[:-1] + "\n"
        else:
            yield text
            text = ""
    yield text


def interact(
    session: Session, history_path: Path, *, source: "Input | None" = None, sink: "Output | None" = None
) -> int:
    """Prompts until /quit or Ctrl-D. ``source`` and ``sink`` replace the terminal in tests."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory

    prompt: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        history=_history(history_path),
        auto_suggest=AutoSuggestFromHistory(),
        key_bindings=_key_bindings(session),
        input=source,
        output=sink,
    )
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # between an answer's last byte and the prompt: nothing to stop
            try:
                text = prompt.prompt()
            except EOFError:
                return 0
            match session.handle(text):
                case "quit":
                    return 0
                case "gone":
                    return EXIT_FAILED


def history_path() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "mizzen" / "chat_history"


def _history(path: Path) -> "History":
    """The file, which only its owner may read; without a place for it, memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _key_bindings(session: Session) -> "KeyBindings":
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\") and buffer.document.is_cursor_at_the_end_of_line:
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            run_in_terminal(lambda: session.note("Ctrl-D or /quit leaves"))

    return keys
