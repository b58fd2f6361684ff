"""A body is joined from JSON that was made before: what it costs while the load runs is one copy.

A conversation's later turns repeat what was said so far, the server's own answers included, as a chat client does.
"""

from typing import Any

import msgspec

from loadtest.scenario import Scenario
from loadtest.workloads import Turn, escaped

_QUESTION = b'{"role":"user","content":"'
_REPLY = b'{"role":"assistant","content":"'


class Bodies:
    """``joiner`` is that of the pieces' maker."""

    def __init__(self, scenario: Scenario, model: str, joiner: bytes) -> None:
        self._chat = scenario.endpoint == "chat"
        self._tokens = scenario.prompt == "tokens"
        self._joiner = joiner
        self._fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if scenario.ignore_eos else {}),
            **scenario.extra_body,
        }
        self._head = msgspec.json.encode(self._fields)[:-1]

    @property
    def path(self) -> str:
        return "/chat/completions" if self._chat else "/completions"

    def body(self, turn: Turn, history: list[bytes]) -> bytes:
        """``history``: of the conversation so far, as ``said`` made it."""
        if turn.body is not None:
            return msgspec.json.encode({**turn.body, **self._fields})
        new = self._joiner.join(turn.pieces)
        length = b"" if turn.output_tokens is None else b',"max_tokens":%d' % turn.output_tokens
        if self._chat:
            return b'%b%b,"messages":[%b]}' % (self._head, length, b",".join((*history, _QUESTION + new + b'"}')))
        if self._tokens:
            return b'%b%b,"prompt":[%b]}' % (self._head, length, self._joiner.join((*history, new)))
        return b'%b%b,"prompt":"%b"}' % (self._head, length, self._joiner.join((*history, new)))

    def said(self, turn: Turn, answer: str) -> list[bytes]:
        """What a turn adds to the history."""
        new = self._joiner.join(turn.pieces)
        if self._chat:
            return [_QUESTION + new + b'"}', _REPLY + escaped(answer) + b'"}']
        return [new] if self._tokens else [new, escaped(answer)]
