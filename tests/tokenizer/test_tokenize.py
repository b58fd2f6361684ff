"""One request becomes one GenerateRequest a choice, or one refusal."""

from typing import Any

import numpy as np
import pytest
import tokenizer_samples as samples

from mizzen.errors import InvalidRequest, RequestTooLong
from mizzen.ipc.messages import ChatPrompt, Prompt, TextPrompt, TokenizeRequest, TokenPrompt
from mizzen.sampling_params import SamplingParams
from mizzen.tokenizer.chat_template import ChatTemplate
from mizzen.tokenizer.hf import HFTokenizer
from mizzen.tokenizer.tokenize import Tokenize
from mizzen.tokenizer.tokenize_worker import answer_request

VOCAB_SIZE = 512


@pytest.fixture
def tokenize(byte_level: HFTokenizer) -> Tokenize:
    template = ChatTemplate({"default": "{{ messages[0].content }}!"}, {}, setting="MIZZEN_CHAT_TEMPLATE")
    return Tokenize(byte_level, template, VOCAB_SIZE)


def request(*prompts: Prompt, max_model_len: int = 64, **sampling: Any) -> TokenizeRequest:
    return TokenizeRequest(
        request_id="r",
        api=1,
        epoch=7,
        prompts=list(prompts),
        sampling=SamplingParams(**sampling),
        max_model_len=max_model_len,
        arrival_s=1.5,
        deadline_s=9.0,
        priority=3,
        cache_salt="salt",
        return_token_ids=True,
    )


def tokens(*token_ids: int) -> TokenPrompt:
    return TokenPrompt(np.array(token_ids, np.int32).tobytes())


def ids(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def test_every_prompt_has_n_choices_with_seeds_of_their_own(tokenize: Tokenize) -> None:
    generate, accepted = tokenize(request(tokens(5), tokens(6, 7), n=3, seed=40))
    assert [choice.index for choice in generate] == [0, 1, 2, 3, 4, 5]
    assert [choice.sampling.seed for choice in generate] == [40, 41, 42] * 2
    assert [ids(choice.token_ids) for choice in generate] == [[5]] * 3 + [[6, 7]] * 3
    assert {choice.sampling.n for choice in generate} == {1}
    assert accepted.prompt_tokens == [1, 2]


def test_all_else_is_carried_over(tokenize: Tokenize) -> None:
    [choice], accepted = tokenize(request(tokens(5), temperature=0.5, stop=("x",)))
    assert (choice.request_id, choice.api, choice.epoch, choice.arrival_s, choice.deadline_s) == ("r", 1, 7, 1.5, 9.0)
    assert (choice.priority, choice.cache_salt, choice.return_token_ids) == (3, "salt", True)
    assert (choice.sampling.temperature, choice.sampling.stop, choice.sampling.seed) == (0.5, ("x",), None)
    assert accepted.request_id == "r"


def test_the_largest_seed_wraps_into_64_bits(tokenize: Tokenize) -> None:
    generate, _ = tokenize(request(tokens(5), n=2, seed=2**63 - 1))
    assert [choice.sampling.seed for choice in generate] == [2**63 - 1, -(2**63)]


def test_choices_share_one_encode(tokenize: Tokenize, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = HFTokenizer.encode

    def spy(self: HFTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(HFTokenizer, "encode", spy)
    generate, _ = tokenize(request(TextPrompt("abc"), n=128))
    assert len(generate) == 128
    assert encoded == ["abc"]


@pytest.mark.parametrize(
    ("asked", "min_tokens", "expected"),
    [(None, 0, (60, 0)), (10, 10, (10, 10)), (2**62, 0, (60, 0)), (100, 90, (60, 60))],
)
def test_max_tokens_is_at_most_what_the_context_has_left(
    tokenize: Tokenize, asked: int | None, min_tokens: int, expected: tuple[int, int]
) -> None:
    [choice], _ = tokenize(request(tokens(1, 2, 3, 4), max_tokens=asked, min_tokens=min_tokens))
    assert (choice.sampling.max_tokens, choice.sampling.min_tokens) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (tokens(*range(64)), "prompt"),
        (TextPrompt("z " * 40), "prompt"),
        (ChatPrompt([{"content": "z " * 40}]), "messages"),
    ],
)
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    tokenize: Tokenize, prompt: Prompt, param: str
) -> None:
    with pytest.raises(RequestTooLong, match=r"64 tokens.*prompt has (64|80|81) tokens") as caught:
        tokenize(request(prompt))
    assert caught.value.param == param


def test_a_prompt_one_below_the_context_has_room_for_one_token(tokenize: Tokenize) -> None:
    [choice], _ = tokenize(request(tokens(*range(63))))
    assert choice.sampling.max_tokens == 1


def test_a_hopelessly_long_text_is_refused_unread(tokenize: Tokenize, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFTokenizer, "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(RequestTooLong, match=r"64 tokens, but the prompt has at least \d+ tokens"):
        tokenize(request(TextPrompt("a" * 1_000_000)))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (tokens(), "empty"),
        (TextPrompt(""), "empty"),
        (tokens(-1), "token id -1"),
        (tokens(1, VOCAB_SIZE), "token id 512"),
        (TokenPrompt(b"abc"), "32-bit"),
        (TextPrompt("\ud800"), "surrogate"),
        (ChatPrompt([]), "empty"),
        (ChatPrompt([{"content": "\udfff"}]), "surrogate"),
    ],
)
def test_a_bad_prompt_is_refused(tokenize: Tokenize, prompt: Prompt, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        tokenize(request(tokens(1), prompt))
    assert caught.value.param == ("messages" if isinstance(prompt, ChatPrompt) else "prompt")


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
        ({"stop": ("x" * 1025,)}, "stop"),
        ({"n": 0}, "n"),
    ],
)
def test_bad_sampling_is_refused(tokenize: Tokenize, sampling: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokenize(request(tokens(1), **sampling))
    assert caught.value.param == param


def test_no_prompt_is_refused(tokenize: Tokenize) -> None:
    with pytest.raises(InvalidRequest, match="no prompt"):
        tokenize(request())


def test_a_text_of_the_users_tokens_beyond_the_model_is_refused(byte_level: HFTokenizer) -> None:
    """A tokenizer may know more tokens than the model has rows: such an id would index beyond the embedding."""
    template = ChatTemplate({}, {}, setting="MIZZEN_CHAT_TEMPLATE")
    with pytest.raises(InvalidRequest, match="not in the vocabulary of 300 tokens"):
        Tokenize(byte_level, template, 300)(request(TextPrompt("a<think>")))


def test_chat_has_exactly_the_bos_that_its_template_writes(byte_fallback: HFTokenizer) -> None:
    template = ChatTemplate({"default": "{{ bos_token }}{{ messages[0].content }}"}, {"bos_token": "<s>"}, setting="X")
    tokenize = Tokenize(byte_fallback, template, VOCAB_SIZE)
    chat, text = tokenize(request(ChatPrompt([{"role": "user", "content": "abc"}]), TextPrompt("abc")))[0]
    assert ids(chat.token_ids).count(1) == 1
    assert ids(text.token_ids).count(1) == 1


def test_a_bug_met_by_one_request_is_a_500_of_that_request(tokenize: Tokenize, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a secret of the server")

    monkeypatch.setattr(HFTokenizer, "encode", fail)
    generate, refused = answer_request(tokenize, request(TextPrompt("abc")))
    assert generate == []
    assert refused.error.status == 500  # type: ignore[union-attr]
    assert "secret" not in refused.error.message  # type: ignore[union-attr]


def test_samples_have_the_vocabulary_that_these_tests_assume(byte_level: HFTokenizer) -> None:
    assert byte_level.encode("<think>") == [samples.byte_level().token_to_id("<think>")]
    assert 300 < byte_level.encode("<think>")[0] < VOCAB_SIZE
