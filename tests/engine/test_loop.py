"""What the engine loop does with messages: one ending each, whatever arrives when."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.harness import EngineUnderTest
from mizzen.errors import EngineDead
from mizzen.ipc.messages import AbortRequest, GenerateRequest, StopChoice
from tiny import EOS_TOKEN_IDS, make_tiny_model

FOREVER: dict[str, Any] = {"ignore_eos": True, "max_tokens": 400}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, "llama")
    return folder


@pytest.fixture(params=[0, 1, 2])
def engine(model: Path, request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    made = EngineUnderTest(model, overlap_depth=request.param, page_size=4, max_running_requests=8)
    yield made
    made.close()


def test_an_abort_ends_the_request_within_a_step(engine: EngineUnderTest) -> None:
    engine.submit("a", [5, 6, 7], sampling=FOREVER)
    engine.submit("b", [5, 6, 8], sampling={"max_tokens": 30, "ignore_eos": True})
    for _ in range(6):
        engine.step()
    engine.inbox.send(AbortRequest("a"))
    engine.step()
    ended = engine.answers["a", 0].ended
    assert ended is not None
    assert ended.reason == "abort"
    engine.run()
    assert len(engine.answers["b", 0].token_ids) == 30


def test_an_abort_of_a_waiting_request_and_of_an_unknown_one(engine: EngineUnderTest) -> None:
    for number in range(12):  # four wait for a slot
        engine.submit(f"r{number}", [5, 6, number + 3], sampling={"max_tokens": 20, "ignore_eos": True})
    engine.step()
    engine.inbox.send(AbortRequest("r11"))
    engine.inbox.send(AbortRequest("nobody"))
    engine.run()
    assert engine.answers["r11", 0].token_ids == []
    assert all(len(engine.answers[f"r{number}", 0].token_ids) == 20 for number in range(11))


def test_a_stop_ends_one_choice_and_not_the_other(engine: EngineUnderTest) -> None:
    engine.submit("a", [5, 6, 7], index=0, sampling={**FOREVER, "max_tokens": 40})
    engine.submit("a", [5, 6, 7], index=1, sampling={**FOREVER, "max_tokens": 40})
    for _ in range(6):
        engine.step()
    handle = next(handle for handle, key in engine._keys.items() if key == ("a", 0))
    engine.inbox.send(StopChoice(handle))
    engine.inbox.send(StopChoice(handle))
    engine.run()
    first, second = engine.answers["a", 0].ended, engine.answers["a", 1].ended
    assert first is not None
    assert second is not None
    assert (first.reason, second.reason) == ("stop", "length")
    assert first.completion_tokens < 40 == second.completion_tokens


def test_a_deadline_ends_a_request_with_its_own_error(engine: EngineUnderTest) -> None:
    engine.submit("late", [5, 6, 7], sampling=FOREVER, deadline_s=time.monotonic() + 0.05)
    engine.submit("free", [5, 6, 7], sampling={"max_tokens": 10, "ignore_eos": True})
    engine.run(lambda _: time.sleep(0.002))
    ended = engine.answers["late", 0].ended
    assert ended is not None
    assert ended.error is not None
    assert (ended.reason, ended.error.status, ended.error.code) == ("error", 504, "request_timeout")
    assert len(engine.answers["free", 0].token_ids) == 10


def test_a_request_of_another_epoch_is_dropped(engine: EngineUnderTest) -> None:
    engine.inbox.send(GenerateRequest("old", 0, 0, 0, b"\x05\0\0\0", sampling=None, arrival_s=0.0))  # type: ignore[arg-type]
    engine.run()
    assert engine.answers == {}


def test_the_death_of_an_api_ends_only_its_requests(engine: EngineUnderTest) -> None:
    engine.submit("mine", [5, 6, 7], sampling=FOREVER)
    engine.step()
    engine.loop.abort_api(1)
    engine.step()
    assert engine.answers["mine", 0].ended is None
    engine.loop.abort_api(0)
    engine.run()
    assert engine.answers["mine", 0].ended is not None


def test_all_end_with_an_error_when_the_detokenizer_dies(engine: EngineUnderTest) -> None:
    for number in range(12):
        engine.submit(f"r{number}", [5, 6, 7], sampling=FOREVER)
    engine.step()
    engine.loop.abort_all("The detokenizer was restarted.")
    engine.run()
    for answer in engine.answers.values():
        assert answer.ended is not None
        assert answer.ended.error is not None
        assert answer.ended.error.code == "engine_restarted"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_every_eos_id_ends_a_request_unless_ignored(engine: EngineUnderTest, ignore_eos: bool) -> None:
    for eos in EOS_TOKEN_IDS:
        engine.submit(
            f"eos-{eos}", [9, 9], sampling={"logit_bias": {eos: 100.0}, "max_tokens": 5, "ignore_eos": ignore_eos}
        )
    engine.run()
    for eos in EOS_TOKEN_IDS:
        answer = engine.answers[f"eos-{eos}", 0]
        assert answer.ended is not None
        if ignore_eos:
            assert (answer.ended.reason, answer.token_ids) == ("length", [eos] * 5)
        else:
            assert (answer.ended.reason, answer.ended.stop_token_id, answer.token_ids) == ("stop", eos, [eos])


def test_min_tokens_holds_eos_and_stop_tokens_back(engine: EngineUnderTest) -> None:
    bias = {"logit_bias": {EOS_TOKEN_IDS[0]: 100.0, 77: 90.0}, "stop_token_ids": (77,), "max_tokens": 10}
    engine.submit("held", [9, 9], sampling={**bias, "min_tokens": 4})
    engine.submit("free", [9, 9], sampling=bias)
    engine.run()
    held, free = engine.answers["held", 0], engine.answers["free", 0]
    assert free.token_ids == [EOS_TOKEN_IDS[0]]
    assert len(held.token_ids) == 5
    assert not {77, *EOS_TOKEN_IDS} & set(held.token_ids[:4])


def test_logprobs_belong_to_their_requests_when_others_end(engine: EngineUnderTest) -> None:
    for number in range(6):
        sampling = {"max_tokens": 3 + number, "ignore_eos": True, **({"logprobs": number % 3} if number % 2 else {})}
        engine.submit(f"r{number}", [5, 6, 7 + number], sampling=sampling)
    engine.run()
    for number in range(6):
        answer = engine.answers[f"r{number}", 0]
        assert len(answer.token_ids) == 3 + number
        if number % 2:
            assert len(answer.logprobs) == len(answer.token_ids)
            for token, chosen, top in zip(answer.token_ids, answer.logprobs, answer.tops, strict=True):
                assert chosen <= 0
                if number % 3:
                    assert top[0] == (token, pytest.approx(chosen, abs=1e-5))  # greedy: the most likely one
        else:
            assert answer.logprobs == []


def test_random_arrivals_and_aborts_end_each_request_once(engine: EngineUnderTest) -> None:
    random_ = random.Random(5)
    alive: list[str] = []

    def disturb(turn: int) -> None:
        if turn < 150:
            if random_.random() < 0.5:
                name = f"r{turn}"
                prompt = [random_.randrange(3, 6) for _ in range(random_.randrange(1, 30))]
                engine.submit(name, prompt, sampling={"max_tokens": random_.randrange(1, 20), "temperature": 1.0})
                alive.append(name)
            if alive and random_.random() < 0.3:
                engine.inbox.send(AbortRequest(alive.pop(random_.randrange(len(alive)))))

    for turn in range(150):
        disturb(turn)
        engine.step()
    engine.run()
    assert len(engine.answers) > 50
    assert all(answer.ended is not None for answer in engine.answers.values())


def test_a_failure_on_the_device_ends_the_loop(model: Path) -> None:
    engine = EngineUnderTest(model, overlap_depth=1)

    def broken(*_: Any) -> torch.Tensor:
        raise EngineDead("the device is lost")

    engine.rank.runner._executor.run = broken  # type: ignore[method-assign]
    engine.submit("a", [5, 6, 7])
    with pytest.raises(EngineDead, match="the device is lost"):
        engine.run()
    engine.close()
