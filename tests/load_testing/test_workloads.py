"""What is asked: lengths, shared beginnings, traces and files."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.bodies import Bodies
from loadtest.prompts import WORDS, Text, TokenIds
from loadtest.run import make, timed
from loadtest.scenario import Range, Scenario, ScenarioError, ShareGpt, Synthetic, convert, load
from loadtest.traces import conversations, read
from loadtest.workloads import Conversation, requests, sharegpt, synthetic

TEXT = Text(WORDS)


def some(spec: Synthetic, count: int = 200, *, overhead: int = 0, max_context: int | None = None) -> list[Any]:
    return list(
        islice(synthetic(spec, TEXT, np.random.default_rng(1), overhead=overhead, max_context=max_context), count)
    )


def text(conversation: Conversation) -> str:
    return b" ".join(conversation.turns[0].pieces).decode()


def scenario(**fields: Any) -> Scenario:
    return convert({"requests": 100, **fields})


def trace(path: Path, form: str) -> dict[str, Any]:
    return {"kind": "trace", "path": str(path), "format": form}


def test_words_are_distinct_and_need_no_escape() -> None:
    assert len(WORDS) == len(set(WORDS)) > 250
    assert all(word.isascii() and word.isalpha() for word in WORDS)


def test_prompts_have_the_length_that_is_asked_less_what_the_server_adds() -> None:
    for overhead in (0, 30):
        made = some(Synthetic(input_tokens=Range(50, 90), output_tokens=7), overhead=overhead)
        lengths = [one.turns[0].input_tokens for one in made]
        assert [len(text(one).split()) + overhead for one in made] == lengths
        assert (min(lengths), max(lengths)) == (50, 90)
        assert {one.turns[0].output_tokens for one in made} == {7}
        assert len({text(one) for one in made}) == len(made)


def test_a_normal_length_keeps_its_bounds() -> None:
    lengths = [
        one.turns[0].input_tokens for one in some(Synthetic(input_tokens=Range(10, 200, mean=100, std=60)), 2000)
    ]
    assert (min(lengths), max(lengths)) == (10, 200)
    assert np.mean(lengths) == pytest.approx(101, abs=5)


def test_shared_prefixes_are_shared_and_promised_from_the_second_time() -> None:
    made = some(Synthetic(input_tokens=100, prefixes=4, prefix_tokens=60), overhead=10)
    beginnings = [" ".join(text(one).split()[:50]) for one in made]
    assert len(set(beginnings)) == 4
    for place, one in enumerate(made):
        assert one.turns[0].promised_cached == (60 if beginnings[place] in beginnings[:place] else 0)
        assert len(text(one).split()) == 90


def test_a_prefix_must_fit_into_the_prompt() -> None:
    with pytest.raises(ScenarioError, match="input_tokens"):
        some(Synthetic(input_tokens=60, prefixes=1, prefix_tokens=60))


def test_talks_have_their_turns_and_pauses() -> None:
    made = some(Synthetic(input_tokens=100, output_tokens=5, turns=Range(2, 4), turn_tokens=10, think_s=Range(1, 2)))
    assert {len(one.turns) for one in made} == {2, 3, 4}
    for one in made:
        assert one.turns[0].think_s == 0
        assert all(1 <= turn.think_s <= 2 and len(turn.pieces[0].split()) == 10 for turn in one.turns[1:])


def test_what_is_too_long_for_the_context_is_left_out() -> None:
    made = some(Synthetic(input_tokens=Range(50, 90), output_tokens=10), max_context=80)
    kept = [one for one in made if one is not None]
    assert 0 < len(kept) < len(made)
    assert max(one.turns[0].input_tokens for one in kept) == 70


def test_an_azure_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,5000,109\n2023-11-16 18:15:56.6805900,10,0\n"
    )
    spec = scenario(workload=trace(path, "azure"), load={"kind": "replay", "speed": 2})
    found, made = make(spec, TEXT, None, 0, 4096)
    plan = timed(spec, found)
    assert [due_s for due_s, _ in plan] == [0.0, 5.0]
    assert made.dropped_too_long == 1
    assert [(len(text(one).split()), one.turns[0].output_tokens) for _, one in plan] == [(374, 44), (10, 1)]


def mooncake(path: Path, rows: list[tuple[float, int, list[int]]], **unit: Any) -> Path:
    path.write_text("".join(
        json.dumps({"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": ids}) + "\n"
        for at, length, ids in rows
    ))  # fmt: skip
    return path


def test_equal_hash_ids_are_equal_prefixes(tmp_path: Path) -> None:
    rows = [(0, 1100, [0, 1, 2]), (1500, 1300, [0, 1, 3]), (1500, 1024, [0, 9]), (9000, 1100, [0, 1, 2])]
    path = mooncake(tmp_path / "trace.jsonl", rows)
    spec = scenario(workload=trace(path, "mooncake"), load={"kind": "replay"})
    found, _ = make(spec, TEXT, None, 0, None)
    one, two, three, four = list(found)
    first = text(one).split()
    assert [len(text(row).split()) for row in (one, two, three, four)] == [1100, 1300, 1024, 1100]
    assert text(two).split()[:1024] == first[:1024]
    assert text(two).split()[1024:1100] != first[1024:1100]
    assert text(three).split()[:512] == first[:512]
    assert text(three).split()[512:600] != first[512:600]
    assert text(four) == text(one)
    assert [row.turns[0].promised_cached for row in (one, two, three, four)] == [0, 1024, 512, 1099]
    assert [row.due_s for row in (one, two, three, four)] == [0.0, 1.5, 1.5, 9.0]


def test_of_a_block_that_was_seen_in_part_only_that_part_is_promised(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", [(0, 700, [1, 2]), (1, 1300, [1, 2, 3]), (2, 1300, [1, 2, 3])])
    rows = read(scenario(workload=trace(path, "mooncake")).workload, None)  # type: ignore[arg-type]
    made = conversations(rows, "mooncake", TEXT, seed=0, overhead=0, max_context=None)
    assert [one.turns[0].promised_cached for one in made.conversations] == [0, 700, 1299]


def test_a_block_is_shared_only_after_the_same_beginning(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", [(0, 1024, [1, 2]), (1, 1024, [3, 2])])
    rows = read(scenario(workload=trace(path, "mooncake")).workload, None)  # type: ignore[arg-type]
    made = conversations(rows, "mooncake", TEXT, seed=0, overhead=0, max_context=None)
    assert [one.turns[0].promised_cached for one in made.conversations] == [0, 0]


def test_a_bailian_trace_has_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    path = tmp_path / "bailian.jsonl"
    more = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1, "output_length": 3}
    path.write_text("".join(
        json.dumps({"timestamp": at, "input_length": 40, "hash_ids": ids, **more}) + "\n"
        for at, ids in ((2.5, [7, 8, 9]), (1.0, [7, 8, 10]))
    ))  # fmt: skip
    spec = scenario(workload=trace(path, "bailian"), load={"kind": "replay"})
    found, _ = make(spec, TokenIds(100), None, 0, None)
    early, late = list(found)
    assert (early.due_s, late.due_s) == (0.0, 1.5)
    ids = [b",".join(one.turns[0].pieces).split(b",") for one in (early, late)]
    assert ids[0][:32] == ids[1][:32]
    assert ids[0][32:] != ids[1][32:]
    assert late.turns[0].promised_cached == 32


def test_what_the_server_puts_before_a_prompt_shortens_only_its_end(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", [(0, 1100, [0, 1, 2]), (1, 1100, [0, 1, 2])])
    spec = scenario(workload=trace(path, "mooncake"))
    plain, shorter = (next(make(spec, TEXT, None, overhead, None)[0]) for overhead in (0, 30))
    assert text(shorter).split() == text(plain).split()[:1070]


def test_a_trace_of_another_form_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 1}\n')
    for form in ("azure", "mooncake"):
        with pytest.raises(ScenarioError, match=r"form|no rows"):
            make(scenario(workload=trace(path, form)), TEXT, None, 0, None)
    with pytest.raises(ScenarioError, match="No such file"):
        make(scenario(workload=trace(tmp_path / "no", "azure")), TEXT, None, 0, None)


def test_sharegpt_conversations_are_asked_turn_by_turn(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    says = [("human", 'Say "hi"\n'), ("gpt", "hi"), ("human", "Again"), ("gpt", "hi hi"), ("human", "left out")]
    talk = [{"from": who, "value": what} for who, what in says]
    path.write_text(json.dumps([{"id": "a", "conversations": talk}, {"conversations": talk[1:]}]))
    made = sharegpt(ShareGpt(str(path), max_turns=3, output_tokens=9), None, np.random.default_rng(0), overhead=0,
                    max_context=None)  # fmt: skip
    (one,) = made.conversations
    assert len(one.turns) == 2
    bodies = Bodies(scenario(), "m", b" ")
    first = json.loads(bodies.body(one.turns[0], []))
    assert first["messages"] == [{"role": "user", "content": 'Say "hi"\n'}]
    assert first["max_tokens"] == 9
    again = json.loads(bodies.body(one.turns[1], bodies.said(one.turns[0], 'h"i')))
    assert [message["content"] for message in again["messages"]] == ['Say "hi"\n', 'h"i', "Again"]


def test_a_file_of_requests_is_sent_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "timestamp": 4.5, "top_p": 0.5}\n\n'
    )
    spec = scenario(workload={"kind": "requests", "path": str(path)}, ignore_eos=False)
    (one,) = requests(spec.workload).conversations  # type: ignore[arg-type]
    assert one.due_s == 4.5
    body = json.loads(Bodies(spec, "m", b" ").body(one.turns[0], []))
    assert body == {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "top_p": 0.5, "model": "m", "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    path.write_text('{"messages": []}\n[1]\n')
    with pytest.raises(ScenarioError, match="line 2"):
        requests(spec.workload)  # type: ignore[arg-type]


def test_token_prompts_are_lists_of_ids() -> None:
    spec = scenario(endpoint="completions", prompt="tokens", vocabulary=50)
    work, source = Synthetic(input_tokens=9, output_tokens=2), np.random.default_rng(0)
    made = next(synthetic(work, TokenIds(50), source, overhead=0, max_context=None))
    assert made is not None
    body = json.loads(Bodies(spec, "m", b",").body(made.turns[0], []))
    assert len(body["prompt"]) == 9
    assert all(0 <= token < 50 for token in body["prompt"])
    assert body["max_tokens"] == 2


def test_a_scenario_is_read_changed_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("name: one\nduration_s: 60\nload: {kind: open, rate: 4, gaps: gamma, burstiness: 0.5}\n")
    assert load(path, ["load.rate=8", "workload.input_tokens={min: 1, max: 9}"]).load.rate == 8.0  # type: ignore[union-attr]
    assert load(path, ["load.kind=closed", "load.concurrency=3"]).load.concurrency == 3  # type: ignore[union-attr]
    for change, message in {
        "load.rat=8": "load: Object contains unknown field `rat`",
        "load.rate=0": "load.rate: Expected `float` > 0",
        "prompt=tokens": "prompt tokens needs endpoint completions",
        "load.kind=replay": "needs a workload with times",
        "duration_s=": "say how long",
        "workload.prefix_tokens=5": "needs workload.prefixes",
        "load": "not NAME=VALUE",
        "load.rate={": "--set load.rate={: ",
        "workload.kind=nothing": "workload.kind: Invalid value 'nothing'",
    }.items():
        with pytest.raises(ScenarioError, match=message.replace("(", r"\(")):
            load(path, [change])


def test_a_trace_is_replayed_unless_another_load_is_named() -> None:
    spec = scenario(workload={"kind": "trace", "format": "azure", "path": "x"})
    assert spec.load.__class__.__name__ == "Replay"
    assert scenario().load.__class__.__name__ == "Closed"


def test_the_same_seed_is_the_same_workload_and_another_is_another() -> None:
    first, again, other = (
        [text(one) for one in islice(make(scenario(seed=seed), TEXT, None, 0, None)[0], 20)] for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "loadtest" / "scenarios").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_scenario_of_ours_can_be_run(path: Path, tmp_path: Path) -> None:
    trace_file = mooncake(tmp_path / "trace", [(0, 600, [1, 2]), (1, 700, [1, 3])])
    if path.stem == "azure":
        trace_file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    traced = path.stem in ("azure", "mooncake")
    spec = load(path, [f"workload.path={trace_file}"] if traced else [])
    assert (spec.name, bool(spec.about)) == (path.stem, True)
    pieces = TokenIds(spec.vocabulary) if spec.prompt == "tokens" else TEXT
    made = list(islice(make(spec, pieces, None, 20, 40_000)[0], 5))
    assert made
    bodies = Bodies(spec, "m", pieces.joiner)
    for conversation in made:
        body = json.loads(bodies.body(conversation.turns[0], []))
        assert ("messages" in body) == (spec.endpoint == "chat")
