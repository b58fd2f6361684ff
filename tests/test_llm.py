"""The offline API on the real model."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from mizzen import LLM, SamplingParams
from mizzen.errors import ConfigError, InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, threads=1, max_model_len=512) as made:
        yield made


def test_text_and_token_prompts_give_tokens_and_reasons_in_their_order(llm: LLM) -> None:
    outputs = llm.generate(["The capital of France is", [504, 3575, 282, 4649, 314]], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["The capital of France is", None]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids == [504, 3575, 282, 4649, 314]
    for output in outputs:
        (choice,) = output.choices
        assert choice.text.startswith(" Paris.")
        assert choice.token_ids[0] == 7042
        assert len(choice.token_ids) == 8
        assert choice.finish_reason == "length"


def test_chat_ends_with_the_eos_token(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=30),
        use_tqdm=False,
    )
    choice = output.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("The capital of France is Paris.", "stop", None)
    assert choice.token_ids[-1] == 2


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=3), SamplingParams(temperature=0, max_tokens=40, stop=("The",))]
    first, second = llm.generate(["The capital of France is"] * 2, params, use_tqdm=False)
    assert len(first.choices[0].token_ids) == 3
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].stop_reason == "The"
    assert second.choices[0].text == " Paris.\n\n"


def test_n_choices_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, n=3, logprobs=1)
    (output,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
    assert [choice.index for choice in output.choices] == [0, 1, 2]
    assert len({choice.text for choice in output.choices}) > 1
    for choice in output.choices:
        assert choice.logprobs is not None
        assert [entry.token_id for entry in choice.logprobs] == choice.token_ids


def test_a_refused_prompt_generates_nothing_and_the_next_call_works(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="512"):
        llm.generate(["good", [5] * 600], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate([[2**40]], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].choices[0].text.startswith(" Paris")


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="MIZZEN_MODEL"):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match="MIZZEN_PAGE_SIZE"):
        LLM("/nowhere/at/all", page_size=1000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_ranks_generate_what_one_does(smollm2: Path, llm: LLM) -> None:
    prompts = ["The capital of France is", "Water boils at", "Once upon a time", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=24)
    alone = llm.generate(prompts, params, use_tqdm=False)
    with LLM(smollm2, threads=1, max_model_len=512, tensor_parallel_size=3) as ranks:
        together = ranks.generate(prompts, params, use_tqdm=False)
    assert [output.choices[0].token_ids for output in together] == [output.choices[0].token_ids for output in alone]


def test_the_other_ranks_end_even_if_this_rank_s_device_has_failed() -> None:
    """As after a CUDA error, which every later call of CUDA raises again."""
    llm = object.__new__(LLM)
    llm._closed = False
    llm._loop, llm._ranks, llm._group = loop, ranks, group = Mock(), Mock(alive=True), Mock()
    loop.close.side_effect = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        llm.close()
    ranks.close.assert_called_once_with()
    group.abandon.assert_called_once_with()
    assert not group.close.called
