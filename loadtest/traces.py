"""Traces tell lengths, times and which prompts begin alike; the words are ours, equal where the trace's hash ids are.

Azure (2023, 2024): TIMESTAMP, ContextTokens, GeneratedTokens. Mooncake: timestamp in ms, hash ids of 512-token blocks.
Qwen-Bailian: timestamp in s, hash ids of 16-token blocks. The last block of a prompt may be shorter.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np

from loadtest.prompts import Blocks, Pieces
from loadtest.scenario import ScenarioError, Trace
from loadtest.workloads import Conversation, Made, Turn

BLOCK_TOKENS = {"azure": 0, "mooncake": 512, "bailian": 16}


@dataclass(frozen=True, slots=True)
class Row:
    due_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read(spec: Trace, count: int | None) -> list[Row]:
    """The next ``count`` rows after those skipped, in the order of their times, which count from the first. Raises
    ScenarioError."""
    end = None if count is None else spec.skip + count
    try:
        with Path(spec.path).open(newline="") as file:
            rows = list(islice(_azure(file) if spec.format == "azure" else _jsonl(file, spec.format), spec.skip, end))
    except OSError as error:
        raise ScenarioError(f"{spec.path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{spec.path}: not in {spec.format}'s form: {error!r}") from None
    if not rows:
        raise ScenarioError(f"{spec.path}: no rows after {spec.skip}")
    rows.sort(key=lambda row: row.due_s)
    first_s = rows[0].due_s
    return [Row(row.due_s - first_s, row.input_tokens, row.output_tokens, row.hash_ids) for row in rows]


def _azure(file: Iterator[str]) -> Iterator[Row]:
    for line in csv.DictReader(file):
        moment = datetime.fromisoformat(line["TIMESTAMP"][:26])  # it knows no more than microseconds
        yield Row(moment.timestamp(), int(line["ContextTokens"]), int(line["GeneratedTokens"]))


def _jsonl(file: Iterator[str], form: str) -> Iterator[Row]:
    unit_s = 1e-3 if form == "mooncake" else 1.0
    for line in file:
        row = json.loads(line)
        ids = tuple(int(one) for one in row.get("hash_ids", ()))
        yield Row(float(row["timestamp"]) * unit_s, int(row["input_length"]), int(row["output_length"]), ids)


def conversations(
    rows: list[Row], form: str, pieces: Pieces, *, seed: int, overhead: int, max_context: int | None
) -> Made:
    """Prompts of the rows' lengths. ``overhead``: tokens that the server puts before a prompt; they count as part of
    it, so that blocks stay whole and only the last is shorter."""
    made = Made()
    block = BLOCK_TOKENS[form]
    blocks = Blocks(pieces, seed, block)
    source = np.random.default_rng((seed, 1 << 32))
    seen: dict[int, int] = {}  # how much of a block was seen, by the hash of all that it ends
    for row in rows:
        if max_context is not None and row.input_tokens + row.output_tokens > max_context:
            made.dropped_too_long += 1
            continue
        words = max(1, row.input_tokens - overhead)
        parts: list[bytes] = []
        promised = chain = 0
        hit = True
        for number, hash_id in enumerate(row.hash_ids):
            here = min(block, words - number * block)
            if here <= 0:
                break
            parts.append(blocks.block(hash_id) if here == block else blocks.beginning(hash_id, here))
            chain = hash((chain, hash_id))
            before = seen.get(chain, 0)
            promised += min(here, before) if hit else 0
            hit = hit and before >= here
            seen[chain] = max(here, before)
        if (left := words - len(parts) * block) > 0:
            parts.append(pieces.random(source, left))
        turn = Turn(tuple(parts), max(1, row.output_tokens), row.input_tokens, min(promised, words - 1))
        made.conversations.append(Conversation((turn,), row.due_s))
    return made
