"""Messages become the text that transformers would make of them; what a template does wrong is a 400."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizer_samples as samples

from mizzen.errors import ConfigError, InvalidRequest
from mizzen.ipc.messages import ChatPrompt
from mizzen.tokenizer.chat_template import ChatTemplate, load_chat_template
from mizzen.tokenizer.hf import HFTokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if strftime_now is defined %}
    {%- set year = strftime_now("%Y") %}
{%- endif %}
{%- if tools is not none and tools is defined %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- if loop.index0 > 3 %}{%- break %}{%- endif %}
            {{- call.function.name + call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- generation %}
    {{- '<|assistant|>' }}
    {%- endgeneration %}
{%- endif %}
"""
PARTS = """{% for message in messages %}{{ message.role }}:
{% for part in message['content'] %}{% if part['type'] == 'text' %}[{{ part['text'] }}]{% endif %}{% endfor %}
{% endfor %}"""
EITHER = """{% macro show(content) %}{% if content is string %}({{ content }}){% else %}
{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endmacro %}
{% for message in messages %}{{ show(message.content) }}{% endfor %}"""

TOOLS = [{"type": "function", "function": {"name": "add", "description": "“a<b”", "parameters": {"z": 1, "a": 2}}}]
USER = {"role": "user", "content": "Hello"}
TALK = [{"role": "system", "content": " Be <brief>. "}, USER, {"role": "assistant", "content": "  Par is"}]


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special_tokens, setting="MIZZEN_CHAT_TEMPLATE")


def render(source: str, *messages: dict[str, Any], **kwargs: Any) -> str:
    return template(source, bos_token="<s>").render(ChatPrompt(list(messages), template_kwargs=kwargs))


@pytest.mark.parametrize("source", [CHATML, LLAMA, PARTS, EITHER], ids=["chatml", "llama", "parts", "either"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(source: str, add_generation_prompt: bool, tools: list[Any] | None) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = TALK
    if source is PARTS:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    [expected], _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, bos_token="<s>"
    )
    kwargs = {"tools": tools} if tools else {"tools": None}
    prompt = ChatPrompt(messages, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs)
    assert template(source, bos_token="<s>").render(prompt) == expected


@pytest.mark.parametrize("source", [CHATML, LLAMA])
@pytest.mark.parametrize("final", ["Par", "  Par is ", "", "\n", "Hello"])
def test_a_continued_message_ends_the_text(source: str, final: str) -> None:
    messages = [USER, {"role": "assistant", "content": final}]
    prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    text = template(source).render(prompt)
    start = "<|im_start|>assistant\n" if source is CHATML else "<|assistant|>"
    assert text.endswith(start + (final if source is CHATML else final.lstrip()))
    assert "Hello<|" in text


def test_a_message_in_parts_can_be_continued() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    prompt = ChatPrompt([{"role": "assistant", "content": parts}], False, True)
    assert template(PARTS).render(prompt) == "assistant:\n[one][two"
    assert template(CHATML).render(prompt).endswith("one\ntwo")


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template("{{ messages[0].content }}").render(ChatPrompt([USER, USER], False, True))


def test_continuing_and_a_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="exclude each other"):
        template(CHATML).render(ChatPrompt([USER], True, True))


def test_parts_are_joined_for_a_template_that_wants_text() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<" in render(CHATML, {"role": "user", "content": content})


def test_text_becomes_a_part_for_a_template_that_wants_parts_only() -> None:
    assert "[Hello]" in render(PARTS, USER)
    assert render(EITHER, USER).endswith("(Hello)")
    assert render(EITHER, {"role": "user", "content": [{"type": "text", "text": "x"}]}).endswith("[x]")


@pytest.mark.parametrize(
    "content", [3, [3], [{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], {"type": "text"}]
)
def test_content_that_is_not_text_is_refused(content: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(CHATML, {"role": "user", "content": content})
    assert caught.value.param == "messages"


def test_a_developer_is_the_system_where_the_template_knows_no_developer() -> None:
    message = {"role": "developer", "content": "x"}
    assert render("{{ messages[0].role }}", message) == "system"
    assert render("{{ messages[0].role }}{# developer #}", message) == "system"
    assert render("{% if messages[0].role == 'developer' %}dev{% endif %}", message) == "dev"


def test_null_content_is_empty_text_and_arguments_are_an_object() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"b": 1, "a": "é"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert 'add{"b": 1, "a": "é"}' in render(LLAMA, message)
    assert call["function"]["arguments"] == '{"b": 1, "a": "é"}'  # the caller's message is not changed
    call["function"]["arguments"] = "{oops"
    with pytest.raises(InvalidRequest, match="arguments are not JSON"):
        render(LLAMA, message)


def test_template_kwargs_reach_the_template_but_do_not_replace_its_input() -> None:
    assert render("{{ enable_thinking }}", USER, enable_thinking=False) == "False"
    with pytest.raises(InvalidRequest, match="may not set 'messages'"):
        render("{{ messages }}", USER, messages=[])


def test_the_tool_template_is_used_when_there_are_tools() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "tools"}, {}, setting="MIZZEN_CHAT_TEMPLATE")
    assert both.render(ChatPrompt([USER])) == "plain"
    assert both.render(ChatPrompt([USER], template_kwargs={"tools": TOOLS})) == "tools"


def test_strftime_now_is_the_time_of_the_request() -> None:
    assert render("{{ strftime_now('%Y') }}", USER) == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", "nothing"),
        ("{{ messages[0]['content'] + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ undefined_thing | tojson }}", "Undefined"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    ],
)
def test_a_template_that_fails_is_an_invalid_request(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        render(source, USER)
    assert caught.value.status == 400


def test_a_model_without_template_refuses_chat_and_names_the_way_out(byte_level: HFTokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template.*MIZZEN_CHAT_TEMPLATE"):
        load_chat_template(byte_level, None).render(ChatPrompt([USER]))


def test_no_message_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        render(CHATML)


def test_a_custom_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    model = samples.load(tmp_path / "model", samples.byte_level(), chat_template="model's", eos_token="<|im_end|>")
    file = tmp_path / "custom.jinja"
    file.write_text("file {{ eos_token }}")
    assert load_chat_template(model, None).render(ChatPrompt([USER])) == "model's"
    assert load_chat_template(model, str(file)).render(ChatPrompt([USER])) == "file <|im_end|>"
    assert load_chat_template(model, "text {{ eos_token }}").render(ChatPrompt([USER])) == "text <|im_end|>"


@pytest.mark.parametrize("custom", ["/no/such/file", "x" * 5000, "{% if %}", "{% nonsense %}"])
def test_a_bad_custom_template_names_the_setting(byte_level: HFTokenizer, custom: str) -> None:
    with pytest.raises(ConfigError, match="MIZZEN_CHAT_TEMPLATE"):
        load_chat_template(byte_level, custom)
