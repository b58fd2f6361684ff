"""One line in, one outcome out: commands and questions, the same for a person and for a pipe."""

import os
from collections.abc import Callable
from typing import Literal, TextIO

from mizzen.chat.client import Answer, ChatClient, ChatError
from mizzen.chat.conversation import PARAMETERS, Conversation

Outcome = Literal["ok", "failed", "quit", "gone"]  # gone: the server will not come back

HELP = f"""\
/system TEXT      set the system prompt; /system shows it, /system off removes it
/set NAME VALUE   {", ".join(PARAMETERS)}; VALUE may be default; /set shows them
/reset            forget the conversation (not the system prompt)
/help             this
/quit             leave, as Ctrl-D does
Alt-Enter, or \\ at the end of a line, begins a new line. Ctrl-C stops the answer, or clears the line."""

# A model may write anything, and so may a server: at a terminal, control characters must not act.
_HARMLESS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "�") | {ord("\r"): None}


class Session:
    """``interactive``: a person sits at the terminal, so Ctrl-C only stops the answer, and each answer is followed by
    its figures. ``fate`` says why the server is gone for good, or nothing.
    """

    def __init__(
        self,
        client: ChatClient,
        model: str,
        *,
        out: TextIO,
        err: TextIO,
        interactive: bool,
    ) -> None:
        self.conversation = Conversation()
        self._client, self._model = client, model
        self._out, self._err = out, err
        self._interactive = interactive
        self.fate: Callable[[], str] = str
        self._dims = out.isatty() and "NO_COLOR" not in os.environ

    def handle(self, text: str) -> Outcome:
        """Obeys a command or answers a question."""
        text = text.strip().encode("utf-8", "replace").decode()  # no lone surrogate: JSON could not carry it
        if not text:
            return "ok"
        return self._command(text) if text.startswith("/") else self._ask(text)

    def note(self, text: str) -> None:
        """What the shell itself says."""
        print(f"\x1b[2m{text}\x1b[0m" if self._dims else text, file=self._out, flush=True)

    def complain(self, text: str) -> None:
        print(f"error: {text.translate(_HARMLESS)}", file=self._err, flush=True)

    # ---- questions ----

    def _ask(self, question: str) -> Outcome:
        pieces: list[str] = []
        outcome: Outcome = "ok"
        said = ""
        answer = self._client.answer(self._model, self.conversation.messages(question), self.conversation.parameters)
        try:
            with answer:
                for piece in answer:
                    pieces.append(piece)
                    self._out.write(piece.translate(_HARMLESS) if self._interactive else piece)
                    self._out.flush()
            said = figures(answer)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            said = "stopped" if pieces else "stopped; the question is forgotten"
        except ChatError as error:
            said, outcome = str(error), "failed"
        self.conversation.remember(question, "".join(pieces))
        if pieces or outcome == "ok":
            print(file=self._out, flush=True)
        if outcome == "failed":
            self.complain(said)
            if why := self.fate():
                self.complain(why)
                return "gone"
        elif self._interactive:
            self.note(f"[{said}]")
        return outcome

    # ---- commands ----

    def _command(self, text: str) -> Outcome:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/quit":
                return "quit"
            case "/help":
                self.note(HELP)
            case "/reset":
                self.conversation.reset()
                self._confirm("the conversation is forgotten")
            case "/system":
                return self._system(rest)
            case "/set":
                return self._set(rest)
            case _:
                self.complain(f"{name} is not a command; /help lists them")
                return "failed"
        return "ok"

    def _system(self, text: str) -> Outcome:
        if not text:
            self.note(self.conversation.system or "no system prompt")
        else:
            self.conversation.system = "" if text == "off" else text
            self._confirm("the system prompt is set" if self.conversation.system else "no system prompt")
        return "ok"

    def _set(self, text: str) -> Outcome:
        words = text.split()
        if not words:
            for name in PARAMETERS:
                self.note(f"{name} {self.conversation.parameters.get(name, 'default')}")
            return "ok"
        if len(words) != 2:
            self.complain("write /set NAME VALUE, such as /set temperature 0.2")
            return "failed"
        try:
            self.conversation.set_parameter(*words)
        except ValueError as error:
            self.complain(str(error))
            return "failed"
        self._confirm(" ".join(words))
        return "ok"

    def _confirm(self, text: str) -> None:
        if self._interactive:  # in a pipe, only answers and what was asked for
            self.note(text)


def figures(answer: Answer) -> str:
    """Such as "12 tokens, 34.5 tokens/s, first after 0.21 s"."""
    parts: list[str] = []
    tokens = answer.completion_tokens
    if tokens is not None:
        parts.append(f"{tokens} token{'' if tokens == 1 else 's'}")
    if answer.first_s is None:
        parts.append("no text")
    else:
        writing_s = answer.last_s - answer.first_s
        if tokens is not None and tokens > 1 and writing_s > 0:
            parts.append(f"{(tokens - 1) / writing_s:.1f} tokens/s")
        parts.append(f"first after {answer.first_s:.2f} s")
    if answer.finish_reason == "length":
        parts.append("cut at the length limit")
    return ", ".join(parts)
