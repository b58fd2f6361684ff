"""A workload is conversations: a request is a conversation of one turn, so that every load drives every workload.

Everything random comes from the scenario's seed; conversations are made before the run, and only joined while it runs.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadtest.prompts import Pieces, Tokenizer
from loadtest.scenario import Range, Requests, ScenarioError, ShareGpt, Synthetic


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. ``pieces`` join to its new text, or ``body`` is all of it.

    ``input_tokens``: what the server should count for the prompt (None: it depends on answers, or is not known);
    ``promised_cached``: how many of them an unlimited prefix cache has seen before.
    """

    pieces: tuple[bytes, ...] = ()
    output_tokens: int | None = None
    input_tokens: int | None = None
    promised_cached: int | None = None
    think_s: float = 0.0
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """``due_s``: by the trace's own clock, from its first row."""

    turns: tuple[Turn, ...]
    due_s: float | None = None


@dataclass(slots=True)
class Made:
    """``dropped_too_long``: how many conversations the served context has no room for."""

    conversations: list[Conversation] = field(default_factory=list)
    dropped_too_long: int = 0

    def add(self, conversation: Conversation, tokens: int, max_context: int | None) -> None:
        if max_context is not None and tokens > max_context:
            self.dropped_too_long += 1
        else:
            self.conversations.append(conversation)


def draw(source: np.random.Generator, what: float | Range) -> float:
    if not isinstance(what, Range):
        return what
    if what.mean is None:
        return float(source.uniform(what.min, what.max))
    return float(np.clip(source.normal(what.mean, what.std), what.min, what.max))


def draw_count(source: np.random.Generator, what: int | Range) -> int:
    if isinstance(what, Range) and what.mean is None:
        return int(source.integers(int(what.min), int(what.max) + 1))
    return max(1, round(draw(source, what)))


def largest(what: int | Range) -> int:
    return int(what.max) if isinstance(what, Range) else what


def synthetic(
    spec: Synthetic, pieces: Pieces, source: np.random.Generator, *, overhead: int, max_context: int | None
) -> Iterator[Conversation | None]:
    """Conversations without end; None: one was too long. ``overhead``: tokens that the server adds to a prompt."""
    prefixes = [pieces.random(source, max(1, spec.prefix_tokens - overhead)) for _ in range(spec.prefixes)]
    if spec.prefixes and largest(spec.input_tokens) <= spec.prefix_tokens:
        raise ScenarioError("workload.input_tokens: not above workload.prefix_tokens, which it includes")
    used: set[int] = set()
    while True:
        turns: list[Turn] = []
        total = 0
        for number in range(draw_count(source, spec.turns)):
            tokens = draw_count(source, spec.turn_tokens if number else spec.input_tokens)
            output = draw_count(source, spec.output_tokens)
            total += tokens + output
            if number:
                think_s = draw(source, spec.think_s)
                turns.append(Turn((pieces.random(source, tokens),), output, think_s=think_s))
                continue
            first: tuple[bytes, ...] = ()
            promised, own = 0, max(1, tokens - overhead)
            if prefixes:
                which = int(source.integers(len(prefixes)))
                first = (prefixes[which],)
                own = max(1, tokens - spec.prefix_tokens)
                promised = spec.prefix_tokens if which in used else 0
                used.add(which)
            turns.append(Turn((*first, pieces.random(source, own)), output, tokens, promised))
        yield None if max_context is not None and total > max_context else Conversation(tuple(turns))


def sharegpt(
    spec: ShareGpt, tokenizer: Tokenizer | None, source: np.random.Generator, *, overhead: int, max_context: int | None
) -> Made:
    """Raises ScenarioError for a file of another form."""
    made = Made()
    try:
        rows = json.loads(Path(spec.path).read_text())
        talks = [[(part["from"], part["value"]) for part in row["conversations"]] for row in rows]
    except OSError as error:
        raise ScenarioError(f"{spec.path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{spec.path}: not in ShareGPT's form: {error!r}") from None
    for talk in talks:
        turns: list[Turn] = []
        total = 0
        for (who, question), (other, reply) in zip(talk[::2], talk[1::2], strict=False):
            if who not in ("human", "user") or other not in ("gpt", "assistant") or len(turns) == spec.max_turns:
                break
            asked = tokenizer.count(question) if tokenizer else None
            output = min(spec.output_tokens, tokenizer.count(reply)) if tokenizer else spec.output_tokens
            # Without a tokenizer: four characters a token, to drop what is far too long.
            total += (asked or len(question) // 4) + output + overhead
            think_s = draw(source, spec.think_s) if turns else 0.0
            expected = asked + overhead if asked is not None and not turns else None
            turns.append(Turn((escaped(question),), max(1, output), expected, think_s=think_s))
        if turns:
            made.add(Conversation(tuple(turns)), total, max_context)
    if not made.conversations:
        raise ScenarioError(f"{spec.path}: no conversation begins with a question and its answer, or all are too long")
    return made


def requests(spec: Requests) -> Made:
    """Raises ScenarioError for what is no JSON object a line."""
    made = Made()
    try:
        lines = Path(spec.path).read_text().splitlines()
    except OSError as error:
        raise ScenarioError(f"{spec.path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
            due_s = body.pop("timestamp", None)
        except (ValueError, AttributeError, TypeError) as error:
            raise ScenarioError(f"{spec.path}, line {number}: no JSON object: {error}") from None
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            raise ScenarioError(f"{spec.path}, line {number}: neither messages nor a prompt")
        output = body.get("max_tokens") or body.get("max_completion_tokens")
        made.conversations.append(Conversation((Turn(body=body, output_tokens=output),), due_s))
    if not made.conversations:
        raise ScenarioError(f"{spec.path}: empty")
    return made


def escaped(text: str) -> bytes:
    """As it stands within a JSON string's quotes."""
    return msgspec.json.encode(text)[1:-1]
