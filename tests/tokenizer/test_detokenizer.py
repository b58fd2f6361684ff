"""Steps of the engine become deltas: all text once, one Finish a choice, nothing remembered afterwards."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_incremental import BYTE_LEVEL

from mizzen.errors import EngineRestarted
from mizzen.ipc.messages import (
    ChoiceEnded,
    ChoiceStarted,
    Delta,
    Finish,
    StepOutput,
    StopChoice,
    Timings,
    TopLogprobs,
)
from mizzen.tokenizer.detokenizer import Detokenizer

EOS = 2  # <|im_end|>
TEXT = "The quick brown fox: naïve café 漢字 👩‍👩‍👧‍👦!"
IDS = BYTE_LEVEL.encode(TEXT)


def start(handle: int, api: int = 0, **options: Any) -> ChoiceStarted:
    return ChoiceStarted(handle, f"r{handle}", 0, api, prompt_tokens=11, **options)


def end(handle: int, reason: Any = "length", count: int = 0, **options: Any) -> ChoiceEnded:
    return ChoiceEnded(handle, reason, count, **options)


def step(tokens: dict[int, int] | None = None, epoch: int = 1, **options: Any) -> StepOutput:
    tokens = tokens or {}
    return StepOutput(
        epoch,
        handles=np.array(list(tokens), np.int64).tobytes(),
        token_ids=np.array(list(tokens.values()), np.int32).tobytes(),
        **options,
    )


class Client:
    """A detokenizer and what it has said, by request id."""

    def __init__(self) -> None:
        self.detokenizer = Detokenizer(BYTE_LEVEL, (EOS,))
        self.deltas: list[Delta] = []
        self.stops: list[int] = []

    def handle(self, *outputs: StepOutput) -> list[Delta]:
        by_api, stops = self.detokenizer.handle(*outputs)
        new = [delta for items in by_api.values() for delta in items]
        self.deltas += new
        self.stops += [stop.handle for stop in stops]
        return new

    def text(self, handle: int) -> str:
        return "".join(delta.text for delta in self.deltas if delta.request_id == f"r{handle}")

    def finish(self, handle: int) -> Finish:
        [finish] = [d.finish for d in self.deltas if d.request_id == f"r{handle}" and d.finish is not None]
        finish.timings.detokenize_s = finish.timings.detokenized_s = None  # when, is this machine's affair
        return finish


@pytest.fixture
def client() -> Client:
    client = Client()
    client.handle(StepOutput(1, reset=True))
    return client


def test_a_choice_streams_its_text_and_finishes_once(client: Client) -> None:
    client.handle(step(started=[start(1)]))
    for token in IDS:
        client.handle(step({1: token}))
    timings = Timings(arrival_s=1.0, last_token_s=2.0)
    client.handle(step(ended=[end(1, "length", len(IDS), cached_tokens=8, timings=timings)]))
    assert client.text(1) == TEXT
    assert not any("�" in delta.text for delta in client.deltas)
    assert client.finish(1) == Finish("length", 11, len(IDS), 8, timings=timings)
    assert sum(delta.num_tokens for delta in client.deltas) == len(IDS)
    assert client.detokenizer.is_empty


def test_steps_that_arrive_together_make_one_delta_a_choice(client: Client) -> None:
    steps = [step({1: token, 2: token}) for token in IDS[:5]]
    deltas = client.handle(step(started=[start(1), start(2)]), *steps)
    assert [(delta.request_id, delta.num_tokens) for delta in deltas] == [("r1", 5), ("r2", 5)]
    assert deltas[0].text == BYTE_LEVEL.decode(IDS[:5])


def test_deltas_go_to_the_api_that_asked(client: Client) -> None:
    by_api, _ = client.detokenizer.handle(step({1: IDS[0], 2: IDS[0]}, started=[start(1, api=0), start(2, api=3)]))
    assert {api: [d.request_id for d in items] for api, items in by_api.items()} == {0: ["r1"], 3: ["r2"]}


def test_half_a_character_waits_for_its_other_half_and_its_count_too(client: Client) -> None:
    first, *rest = BYTE_LEVEL.encode("ह")
    assert client.handle(step({1: first}, started=[start(1)])) == []
    [delta] = [d for token in rest for d in client.handle(step({1: token}))]
    assert (delta.text, delta.num_tokens) == ("ह", 1 + len(rest))


def test_half_a_character_at_the_end_is_given_out_as_decode_does(client: Client) -> None:
    first = BYTE_LEVEL.encode("ह")[0]
    client.handle(step({1: first}, started=[start(1)], ended=[end(1, "length", 1)]))
    assert client.text(1) == "�" == BYTE_LEVEL.decode([first])


# ---- stop tokens ----


def test_the_eos_token_has_no_text_and_no_stop_reason_but_counts(client: Client) -> None:
    options = {"skip_special_tokens": False, "return_token_ids": True}
    client.handle(step({1: IDS[0]}, started=[start(1, **options)]))
    client.handle(step({1: EOS}, ended=[end(1, "stop", 2, stop_token_id=EOS)]))
    assert client.text(1) == BYTE_LEVEL.decode(IDS[:1])
    assert client.finish(1) == Finish("stop", 11, 2)
    assert [token for delta in client.deltas for token in delta.token_ids] == [IDS[0], EOS]
    assert sum(delta.num_tokens for delta in client.deltas) == 2


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_the_stop_reason_and_has_text_only_if_asked(client: Client, include: bool) -> None:
    [token] = BYTE_LEVEL.encode("<think>")
    client.handle(step(started=[start(1, include_stop_str_in_output=include)]))
    client.handle(step({1: IDS[0]}), step({1: token}, ended=[end(1, "stop", 2, stop_token_id=token)]))
    assert client.text(1) == BYTE_LEVEL.decode(IDS[:1]) + ("<think>" if include else "")
    assert client.finish(1) == Finish("stop", 11, 2, stop_reason=token)


def test_an_ignored_eos_has_the_text_of_any_token(client: Client) -> None:
    client.handle(step({1: EOS}, started=[start(1, skip_special_tokens=False), start(2)]), step({2: EOS}))
    assert (client.text(1), client.text(2)) == ("<|im_end|>", "")


# ---- stop strings ----


def test_a_stop_string_cuts_the_text_and_stops_the_choice_once(client: Client) -> None:
    client.handle(step(started=[start(1, stop=("fox",), return_token_ids=True)]))
    for token in IDS:
        client.handle(step({1: token}))
    assert client.text(1) == "The quick brown "
    assert client.stops == [1]
    assert not any(delta.finish for delta in client.deltas)
    client.handle(step(ended=[end(1, "abort", len(IDS))]))
    used = next(n for n in range(len(IDS)) if "fox" in BYTE_LEVEL.decode(IDS[:n]))
    assert client.finish(1) == Finish("stop", 11, used, stop_reason="fox")
    assert [token for delta in client.deltas for token in delta.token_ids] == IDS[:used]
    assert client.detokenizer.is_empty


@pytest.mark.parametrize("reason", ["length", "stop", "abort", "error"])
def test_a_stop_string_is_the_reason_whatever_the_engine_says_meanwhile(client: Client, reason: str) -> None:
    error = EngineRestarted("x").wire() if reason == "error" else None
    client.handle(step({1: IDS[0]}, started=[start(1, stop=("The",))], ended=[end(1, reason, 5, error=error)]))
    finish = client.finish(1)
    assert (finish.reason, finish.stop_reason, finish.completion_tokens, finish.error) == ("stop", "The", 1, None)


def test_text_that_may_begin_a_stop_string_is_given_out_at_the_end(client: Client) -> None:
    client.handle(step(started=[start(1, stop=("The slow",))]))
    assert [d for token in IDS[:1] for d in client.handle(step({1: token}))] == []
    client.handle(step(ended=[end(1, "length", 1)]))
    assert client.text(1) == BYTE_LEVEL.decode(IDS[:1])
    assert client.deltas[-1].num_tokens == 1


def test_a_stop_string_is_kept_if_asked(client: Client) -> None:
    client.handle(step(started=[start(1, stop=("fox",), include_stop_str_in_output=True)]))
    client.handle(*(step({1: token}) for token in IDS))
    assert client.text(1) == "The quick brown fox"


def test_stop_strings_wait_for_min_tokens(client: Client) -> None:
    client.handle(step(started=[start(1, stop=("a",), min_tokens=4)]))
    token = BYTE_LEVEL.encode("a")[0]
    client.handle(*(step({1: token}) for _ in range(6)))
    assert client.text(1) == "aaa"
    client.handle(step(ended=[end(1, "stop", 6)]))
    assert client.finish(1).completion_tokens == 4


def test_an_eos_that_arrives_with_the_stop_string_changes_nothing(client: Client) -> None:
    fox = BYTE_LEVEL.encode("fox")
    client.handle(step(started=[start(1, stop=("fox",))]), *(step({1: token}) for token in fox))
    client.handle(step({1: EOS}, ended=[end(1, "stop", len(fox) + 1, stop_token_id=EOS)]))
    assert client.finish(1) == Finish("stop", 11, len(fox), stop_reason="fox")


# ---- logprobs ----


def test_logprobs_have_a_token_each_and_the_width_that_was_asked_for(client: Client) -> None:
    a, b, c = (BYTE_LEVEL.encode(letter)[0] for letter in "abc")
    half = BYTE_LEVEL.encode("ह")[0]  # two of its three bytes
    top = TopLogprobs(
        handles=np.array([3, 1], np.int64).tobytes(),
        width=2,
        chosen=np.array([-3.0, -1.0], np.float32).tobytes(),
        token_ids=np.array([[c, a], [b, half]], np.int32).tobytes(),
        logprobs=np.array([[-0.5, -0.75], [-1.0, -2.0]], np.float32).tobytes(),
    )
    started = [start(1, logprobs=2), start(2), start(3, logprobs=0)]
    client.handle(step({1: b, 2: a, 3: a}, started=started, top_logprobs=top))
    [one], none, [three] = (delta.logprobs for delta in client.deltas)
    assert (one.text, one.raw, one.logprob, one.token_id) == ("b", b"b", -1.0, b)
    assert one.top == [("b", b"b", -1.0), ("�", "ह".encode()[:2], -2.0)]
    assert none == []
    assert (three.text, three.logprob, three.top) == ("a", -3.0, [])


# ---- failures ----


def test_tokens_of_unknown_choices_are_dropped_and_the_engine_is_asked_once_to_stop(client: Client) -> None:
    assert client.handle(step({9: IDS[0]}), step({9: IDS[1]})) == []
    client.handle(step({9: IDS[2]}))
    assert client.stops == [9]
    assert client.handle(step(ended=[end(9)])) == []
    assert client.detokenizer.is_empty


def test_another_epoch_is_dropped_and_a_reset_forgets_everything(client: Client) -> None:
    client.handle(step({1: IDS[0]}, started=[start(1, return_token_ids=True)]))
    deltas = client.handle(step({1: IDS[1]}), StepOutput(2, reset=True), step({1: IDS[2]}, epoch=1))
    assert deltas == []
    assert client.detokenizer.is_empty
    assert client.handle(step(epoch=1, started=[start(5)], ended=[end(5)])) == []
    client.handle(step({1: IDS[0]}, epoch=2, started=[start(1)]))
    assert client.text(1) == BYTE_LEVEL.decode([IDS[0]]) * 2


def test_a_restarted_detokenizer_takes_up_a_running_engine() -> None:
    client = Client()
    client.handle(step({1: IDS[0]}, epoch=4))
    client.handle(step({2: IDS[0]}, epoch=4, started=[start(2)], ended=[end(2, "length", 1)]))
    assert client.stops == [1]
    assert client.finish(2).completion_tokens == 1


def test_the_choices_of_a_dead_api_are_dropped(client: Client) -> None:
    client.handle(step(started=[start(1, api=0), start(2, api=1)]))
    client.detokenizer.drop_api(1)
    by_api, stops = client.detokenizer.handle(step({1: IDS[0], 2: IDS[0]}))
    assert list(by_api) == [0]
    assert stops == [StopChoice(2)]
    client.handle(step(ended=[end(1), end(2)]))
    assert client.detokenizer.is_empty


def test_a_handle_that_is_used_again_at_once_keeps_both_choices_apart(client: Client) -> None:
    client.handle(step({1: IDS[0]}, started=[start(1)]))
    second = ChoiceStarted(1, "r7", 0, 0, prompt_tokens=5)
    client.handle(step(ended=[end(1, "length", 1)]), step({1: IDS[1]}, started=[second]))
    assert client.finish(1).completion_tokens == 1
    assert client.text(7) == BYTE_LEVEL.decode([IDS[1]])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_run_gives_each_choice_its_text_and_one_finish(data: st.DataObject) -> None:
    """Choices with random tokens and stop strings, steps cut into random drains: equal to decoding each as a whole."""
    client = Client()
    count = data.draw(st.integers(1, 4))
    tokens = [data.draw(st.lists(st.integers(0, 510), min_size=1, max_size=12)) for _ in range(count)]
    started = [start(i, api=i % 2, return_token_ids=True) for i in range(count)]
    outputs = [StepOutput(1, reset=True), step(started=started)]
    for k in range(max(map(len, tokens))):
        rows = {i: tokens[i][k] for i in range(count) if k < len(tokens[i])}
        ended = [end(i, "length", k + 1) for i in rows if k + 1 == len(tokens[i])]
        outputs.append(step(rows, ended=ended))
    while outputs:
        size = data.draw(st.integers(1, len(outputs)))
        client.handle(*outputs[:size])
        outputs = outputs[size:]
    for i in range(count):
        mine = [delta for delta in client.deltas if delta.request_id == f"r{i}"]
        assert client.text(i) == BYTE_LEVEL.decode(tokens[i])
        assert [token for delta in mine for token in delta.token_ids] == tokens[i]
        assert sum(delta.num_tokens for delta in mine) == len(tokens[i])
        assert client.finish(i).completion_tokens == len(tokens[i])
        assert mine[-1].finish is not None
    assert client.detokenizer.is_empty


def test_a_finish_tells_when_the_first_token_came_and_the_last_text_left() -> None:
    ticks = iter((10.0, 11.0, 12.0, 13.0))
    detokenizer = Detokenizer(BYTE_LEVEL, (EOS,), clock=lambda: next(ticks))
    detokenizer.handle(StepOutput(1, reset=True))
    detokenizer.handle(step(started=[start(1), start(2)]))
    for token in IDS[:3]:
        detokenizer.handle(step({1: token}))
    deltas, _ = detokenizer.handle(step(ended=[end(1, "length", 3), end(2, "abort", 0)]))
    timings = [delta.finish.timings for delta in deltas[0] if delta.finish is not None]
    assert [(t.detokenize_s, t.detokenized_s) for t in timings] == [(10.0, 11.0), (None, 12.0)]
