"""Typing: prompt_toolkit with a pipe for keyboard and no screen."""

import io
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_openai import FakeServer, running
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from mizzen.chat.client import ChatClient
from mizzen.chat.session import Session
from mizzen.chat.shell import history_path, interact

CTRL_C, CTRL_D, ENTER, ALT_ENTER = "\x03", "\x04", "\r", "\x1b\r"


class Shell:
    def __init__(self, server: FakeServer, keyboard: PipeInput, history: Path) -> None:
        self.server, self.keyboard, self.history = server, keyboard, history

    def type(self, keys: str) -> list[str]:
        """Starts the shell, types, and returns the questions that reached the server in this run."""
        before = len(self.server.requests)
        client = ChatClient(self.server.url, proxies=False)
        self.out = io.StringIO()
        session = Session(client, "fake-model", out=self.out, err=self.out, interactive=True)
        self.keyboard.send_text(keys)
        assert interact(session, self.history, source=self.keyboard, sink=DummyOutput()) == 0
        client.close()
        return [request["messages"][-1]["content"] for request in self.server.requests[before:]]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    with running(FakeServer()) as server, create_pipe_input() as keyboard:
        yield Shell(server, keyboard, tmp_path / "state" / "mizzen" / "chat_history")


def test_enter_asks_and_ctrl_d_leaves(shell: Shell) -> None:
    assert shell.type(f"hello{ENTER}{CTRL_D}") == ["hello"]
    assert shell.out.getvalue().startswith("<hello>\n[1 token, ")


def test_quit_leaves(shell: Shell) -> None:
    assert shell.type(f"/quit{ENTER}hello{ENTER}") == []


def test_alt_enter_and_a_trailing_backslash_begin_a_new_line(shell: Shell) -> None:
    assert shell.type(f"one{ALT_ENTER}two\\{ENTER}three{ENTER}{CTRL_D}") == ["one\ntwo\nthree"]


def test_ctrl_c_clears_the_line(shell: Shell) -> None:
    assert shell.type(f"wrong{ALT_ENTER}still{CTRL_C}right{ENTER}{CTRL_D}") == ["right"]


def test_ctrl_c_on_an_empty_line_says_how_to_leave(shell: Shell) -> None:
    assert shell.type(f"{CTRL_C}hello{ENTER}{CTRL_D}") == ["hello"]
    assert shell.out.getvalue().startswith("Ctrl-D or /quit leaves\n")


def test_history_is_kept_in_a_file_and_only_its_owner_can_read_it(shell: Shell) -> None:
    shell.type(f"hello{ENTER}{CTRL_D}")
    assert stat.S_IMODE(shell.history.stat().st_mode) == 0o600
    assert stat.S_IMODE(shell.history.parent.stat().st_mode) == 0o700
    assert shell.history.read_text().endswith("+hello\n")


def test_a_history_file_that_others_could_read_is_closed_to_them(shell: Shell) -> None:
    shell.history.parent.mkdir(parents=True)
    shell.history.touch(mode=0o644)
    shell.type(CTRL_D)
    assert stat.S_IMODE(shell.history.stat().st_mode) == 0o600


def test_without_a_place_for_it_the_history_is_in_memory(shell: Shell) -> None:
    shell.history.parent.parent.touch()  # a file where a folder must be
    assert shell.type(f"hello{ENTER}more{ENTER}{CTRL_D}") == ["hello", "more"]


def test_bytes_that_are_no_text_are_asked_and_kept_as_question_marks(shell: Shell) -> None:
    shell.keyboard.send_bytes(b"a\xffb")
    assert shell.type(f"{ENTER}{CTRL_D}") == ["a?b"]
    assert shell.history.read_text(encoding="utf-8").endswith("+a?b\n")


def test_the_history_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert history_path() == Path("/somewhere/mizzen/chat_history")
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert history_path() == Path("/home/someone/.local/state/mizzen/chat_history")
